"""Decoding batch by batch against batches and weights that join while responses decode, on vLLM.

    python benchmarks/speed/rollout.py [--json PATH] [--rows N] [--batches N] [--rounds N] [--median TOKENS] [--model FOLDER]

One engine, one run: the ways take turns, batch lengths are the same for all. Lengths are log-normal with p99 / median = 10, forced on
each request. A pretended trainer publishes version k + 1 some time after it gets batch k. Medians over rounds, with the extremes.

A decode step takes a + b * active: what joining saves is a. On a CPU b is large, so that few rows gain more than many.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.api import Request, Response
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.nodes.base import Context
from rlgraph.nodes.rollout.decode_loop import DecodeLoop, OneTurn, Task
from rlgraph.values.sampling import BatchAdmission, Sampling

RATIO, CAP, PROMPT = 10, 15, 16  # the 99th percentile and the longest response, in medians; tokens of a prompt
WARM_UP = 3
SIGMA = math.log(RATIO) / statistics.NormalDist().inv_cdf(0.99)
BATCHWISE = "batch by batch"


@dataclass
class Trainer:
    """Publishes version k + 1 `update_s` after it got batch k, or after version k."""

    context: Context
    weights: Sequence[Mapping[str, torch.Tensor]]
    update_s: float
    rule: BatchAdmission
    ready: dict[int, float] = field(default_factory=dict)
    loads_s: float = 0.0
    waited_s: float = 0.0

    def deliver(self, step: int) -> None:
        self.ready[step + 1] = max(time.perf_counter(), self.ready.get(step, 0.0)) + self.update_s

    def poll(self) -> None:
        while self.ready.get(self.context.version + 1, math.inf) <= time.perf_counter():
            self._load()

    def wait(self, version: int) -> None:
        while self.context.version < version:
            left_s = max(0.0, self.ready[self.context.version + 1] - time.perf_counter())
            self.waited_s += left_s
            time.sleep(left_s)
            self._load()

    def _load(self) -> None:
        start = time.perf_counter()
        self.context.version += 1
        weights = self.weights[self.context.version % len(self.weights)]
        self.context.engine.load_weights(weights, version=self.context.version, running=self.rule.interrupt_rule)
        self.loads_s += time.perf_counter() - start


@dataclass(frozen=True)
class Size:
    rows: int
    batches: int
    rounds: int
    median: int  # tokens


def lengths(step: int, size: Size) -> list[int]:
    """Draw the lengths of a batch: one from each of as many equal parts of the distribution."""
    draw, normal = random.Random(step), statistics.NormalDist()
    places = [(row + draw.random()) / size.rows for row in range(size.rows)]
    drawn = [round(size.median * math.exp(SIGMA * normal.inv_cdf(place))) for place in places]
    return [min(CAP * size.median, max(1, length)) for length in drawn]


def tasks(step: int, size: Size) -> list[Task]:
    draw = random.Random(step)
    found = []
    for row, length in enumerate(lengths(step, size)):
        prompt = [draw.randint(1, 256) for _ in range(PROMPT)]
        request = Request(f"r: {step}.{row}", prompt, Sampling(max_tokens=length, ignore_eos=True), seed=step * size.rows + row)
        found.append(Task(request))
    return found


def run(
    engine: VllmEngine, weights: Sequence[Mapping[str, torch.Tensor]], rule: BatchAdmission, update_s: float, size: Size
) -> dict[str, float]:
    """Measure the pace of a run once it is under way, and how old its tokens were when they were trained on."""
    assert rule.depth is not None
    engine.load_weights(weights[0], version=0)
    context = Context(engine=engine)
    trainer = context.arrivals = Trainer(context, weights, update_s, rule)
    decoding = DecodeLoop(context, OneTurn(engine, "r: "), rule, lambda step: tasks(step, size))
    start, tokens, staleness, waited_s = 0.0, 0, [], 0.0
    for step in range(WARM_UP + size.batches):
        trainer.wait(rule.needs(step))
        decoding.begin(step, tasks(step, size))
        batch = [outcome.response for outcome in decoding.take(step, tasks(step, size))]
        trainer.deliver(step)
        check_bound(step, rule.depth, batch)
        if step == WARM_UP - 1:
            start, waited_s = time.perf_counter(), trainer.waited_s
        elif step >= WARM_UP:
            tokens += sum(len(response.tokens) for response in batch)
            staleness += [step - version for response in batch for version in response.versions]
    seconds = time.perf_counter() - start
    engine.abort(list(engine.count_tokens()))
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / size.batches,
        "waited_s": (trainer.waited_s - waited_s) / size.batches,
        "load_s": trainer.loads_s / max(context.version, 1),
        "staleness_mean": statistics.fmean(staleness),
        "staleness_max": max(staleness),
    }


def check_bound(step: int, depth: int, batch: Sequence[Response]) -> None:
    for response in batch:
        if not max(0, step - depth) <= min(response.versions) <= max(response.versions) <= step:
            raise AssertionError(f"step {step}, depth {depth}: a response has versions {sorted(set(response.versions))}")


def ways(depth: int) -> dict[str, BatchAdmission]:
    return {
        BATCHWISE: BatchAdmission(None, False, depth),
        "interrupt, recompute": BatchAdmission("recompute", False, depth),
        "interrupt, keep": BatchAdmission("keep", False, depth),
        "continuous": BatchAdmission(None, True, depth),
        "continuous, recompute": BatchAdmission("recompute", True, depth),
        "continuous, keep": BatchAdmission("keep", True, depth),
    }


def compare(engine: VllmEngine, weights: Sequence[Mapping[str, torch.Tensor]], depth: int, update_s: float, size: Size) -> dict[str, Any]:
    """Take the median of each figure of each way, and its speed against batch by batch, round by round."""
    rounds = [{name: run(engine, weights, rule, update_s, size) for name, rule in ways(depth).items()} for _ in range(size.rounds)]
    found: dict[str, Any] = {}
    for name in ways(depth):
        ratios = [one[name]["tokens_per_s"] / one[BATCHWISE]["tokens_per_s"] for one in rounds]
        figures = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        found[name] = figures | {"speed": statistics.median(ratios), "speed_min": min(ratios), "speed_max": max(ratios)}
        print(
            f"{depth:5} {update_s:8.2f} {name:22} {figures['tokens_per_s']:9.0f} {found[name]['speed']:6.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) {figures['step_s']:7.2f} {figures['staleness_mean']:6.2f}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--rows", type=int, default=16, help="responses of a batch")
    parser.add_argument("--batches", type=int, default=15, help="batches that are timed in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--median", type=int, default=16, help="tokens of a response")
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face format; without it a tiny model is made")
    arguments = parser.parse_args()
    size = Size(arguments.rows, arguments.batches, arguments.rounds, arguments.median)
    folder = arguments.model or tiny_model(Path(tempfile.mkdtemp()) / "tiny", context=1024)
    engine = VllmEngine(folder, max_model_len=CAP * size.median + PROMPT, dtype="bfloat16", threads=1)
    from safetensors.torch import load_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    first = {name: tensor.to(device, torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights = [first, {name: tensor * 1.01 for name, tensor in first.items()}]
    drawn = sorted(length for step in range(100) for length in lengths(step, size))
    figures: dict[str, Any] = {
        "machine": {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "python": platform.python_version()},
        "lengths": {"rows": size.rows, "median": drawn[len(drawn) // 2], "p99": drawn[len(drawn) * 99 // 100], "longest": drawn[-1]},
        "timed": {"batches": size.batches, "rounds": size.rounds, "after": WARM_UP},
        "model": str(arguments.model.name) if arguments.model else "tiny",
    }
    import vllm

    figures["versions"] = {"vllm": vllm.__version__, "torch": torch.__version__}
    if torch.cuda.is_available():
        figures["machine"]["gpu"] = torch.cuda.get_device_name()
    print(f"{'depth':>5} {'update':>8} {'way':22} {'tokens/s':>9} {'against batch by batch':>18} {'step':>7} {'stale':>6}")
    alone = run(engine, weights, BatchAdmission(None, False, 1), 0.0, size)["step_s"]
    for depth, share in ((1, 0.0), (1, 0.3), (2, 0.3)):
        figures[f"depth {depth}, update {share:.1f} of a step"] = compare(engine, weights, depth, share * alone, size)
        if arguments.json:  # after each, so that a run that is cut short leaves what it has measured
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
