"""Updates on a rollout's chunks as they arrive, beside updates on whole batches: step times, the trainer's idle time, prediction.

    python benchmarks/speed/streamed.py [shape=small] [prompts=12] [group_size=4] [median_tokens=60] [chunks=6] [rounds=3] [json=PATH]
    python benchmarks/speed/streamed.py shape=1.7B prompts=32 group_size=8 median_tokens=256 max_tokens=2048      # on two GPUs
    python benchmarks/speed/streamed.py --smoke

A model with random weights writes responses of geometric lengths (p99 is 6.6 times the median): the same in all ways, since what is learnt
changes hardly any weight. A generator and a trainer have a core, or a GPU, each. The ways alternate for some rounds. Each streamed way is
predicted from the costs of the run on whole batches just before it, at the same depth; on GPUs each way is also estimated from nothing.
The results are written after each run.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.lib.machine import machine
from benchmarks.lib.shapes import VOCAB, random_model
from benchmarks.speed.overlap import QUESTIONS, parity
from rlgraph.engines.hf.pretrained import tiny_model


@dataclass
class Config:
    shape: str = "small"  # or one of shapes.py
    models: str = ".models"
    prompts: int = 12
    group_size: int = 4
    median_tokens: int = 60
    max_tokens: int = 480
    micro_batch_tokens: int = 2048
    chunks: int = 6
    orders: tuple[str, ...] = ("data", "finish")
    steps: int = 8
    warm_up: int = 2
    rounds: int = 3
    json: str = ""


@dataclass(frozen=True)
class Way:
    """How a batch reaches the update: whole, or in chunks."""

    depth: int
    chunks: int = 1
    order: Literal["data", "finish"] = "data"

    @property
    def name(self) -> str:
        depth = ("on-policy", "one step off")[self.depth]
        return f"{depth}, " + ("whole" if self.chunks == 1 else f"{self.chunks} chunks, order of {self.order}")


ORDERS: tuple[Literal["data", "finish"], ...] = ("data", "finish")
SHOWN = 2  # steps of a timeline
SMALL_VOCAB = 4096  # of the model for two cores
SMOKE = Config(prompts=4, group_size=2, median_tokens=6, max_tokens=24, chunks=2, steps=3, warm_up=1, rounds=1)


def graph(cfg: Config, folder: str, vocab: int, way: Way) -> rg.Graph:
    stops = tuple(range(300, 300 + max(round(vocab * math.log(2) / cfg.median_tokens), 1)))  # each token is as likely as any other
    sampling = rg.Sampling(max_tokens=cfg.max_tokens, stop_token_ids=stops, ignore_eos=True)
    generator = rg.Generator(
        folder, pool=rg.Pool("rollout"), sampling=sampling, max_context=cfg.max_tokens + 64, max_sequences=cfg.prompts * cfg.group_size
    )
    policy = rg.Policy(
        folder,
        pool=rg.Pool("train"),
        optimizer=rg.AdamW(lr=1e-9),
        micro_batch_tokens=cfg.micro_batch_tokens,
        recompute=cfg.shape == "small",  # so that a CPU packs passes as a GPU does
    )
    weights = rg.feedback("weights", depth=way.depth, buffers=way.depth + 1)
    prompts = rg.prompts(QUESTIONS, count=cfg.prompts)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size, chunks=way.chunks, order=way.order)
    advantages = rg.advantages(rollout, rg.reward(parity, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(), streamed=way.chunks > 1)
    weights.close(step.weights)
    return rg.Graph("streamed" if way.chunks > 1 else "whole", step.metrics)


def run(cfg: Config, plan: rg.Plan) -> tuple[dict[str, Any], rg.planning.Costs]:
    """Run a plan; give its seconds and the costs of its nodes."""
    with plan.launch() as job:
        steps = list(job.steps(cfg.steps))[cfg.warm_up :]
        costs, spans = job.costs(), [span for span in job.spans() if span.kind == "fire" and span.step >= cfg.steps - SHOWN]
    seconds = [step.seconds for step in steps]
    parts = {part: statistics.mean(step.metrics[f"timing_s/{part}"] for step in steps) for part in ("gen", "update_actor")}
    mean = statistics.mean(seconds)
    begin = min(span.start_s for span in spans)
    shown = [[span.worker, span.name, round(span.start_s - begin, 4), round(span.end_s - begin, 4)] for span in spans]
    return {"step_s": mean, "steps_s": seconds, **parts, "trainer_idle": 1 - parts["update_actor"] / mean, "timeline": shown}, costs


def measure(cfg: Config, folder: str, vocab: int) -> Iterator[tuple[Way, dict[str, Any]]]:
    """Run all ways for some rounds; yield each with what it took."""
    cluster = rg.local_cluster()
    for _, depth in product(range(cfg.rounds), (0, 1)):
        whole, costs = run(cfg, rg.compile(graph(cfg, folder, vocab, Way(depth)), cluster))
        yield Way(depth), whole
        for order in ORDERS:
            if order in cfg.orders:
                way = Way(depth, cfg.chunks, order)
                plan = rg.compile(graph(cfg, folder, vocab, way), cluster, costs)
                took, _ = run(cfg, plan)
                yield way, {**took, "predicted_s": plan.prediction.step_s, "over_whole": took["step_s"] / whole["step_s"]}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the median of each figure over the rounds, and keep all rounds, with the timeline of the last one alone."""
    timeline, rows = rows[-1]["timeline"], [{name: value for name, value in row.items() if name != "timeline"} for row in rows]
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    found = {name: statistics.median(row[name] for row in rows) for name in names}
    if "predicted_s" in found:
        found["error"] = statistics.median(abs(row["predicted_s"] / row["step_s"] - 1) for row in rows)
    return {**found, "rounds": rows, "timeline": timeline}


def show(name: str, row: dict[str, Any]) -> None:
    said = f", predicted {row['predicted_s']:.3f}, {row['over_whole']:.3f} of whole" if "predicted_s" in row else ""
    print(f"{name}: {row['step_s']:.3f} s{said}, trainer idle {row['trainer_idle']:.0%}", flush=True)


def main() -> None:
    smoke, rest = "--smoke" in sys.argv, [argument for argument in sys.argv[1:] if argument != "--smoke"]
    cfg = rg.config(Config, rest)
    cfg = replace(SMOKE, json=cfg.json) if smoke else cfg
    small, found = cfg.shape == "small", dict[str, list[dict[str, Any]]]()
    settings = {key: value for key, value in vars(cfg).items() if key != "json"}
    with tempfile.TemporaryDirectory() as made, rg.runs.warm():
        folder = str(tiny_model(Path(made) / "small", vocab=SMALL_VOCAB, layers=4, hidden=256, context=1024)) if small else ""
        folder = folder or random_model(cfg.shape, cfg.models)
        for way, took in measure(cfg, folder, SMALL_VOCAB if small else VOCAB):
            if not small:
                took["estimated_s"] = rg.compile(graph(cfg, folder, VOCAB, way), rg.local_cluster()).prediction.step_s
            found.setdefault(way.name, []).append(took)
            show(way.name, took)
            if cfg.json:
                ways = {name: summary(rows) for name, rows in found.items()}
                Path(cfg.json).write_text(json.dumps({"settings": settings, "ways": ways} | machine(), indent=1) + "\n", encoding="utf-8")
    for name, rows in found.items():
        show(name, summary(rows))


if __name__ == "__main__":
    main()
