"""A process in which vLLM runs one tiny model after another with weights that a trainer published, started by a test:
`python vllm_families.py OUT FOLDER WEIGHTS [FOLDER WEIGHTS …]`."""

import copy
import gc
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.tiny import VLLM_PROMPTS as PROMPTS
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from rlgraph.engines import copy_plan
from rlgraph.engines.hf.pretrained import parameter_shapes
from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.values.sampling import Sampling

SEEDS = list(range(len(PROMPTS)))
FREE = Sampling(max_tokens=12, ignore_eos=True)


def replay_copies(engine: VllmEngine, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> str:
    """Record the copies of the model's own loader, replay them with other weights, and tell what the loader leaves otherwise."""
    models = []
    for weights in (first, second):
        config = copy.deepcopy(engine.llm.vllm_config)
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
            model = initialize_model(config)
        if not models:
            plan = copy_plan.record(model, weights)
            if plan is None:
                return "its loader does more than copy"
            plan.replay(second)
        else:
            model.load_weights(weights.items())
        models.append(dict(model.named_parameters()))
    return " ".join(name for name, loaded in models[1].items() if not torch.equal(loaded, models[0][name]))


def main(out: Path, pairs: list[tuple[Path, Path]]) -> None:
    found = {}
    for folder, weights in pairs:
        engine = VllmEngine(folder, max_model_len=64, dtype="float32", kv_cache_bytes=64 << 20, threads=1)
        before = engine.generate(PROMPTS, FREE, SEEDS)
        for file in (weights, folder / "model.safetensors", weights):
            tensors = load_file(file)
            engine.load_weights({name: tensors[name] for name in parameter_shapes(folder)})
        after = engine.generate(PROMPTS, FREE, SEEDS)
        found[folder.name] = {"responses": [[asdict(response) for response in responses] for responses in (before, after)]}
        if "moe" in folder.name or folder.name == "mixtral":
            first = load_file(folder / "model.safetensors")
            found[folder.name]["replayed"] = replay_copies(engine, first, load_file(weights))
        torch.save(found, out)
        engine.close()
        del engine
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(zip(map(Path, sys.argv[2::2]), map(Path, sys.argv[3::2]), strict=True)))
