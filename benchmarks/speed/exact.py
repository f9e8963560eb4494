"""A trainer with exact=True beside the same trainer without: tokens that equal vLLM's in every bit, and seconds of scores and updates.

    python benchmarks/speed/exact.py [MODEL] [--tokens 64] [--json PATH]
    python benchmarks/speed/exact.py tiny --tokens 8            # its first seconds

On a CPU, float32, one core each. The engine, a process of its own, samples from the first weights and from those after two updates, at
temperatures 1 and 0.7, for prompts of 7 to 900 tokens, each twice, so that the second one finds blocks in the engine's cache. The trainer
then scores every token in passes of 2,048 and of 300 tokens. Seconds are paired: both trainers take turns at the eight shorter rows.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.speed.exact_gpu import HIGH, LOW, texts
from benchmarks.speed.exact_gpu import batch_of as rows_together

LENGTHS, TEMPERATURES, UPDATES, ROUNDS = (7, 40, 130, 300, 900), (1.0, 0.7), 2, 4
TIMED = 8  # of the rows, the shorter ones


def prompts() -> list[list[int]]:
    return [text for text in texts(LENGTHS, seed=1) for _ in range(2)]


def sample(folder: str, tokens: int, weights: list[str], out: str) -> None:
    """In the engine's process: sample from each of the weights at each temperature."""
    import torch

    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.sampling import Sampling

    engine = VllmEngine(folder, max_model_len=1024, dtype="float32", kv_cache_bytes=1 << 30, threads=1)
    found = []
    for path in weights:
        engine.load_weights(torch.load(path))
        for temperature in TEMPERATURES:
            sampling = Sampling(max_tokens=tokens, temperature=temperature, ignore_eos=True)
            found.append([(list(r.tokens), list(r.log_probs)) for r in engine.generate(prompts(), sampling, list(range(len(prompts()))))])
    torch.save(found, out)
    engine.close()


def batch_of(responses: list[tuple[list[int], list[float]]]) -> tuple[dict[str, Any], Any]:
    import torch

    rows = [(given, ids) for given, (ids, _) in zip(prompts(), responses, strict=True)]
    return rows_together(rows), torch.tensor([log_probs for _, log_probs in responses])


def compared(engine: Any, weights: list[str], sampled: list[Any], passes: int) -> dict[str, float]:
    """Score each sample under its weights; count the tokens that differ from the engine's in any bit."""
    import torch

    engine.micro_batch_tokens = passes
    tokens, differ, most = 0, 0, 0.0
    for index, responses in enumerate(sampled):
        engine.load_weights(torch.load(weights[index // len(TEMPERATURES)]))
        batch, log_probs = batch_of(responses)
        away = (engine.scores(batch, temperature=TEMPERATURES[index % len(TEMPERATURES)]) - log_probs).abs()
        tokens, differ, most = tokens + away.numel(), differ + int((away > 0).sum()), max(most, away.max().item())
    return {"tokens": tokens, "different": differ, "most_nats": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    import torch

    import rlgraph as rg
    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.values.trainer import TrainerSettings

    torch.set_num_threads(1)
    folder = rg.model_folder(given.model)
    settings = TrainerSettings(optimizer=rg.AdamW(lr=1e-5), micro_batch_tokens=2048)
    both = (replace(settings, exact=True), settings)
    exact, plain = (FsdpEngine(PolicyHead(folder), each, dtype=torch.float32, flat=True) for each in both)
    with tempfile.TemporaryDirectory() as work:
        weights = [f"{work}/first.pt", f"{work}/last.pt"]
        torch.save({name: tensor.clone() for name, tensor in exact.weights().items()}, weights[0])
        draw = torch.Generator().manual_seed(2)
        batch, _ = batch_of([(torch.randint(LOW, HIGH, (given.tokens,), generator=draw).tolist(), []) for _ in prompts()])
        batch = {name: column[:TIMED] for name, column in batch.items()}
        batch |= {"advantages": torch.randn(TIMED, given.tokens, generator=draw)}
        batch |= {"old_log_probs": exact.scores(batch)}
        for _ in range(UPDATES):
            exact.update(batch, rg.ClippedLoss())
        torch.save({name: tensor.clone() for name, tensor in exact.weights().items()}, weights[1])
        process = multiprocessing.get_context("spawn").Process(target=sample, args=(folder, given.tokens, weights, f"{work}/sampled.pt"))
        process.start()
        process.join()
        sampled = torch.load(f"{work}/sampled.pt")
        found: dict[str, Any] = {"model": given.model, "tokens_each": given.tokens, "prompts": list(LENGTHS)}
        for name, engine, passes in (("exact", exact, 2048), ("exact, small passes", exact, 300), ("without exact", plain, 2048)):
            found[name] = compared(engine, weights, sampled, passes)
            print(f"{name}: {found[name]}", flush=True)
    exact.micro_batch_tokens = plain.micro_batch_tokens = 2048
    works: dict[str, Callable[[Any], object]] = {
        "scores": lambda engine: engine.scores(batch),
        "update": lambda engine: engine.update(batch, rg.ClippedLoss()),
    }
    for work_name, work_of in works.items():
        pairs = []
        for _ in range(ROUNDS + 1):
            times = []
            for engine in (exact, plain):
                start = time.perf_counter()
                work_of(engine)
                times.append(time.perf_counter() - start)
            pairs.append((times[0], times[1]))
        ratios = sorted(a / b for a, b in pairs[1:])
        own, other = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
        found[work_name] = {"exact_s": own, "plain_s": other, "ratio": statistics.median(ratios), "spread": [ratios[0], ratios[-1]]}
        print(f"{work_name}: {found[work_name]}", flush=True)
    if given.json:
        from benchmarks.lib.machine import machine

        given.json.write_text(json.dumps(found | machine(), indent=1) + "\n")


if __name__ == "__main__":
    main()
