"""What each recipe beyond policy gradients learns on two cores, and what its step takes, as predicted before the run and as measured.

    python benchmarks/beyond_rl.py [--json PATH] [--only NAME] [--steps N] [--profiled N] [--smoke]

Each recipe is profiled for a few steps. These costs predict its step. Then it runs from the beginning, and its step is measured: the
median after the warm-up, or where every eighth step also evaluates, the mean over eight steps. A metric is given at both ends of the
run, as the mean over its first and its last steps. Runs go one after the other. One that is done stands in the file, and is not done
again: after a kill the same command goes on with the next one.

`distill` learns from the weights that `sft` left, so it runs after it. `--smoke` runs two steps of each on a tiny random model.
The file says the machine's load before and after each run: other programs on it make a prediction wrong.
"""

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "recipes")]

from learning_runs import machine  # noqa: E402 (scripts import one another by their bare names)

import rlgraph as rg  # noqa: E402

# The recipes in order: their settings here, and the metrics that tell what they learn.
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sft": ({"steps": 16, "every": 8}, ("actor/nll", "val/acc/mean@1")),
    "dpo": ({"pairs": 8, "steps": 16}, ("preference/accuracy", "preference/margin")),
    "reward_model": ({"steps": 16}, ("reward/accuracy", "critic/vf_loss")),
    "kto": ({"steps": 12}, ("preference/chosen", "preference/rejected")),
    "distill": ({"engine": "transformers", "prompts": 16, "steps": 16}, ("actor/distillation", "response_length/mean")),
    "mixture": ({"steps": 12}, ("critic/rewards/mean", "examples/nll")),
    "self_play": ({"steps": 12}, ("first/right", "second/right")),
}
ENDS = 3  # steps at each end of a run, whose mean is given
WARM_UP = 2
SMOKE = {"model": "tiny", "engine": "transformers", "steps": 2, "prompts": 2, "group_size": 2, "examples": 2, "pairs": 2, "held_out": 2}


def config_of(name: str, given: argparse.Namespace, folder: Path) -> tuple[Any, Any]:
    """Make the settings of a recipe, and the function that makes its graph of them."""
    recipe = runpy.run_path(str(ROOT / "recipes" / f"{name}.py"))
    wanted = {**RECIPES[name][0], **(SMOKE if given.smoke else {}), **({"steps": given.steps} if given.steps else {})}
    wanted |= {"out": str(folder / name)}
    if name == "distill":
        wanted["teacher"] = "tiny" if given.smoke else str(folder / "sft" / "model")
    known = recipe["Config"].__dataclass_fields__
    return rg.config(recipe["Config"], [f"{key}={value}" for key, value in wanted.items() if key in known]), recipe["graph"]


def measured(name: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Profile a recipe, predict its step, run it, and give what it learnt."""
    cfg, graph = config_of(name, given, folder)
    cluster, before, began_s = rg.local_cluster(), os.getloadavg()[0], time.monotonic()
    costs = rg.profile(graph(cfg), cluster, given.profiled) if given.profiled else None
    profiled_s = time.monotonic() - began_s
    plan = rg.compile(graph(cfg), cluster, costs)
    predicted_s = plan.prediction.step_s if costs is not None else None
    if predicted_s is not None:
        print(f"{name}: a step is predicted to take {predicted_s:.2f} s", flush=True)
    with plan.launch() as job:
        steps = list(rg.record(job, cfg.steps, cfg.out))
        if name == "sft":
            job.export(Path(cfg.out) / "model", dtype="float32")
        own_s = job.run().priced
    step_s = typical_s([step.seconds for step in steps], getattr(cfg, "every", 1))
    found = {
        "settings": {key: value for key, value in vars(cfg).items() if key not in ("out", "model", "teacher")},
        "profiled": given.profiled,
        "profiled_s": profiled_s,
        "predicted_s": predicted_s,
        "measured_s": step_s,
        "fitted_s": None if own_s is None else own_s.prediction.step_s,
        "steps_s": sum(step.seconds for step in steps),
        "load": [before, os.getloadavg()[0]],
        "metrics": {metric: ends([step.metrics[metric] for step in steps if metric in step.metrics]) for metric in RECIPES[name][1]},
    }
    print(f"{name}: measured {step_s:.2f} s; {found['metrics']}", flush=True)
    return found


def typical_s(seconds: list[float], every: int) -> float:
    """Compute the seconds of a step that a prediction is about: the median after the warm-up.

    Where one of `every` steps does more it is the mean over as many whole rounds as there are.

    >>> typical_s([9.0, 1.0, 1.0, 3.0], 1), typical_s([9.0, 9.0, 1.0, 3.0, 1.0, 3.0, 1.0], 2)
    (2.0, 2.0)
    """
    after = seconds[min(WARM_UP, len(seconds) - 1) :]
    rounds = len(after) // every
    return statistics.median(after) if every == 1 or not rounds else statistics.fmean(after[-rounds * every :])


def ends(values: list[float]) -> dict[str, Any]:
    """Average the first and the last values of a metric; of fewer than twice as many, take the first and the last one."""
    few = ENDS if len(values) >= 2 * ENDS else 1
    return {"first": statistics.fmean(values[:few]), "last": statistics.fmean(values[-few:]), "values": len(values)} if values else {}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="the file of results; runs that it holds are not done again")
    arguments.add_argument("--only", choices=list(RECIPES), action="append", help="this recipe, again and again for several")
    arguments.add_argument("--steps", type=int, help="of each recipe, instead of its own number")
    arguments.add_argument("--profiled", type=int, default=3, help="steps of a profile, after the one that warms up; 0 predicts nothing")
    arguments.add_argument("--work", type=Path, help="the folder of records; by default one that is removed")
    arguments.add_argument("--smoke", action="store_true", help="two steps of each on a tiny random model")
    given = arguments.parse_args()
    held = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"machine": machine(), "recipes": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.work or Path(temporary)).absolute()
        for name in given.only or RECIPES:
            if name not in held["recipes"]:
                held["recipes"][name] = measured(name, given, folder)
                if given.json:
                    given.json.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
