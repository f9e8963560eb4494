"""What each recipe beyond policy gradients learns on two cores, and what its step takes, as predicted before the run and as measured.

    python benchmarks/learning/beyond_rl.py [--json PATH] [--fresh] [--only NAME] [--steps N] [--profiled N] [--smoke]
    python benchmarks/learning/beyond_rl.py --json PATH --table       # write the table of docs/developers/measurements.md again

Each recipe is profiled for a few steps. These costs predict its step. Then it runs from the beginning, and its step is measured: the
median after the warm-up, or where every eighth step also evaluates, the mean over eight steps. A metric is given at both ends of the
run, as the mean over its first and its last steps. Runs go one after the other. One that is done stands in the file, and is not done
again: after a kill the same command goes on with the next one.

A recipe of several graphs has a line for each. Weights lie in `--work` (runs/beyond_rl): `distill` learns from those that `sft` left, so it
runs after it. `--fresh` begins anew. `--smoke` runs two steps of each on a tiny random model.
The file says the machine's load before and after each run: other programs on it make a prediction wrong.
"""

import argparse
import inspect
import json
import os
import runpy
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import write

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "recipes")]

import rlgraph as rg  # noqa: E402
from benchmarks.lib.machine import machine  # noqa: E402 (scripts import one another by their bare names)

# The recipes in order: their settings here, and the metrics that tell what they learn.
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sft": ({"steps": 16, "every": 8}, ("actor/nll", "val/acc/mean@1")),
    "dpo": ({"pairs": 8, "steps": 16}, ("preference/accuracy", "preference/margin")),
    "reward_model": ({"steps": 16}, ("critic/vf_loss", "reward/accuracy")),
    "kto": ({"steps": 12}, ("preference/chosen", "preference/rejected")),
    "distill": ({"engine": "transformers", "prompts": 16, "steps": 16}, ("response_length/mean", "actor/distillation")),
    "online_dpo": ({"steps": 14}, ("preference/accuracy", "critic/rewards/mean")),
    "mixture": ({"steps": 30}, ("examples/nll", "critic/rewards/mean")),
    "self_play": ({"steps": 30}, ("first/right", "second/right")),
    "process_rewards": ({"steps": 30}, ("reward/accuracy", "step_rewards/mean")),
    "teachers": ({"steps": 12}, ("actor/nll", "actor/distillation", "critic/right/mean")),
    "curriculum": ({}, ("actor/nll", "critic/rewards/mean")),
}
BEGIN, END = "<!-- recipes measured -->\n", "<!-- end of recipes -->"
ENDS = 3  # steps at each end of a run, whose mean is given
WARM_UP = 2
SMOKE = {
    "model": "tiny",
    "engine": "transformers",
    "steps": 2,
    "prompts": 2,
    "group_size": 2,
    "examples": 2,
    "pairs": 2,
    "held_out": 2,
    "solutions": 2,
}
KEPT = ("sft", "process_rewards", "teachers", "curriculum")  # whose weights others begin from
FEW = ("judge_steps", "teacher_steps", "sft_steps", "rl_steps")  # steps of the graphs of a recipe, 2 each in a smoke run


def config_of(name: str, given: argparse.Namespace, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Make the settings of a recipe, and read what it defines."""
    recipe = runpy.run_path(str(ROOT / "recipes" / f"{name}.py"))
    wanted = {
        **RECIPES[name][0],
        **(SMOKE | dict.fromkeys(FEW, 2) if given.smoke else {}),
        **({"steps": given.steps} if given.steps else {}),
    }
    wanted |= {"out": str(folder / name)}
    if name == "distill":
        wanted["teacher"] = "tiny" if given.smoke else str(folder / "sft" / "model")
    known = recipe["Config"].__dataclass_fields__
    return rg.config(recipe["Config"], [f"{key}={value}" for key, value in wanted.items() if key in known]), recipe


def measured(name: str, given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the graphs of a recipe, one after the other, and yield what each learnt under its name."""
    cfg, recipe = config_of(name, given, folder)
    if "graphs" not in recipe:
        yield name, of_graph(name, lambda: recipe["graph"](cfg), cfg, cfg.steps, Path(cfg.out), given)
        return
    models: dict[str, str] = {}
    for make, steps in zip(*recipe["graphs"](cfg), strict=True):
        takes = {parameter: models[parameter] for parameter in inspect.signature(make).parameters if parameter in models}
        graph = make(**takes).name
        out = Path(cfg.out) / graph
        yield f"{name}: {graph}", of_graph(name, partial(make, **takes), cfg, given.steps or steps, out, given)
        models[graph] = str(out / "model")


def of_graph(name: str, graph: Callable[[], rg.Graph], cfg: Any, count: int, out: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Profile a graph, predict its step, run it, keep its weights, and give what it learnt."""
    cluster, before, began_s = rg.local_cluster(), os.getloadavg()[0], time.monotonic()
    costs = rg.planning.profile(graph(), cluster, given.profiled) if given.profiled else None
    profiled_s = time.monotonic() - began_s
    plan = rg.compile(graph(), cluster, costs)
    predicted_s = plan.prediction.step_s if costs is not None else None
    if predicted_s is not None:
        print(f"{name}: a step is predicted to take {predicted_s:.2f} s", flush=True)
    with plan.launch() as job:
        steps = list(rg.record(job, count, out))
        if name in KEPT:
            shutil.rmtree(out / "model", ignore_errors=True)
            job.export(out / "model", dtype="float32")
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
        "steps": len(steps),
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


def write_table(held: dict[str, Any]) -> None:
    """Write the rows of all graphs into docs/developers/measurements.md, between its two marks."""
    page = ROOT / "docs" / "developers" / "measurements.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + "\n".join(table_of(held["recipes"])) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def table_of(recipes: dict[str, Any]) -> list[str]:
    """Make the lines of the table: a graph each, with the last of its metrics that was measured."""
    lines = ["| recipe | steps, seconds | metric | first | last | predicted s | measured s | fitted to its own nodes s |", "|---" * 8 + "|"]
    for name, found in recipes.items():
        metric, ends = [
            (metric, found["metrics"][metric]) for metric in RECIPES[name.partition(":")[0]][1] if found["metrics"].get(metric)
        ][-1]
        numbers = [ends["first"], ends["last"], found["predicted_s"], found["measured_s"], found["fitted_s"]]
        cells = ["" if number is None else f"{number:.2f}" for number in numbers]
        count = found.get("steps") or found["settings"]["steps"]
        lines.append(f"| `{name}` | {count}, {found['steps_s']:.0f} | `{metric}` | {' | '.join(cells)} |")
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="the file of results; runs that it holds are not done again")
    arguments.add_argument("--only", choices=list(RECIPES), action="append", help="this recipe, again and again for several")
    arguments.add_argument("--steps", type=int, help="of each recipe, instead of its own number")
    arguments.add_argument("--profiled", type=int, default=6, help="steps of a profile, after the one that warms up; 0 predicts nothing")
    arguments.add_argument("--work", type=Path, default=ROOT / "runs" / "beyond_rl", help="the folder of records and weights")
    arguments.add_argument("--fresh", action="store_true", help="leave out what an earlier run measured")
    arguments.add_argument("--table", action="store_true", help="write the table from the file, and run nothing")
    arguments.add_argument("--smoke", action="store_true", help="two steps of each on a tiny random model")
    given = arguments.parse_args()
    if given.table:
        write_table(json.loads(given.json.read_text()))
        return
    if given.fresh and given.json:
        given.json.unlink(missing_ok=True)
    held = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"machine": machine(), "recipes": {}}
    for name in given.only or RECIPES:
        if name in held.get("done", []):
            continue
        for graph, found in measured(name, given, given.work.absolute()):
            held["recipes"][graph] = found
        held["done"] = [*held.get("done", []), name]
        write(given.json, held)


if __name__ == "__main__":
    main()
