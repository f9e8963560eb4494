"""A run whose responses grow, under each split of four devices that stays, and under `replan=`, which changes it.

    python benchmarks/speed/replan.py [steps=160] [every=10] [json=PATH]
    python benchmarks/speed/replan.py --smoke

Stages wait as long as engines and trainers of a given speed would work; processes, channels, checkpoints and changes are real. Prompts are
long, so training is the longer side at first; generation grows in proportion to the responses, and becomes the longer one.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.simulated_stages import UNIFORM, Loop, Times

import rlgraph as rg
from benchmarks.lib.machine import machine

DEVICES = 4
TIMES = Times(step_s=0.03e-3, sequence_s=0.1e-3, start_s=0.005, train_token_s=0.02e-3, train_start_s=0.005, reward_s=0.001)


@dataclass
class Config:
    steps: int = 160
    every: int = 10
    gain: float = 0.05
    growth: float = 0.1  # of the responses with each step, as a part of the first ones
    json: str = ""


SMOKE = Config(steps=12, every=4, growth=2.0)


def graphs(cfg: Config) -> dict[str, rg.Graph]:
    """Make a graph for each split of the devices."""
    lengths = replace(UNIFORM, prompt_tokens=1500.0)
    loops = (Loop(generators=n, trainers=DEVICES - n, lengths=lengths, growth=cfg.growth, times=TIMES) for n in range(1, DEVICES))
    return {f"rollout {loop.generators}, train {loop.trainers}": loop.graph() for loop in loops}


def run(cfg: Config, graph: rg.Graph, others: tuple[rg.Graph, ...] = ()) -> dict[str, Any]:
    """Run a graph; with others, a replanned one. Seconds of all steps, in which those of a change are."""
    replan = rg.planning.Replan(every=cfg.every, gain=cfg.gain, graphs=others) if others else None
    with tempfile.TemporaryDirectory() as folder:
        plan = rg.compile(graph, rg.Cluster(cpus=DEVICES))
        with plan.launch(checkpoint=folder, every=cfg.steps, replan=replan) as job:
            began = time.monotonic()
            seconds = [step.seconds for step in job.steps(cfg.steps)]
            return {"total_s": time.monotonic() - began, "steps_s": seconds, "said": list(job.notices)}


def main() -> None:
    smoke, rest = "--smoke" in sys.argv, [argument for argument in sys.argv[1:] if argument != "--smoke"]
    cfg = rg.config(Config, rest)
    cfg = replace(SMOKE, json=cfg.json) if smoke else cfg
    made = graphs(cfg)
    with rg.runs.warm():
        fixed = {name: run(cfg, graph) for name, graph in made.items()}
        first, *others = made.values()
        changed = run(cfg, first, tuple(others))
    best = [min(each) for each in zip(*(found["steps_s"] for found in fixed.values()), strict=True)]
    over = [took / least for took, least in zip(changed["steps_s"], best, strict=True)]
    row = {
        "over_best_fixed": changed["total_s"] / min(found["total_s"] for found in fixed.values()),
        "over_best_at_each_step": changed["total_s"] / sum(best),
        "median_step_over_best": statistics.median(over),
        "steps_within_10_percent": sum(each <= 1.1 for each in over) / len(over),
    }
    for name, found in {**fixed, "replanned": changed}.items():
        print(f"{name}: {found['total_s']:.1f} s", *found["said"], sep="\n  ")
    print(row)
    if cfg.json:
        settings = {key: value for key, value in asdict(cfg).items() if key != "json"}
        runs = {"settings": settings, "fixed": fixed, "replanned": changed} | row
        Path(cfg.json).write_text(json.dumps(runs | machine(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
