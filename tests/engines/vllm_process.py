"""A process with a vLLM engine in it, started by a test: `python vllm_process.py FOLDER OUT THREADS`."""

import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import UPDATES, VLLM_PROMPTS, changed

from rlgraph.engines.api import Sampling
from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.errors import DataError

SEEDS = list(range(len(VLLM_PROMPTS)))
FREE = Sampling(max_tokens=8, ignore_eos=True)

GIVEN = {"max_num_batched_tokens": 2000}


def main(folder: Path, out: Path, threads: int) -> None:
    engine = VllmEngine(folder, max_model_len=64, dtype="float32", kv_cache_bytes=64 << 20, threads=threads, engine_args=GIVEN)
    found: dict[str, object] = {"threads": torch.get_num_threads(), "context": engine.context_length()}
    found["batched_tokens"] = engine._engine.vllm_config.scheduler_config.max_num_batched_tokens
    weights = load_file(folder / "model.safetensors")
    found["updates"] = [[asdict(r) for r in engine.generate(VLLM_PROMPTS, FREE, SEEDS)]]
    for update in range(1, UPDATES):
        engine.load_weights(changed(weights, update))
        found["updates"].append([asdict(r) for r in engine.generate(VLLM_PROMPTS, FREE, SEEDS)])
    found["repeated"] = [asdict(r) for r in engine.generate(VLLM_PROMPTS, FREE, SEEDS)]
    stop = found["repeated"][0]["tokens"][3]
    found["stopped"] = asdict(engine.generate(VLLM_PROMPTS[:1], Sampling(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,)), [0])[0])
    found["at_context"] = asdict(engine.generate([[3] * 60], FREE, [0])[0])
    for name, wrong in {
        "refused": {"model.norm.weight": torch.ones(64)},
        "reshaped": weights | {"model.norm.weight": torch.ones(1)},
    }.items():
        try:
            engine.load_weights(wrong)
        except DataError as refused:
            found[name] = str(refused)
    before, started = time.process_time(), time.perf_counter()
    for _ in range(20):
        engine.generate(VLLM_PROMPTS, FREE, SEEDS)
    found["cores"] = (time.process_time() - before) / (time.perf_counter() - started)
    torch.save(found, out)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
