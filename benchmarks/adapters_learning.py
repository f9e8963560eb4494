"""How an adapter learns beside full training: `recipes/one_gpu.py` with three seeds each, the adapter at ten times the learning rate.

    python benchmarks/adapters_learning.py [--minutes 30]       # call again until nothing is left
    python benchmarks/adapters_learning.py --only way=adapter,seed=0
    python benchmarks/adapters_learning.py --plot               # the table alone
    python benchmarks/adapters_learning.py --smoke              # two steps of a tiny model each

Settings of the recipe, as `steps=40`, hold for all runs. A run that stands in the file is not done again, one that was killed begins anew.
`python benchmarks/table.py` writes the table into docs/lora.md.
"""

import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from figures import RESULTS
from learning_runs import Key, Results, Run, chosen, interval, machine, metrics_of, named, parser, runs_left

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

import one_gpu

import rlgraph as rg

FILE = "adapters_learning_cpu.json"
WAYS: dict[str, dict[str, Any]] = {"full": {"rank": 0, "lr": 5e-6}, "adapter": {"rank": 32, "lr": 5e-5}}
SMOKE = ["model=tiny", "engine=transformers", "steps=2", "prompts=2", "group_size=2"]
REWARD, WANTED, ENDS = "critic/rewards/mean", 0.9, 5  # steps at each end of a run, and of the mean that is to reach 0.9
PARTS = {"rollout_s": "timing_s/gen", "update_s": "timing_s/update_actor", "load_s": "timing_s/update_weights"}


def learnt(cfg: one_gpu.Config, folder: Path) -> Run:
    """Run the recipe, and make the entry of what it recorded."""
    plan, before = rg.compile(one_gpu.graph(cfg), rg.local_cluster()), os.getloadavg()[0]
    with plan.launch() as job:
        for step in rg.record(job, cfg.steps, folder, samples=0.0, quiet=True):
            print(f"  step {step.index + 1}: reward {step.metrics[REWARD]:.3f}, {step.seconds:.1f} s", flush=True)
        published = job.trace().published_bytes
    lines = metrics_of(folder)
    return {
        "settings": {"rank": cfg.rank, "lr": cfg.lr},
        "reward": [round(line[REWARD], 5) for line in lines],
        "step_s": statistics.median(line["timing_s/step"] for line in lines[1:]),
        **{part: statistics.median(line.get(name, 0.0) for line in lines[1:]) for part, name in PARTS.items()},
        "version_bytes": published,
        "load": [before, os.getloadavg()[0]],
        "machine": machine(),
    }


def steps_to(rewards: Sequence[float]) -> float:
    """The first step at whose end the mean of the last five rewards is 0.9; NaN if none is."""
    means = (statistics.fmean(rewards[end - ENDS : end]) for end in range(ENDS, len(rewards) + 1))
    return next((float(step) for step, mean in enumerate(means, ENDS) if mean >= WANTED), math.nan)


HEAD = (
    "trained",
    "learning rate",
    "reward of the first 5 steps",
    "of the last 5, each seed",
    "mean (95 % over seeds)",
    "steps until five have 0.90, each seed",
    "a version",
)


def tables() -> dict[str, str]:
    """Write the table by its name; nothing while nothing is measured."""
    file = RESULTS / FILE
    return {"adapters": table(json.loads(file.read_text(encoding="utf-8"))["runs"])} if file.is_file() else {}


def table(runs: Mapping[str, Run]) -> str:
    """Write a row for each way, as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for way in dict.fromkeys(run["key"]["way"] for run in runs.values()):
        own = sorted((run for run in runs.values() if run["key"]["way"] == way), key=lambda run: int(run["key"]["seed"]))
        last = [statistics.fmean(run["reward"][-ENDS:]) for run in own]
        mean, half = interval(last)
        rank = own[0]["settings"]["rank"]
        cells = (
            f"an adapter of rank {rank}" if rank else "all weights",
            f"{own[0]['settings']['lr']:.0e}",
            f"{statistics.fmean(statistics.fmean(run['reward'][:ENDS]) for run in own):.2f}",
            ", ".join(f"{reward:.3f}" for reward in last),
            f"{mean:.3f} ± {half:.3f}" if math.isfinite(half) else f"{mean:.3f}",
            ", ".join("–" if math.isnan(steps_to(run["reward"])) else f"{steps_to(run['reward']):.0f}" for run in own),
            f"{own[0]['version_bytes'] / 1e6:.1f} MB",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parser(__doc__ or "", FILE)
    arguments.add_argument("--seeds", type=int, default=3)
    given = arguments.parse_intermixed_args()
    if given.smoke:
        given.json, given.seeds = given.work / FILE, 1
        given.json.unlink(missing_ok=True)
    cfg = rg.config(one_gpu.Config, [*(SMOKE if given.smoke else []), *given.settings])
    keys: list[Key] = [{"way": way, "seed": seed} for seed in range(given.seeds) for way in WAYS]
    shared = {name: value for name, value in asdict(cfg).items() if name not in ("rank", "lr", "seed", "out")}
    results = Results(given.json, shared)
    for key, _ in [] if given.plot else runs_left(results, chosen(keys, given.only), given.minutes):
        own = replace(cfg, seed=int(key["seed"]), **WAYS[str(key["way"])])
        results.keep(named(key), learnt(own, given.work / named(key).replace(" ", "_")) | {"key": key})
    if results.runs:
        print(table(results.runs))


if __name__ == "__main__":
    main()
