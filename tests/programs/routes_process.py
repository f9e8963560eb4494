"""A process with an engine of vLLM that tells routes: `python routes_process.py FOLDER OUT`."""

import sys
from pathlib import Path

import torch
from support.router_replay import PROMPTS, weights_of
from support.tiny import other_weights

from rlgraph.engines.api import Request
from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.values.sampling import Sampling

SAMPLING = Sampling(max_tokens=12, ignore_eos=True)


def main(folder: Path, out: Path) -> None:
    engine = VllmEngine(folder, max_model_len=128, dtype="float32", kv_cache_bytes=64 << 20, max_sequences=3, threads=1, routes=True)
    found = {}
    for part in ("first", "again"):  # again: the prompts are in the engine's cache
        found[part] = [(r.tokens, r.routes) for r in engine.generate(PROMPTS, SAMPLING, list(range(len(PROMPTS))))]
    weights = weights_of(folder)
    others = other_weights(weights, seed=0)
    for running in ("recompute", "keep"):
        engine.load_weights(weights)
        for name, prompt in (("long", PROMPTS[1]), ("alike", PROMPTS[2])):
            engine.submit(Request(f"{running} {name}", prompt, SAMPLING, 1))
        for _ in range(5):
            engine.step()
        engine.load_weights(others, running=running)  # type: ignore[arg-type]
        engine.submit(Request(f"{running} new", PROMPTS[1], SAMPLING, 1))
        done = {}
        while len(done) < 3:
            done |= engine.step()
        found |= {name: [(r.tokens, r.routes, r.versions)] for name, r in done.items()}
    torch.save({"found": found, "others": others}, out)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
