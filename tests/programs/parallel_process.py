"""A vLLM engine of two ranks on a CPU, started by a test: `python parallel_process.py FOLDER...` prints what each rank found.

The CPU build packs its weights for its kernels, so each rank builds its part of the model anew, as a GPU has it.
"""

import json
import os
import sys
from pathlib import Path

from rlgraph.engines.vllm import arguments as engine_arguments

os.environ |= engine_arguments.ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def found(worker, config, folder: str) -> dict[str, int]:
    """Return, of one rank, how many versions a replay left as the loader does, and how many numbers it copies of how many."""
    import torch
    from safetensors.torch import load_file
    from support.tiny import other_weights
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from rlgraph.engines.copy_plan import record

    def model():
        config.compilation_config.static_forward_context.clear()  # a layer's name is taken once
        with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
            return initialize_model(vllm_config=config, model_config=config.model_config)

    weights = load_file(Path(folder) / "model.safetensors")
    replayed, loaded, equal = model(), model(), 0
    plan = record(replayed, weights)
    for seed in (1, 2, 3):
        version = other_weights(weights, seed)
        if plan is not None:
            plan.replay(version)
        loaded.load_weights(iter(version.items()))
        pairs = zip(replayed.parameters(), loaded.parameters(), strict=True)
        equal += all(torch.equal(a, b) for a, b in pairs)
    copied = sum(copy.to.numel() for copy in plan.copies) if plan is not None else 0
    return {"equal": equal, "copied": copied, "whole": sum(w.numel() for w in weights.values())}


def arguments(folder: str):
    from vllm import EngineArgs

    return EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=64,
        dtype="float32",
        tensor_parallel_size=2,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        worker_extension_cls="rlgraph.engines.vllm.weights.Extension",  # which the worker of a GPU is made with
        **engine_arguments.PARALLEL,
    )


def main(folders: list[str]) -> dict[str, list[dict[str, int]]]:
    """Return what the ranks found of each model; one engine serves all, since its start takes longest."""
    from vllm import LLMEngine

    engine = LLMEngine.from_engine_args(arguments(folders[0]))
    results = {folder: engine.collective_rpc(found, args=(arguments(folder).create_engine_config(), folder)) for folder in folders}
    engine.collective_rpc("forget_weights")  # the extension's
    engine.engine_core.shutdown()
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
