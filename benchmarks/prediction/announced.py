"""Step times of runs on GPUs, predicted and committed before the runs: from nothing, and from the costs of another plan's run.

    python benchmarks/prediction/announced.py predict [NAME ...]  # on any machine: predicts what has no measurement, then commit the file
    python benchmarks/prediction/announced.py run NAME [--steps 7] [--model FOLDER]  # on the GPUs: refuses a run that is not predicted
    python benchmarks/prediction/announced.py table
    python benchmarks/prediction/announced.py parts     # rollouts and updates as the present code estimates them, over what they took

A run is one job of `peer_job.py`. `results/announced_h200.json` holds what was said before, with the day and the commit that the code
was at, and what was measured. Costs that a run took are kept in `announced_costs/`, for the predictions of those that follow.
"""

import argparse
import dataclasses
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.peers import peer_job
from benchmarks.peers.peer_job import Config
from benchmarks.prediction import a_priori
from benchmarks.prediction.predicted_runs import seconds_with_error

RESULTS = Path(__file__).parents[1] / "results"
FILE, COSTS = RESULTS / "announced_h200.json", Path(__file__).parents[1] / "announced_costs"


@dataclass(frozen=True)
class Announced:
    """A job on so many H200, and the run from whose costs it is predicted too."""

    gpus: int
    job: Config
    after: str | None = None


ALONE = Config(mode="colocated", model="1.7B", prompts=32, engines_per_gpu=1, micro_batch_tokens=16384, compiled=True)
ADAPTER = dataclasses.replace(ALONE, model="4B", rank=32, compiled=False)
SMALL = dataclasses.replace(ALONE, model="0.6B")
PAIR = Config(model="4B", prompts=32, engines_per_gpu=1, micro_batch_tokens=8192, compiled=True)  # a GPU for each side
RUNS = {
    "1.7B, one engine": Announced(1, ALONE),
    "1.7B, two engines": Announced(1, dataclasses.replace(ALONE, engines_per_gpu=2), "1.7B, one engine"),
    "1.7B, 512 responses of 512 tokens": Announced(1, dataclasses.replace(ALONE, prompts=64, response_tokens=512), "1.7B, one engine"),
    "4B by an adapter, one engine": Announced(1, ADAPTER),
    "4B by an adapter, compiled": Announced(1, dataclasses.replace(ADAPTER, compiled=True), "4B by an adapter, one engine"),
    "4B by an adapter, two engines": Announced(1, dataclasses.replace(ADAPTER, engines_per_gpu=2), "4B by an adapter, one engine"),
    "0.6B, one engine": Announced(1, SMALL),
    "0.6B, two engines": Announced(1, dataclasses.replace(SMALL, engines_per_gpu=2), "0.6B, one engine"),
    "0.6B, 512 responses of 512 tokens": Announced(1, dataclasses.replace(SMALL, prompts=64, response_tokens=512), "0.6B, one engine"),
    "0.6B, half the responses": Announced(1, dataclasses.replace(SMALL, prompts=16), "0.6B, one engine"),
    "0.6B, layers recomputed": Announced(1, dataclasses.replace(SMALL, recompute=True), "0.6B, one engine"),
    "4B, one step off": Announced(2, PAIR),
    "4B, time-shared on both": Announced(2, dataclasses.replace(PAIR, mode="colocated"), "4B, one step off"),
}


def read_results() -> dict[str, dict[str, Any]]:
    """Read what was announced and measured so far."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def costs_of(name: str) -> Path:
    return COSTS / f"{name.replace(',', '').replace(' ', '_').lower()}.yaml"


def plan_of(run: Announced, models: Path, costs: rg.planning.Costs | None = None) -> rg.Plan:
    """Plan a run; without a GPU, and without weights."""
    cfg = dataclasses.replace(run.job, model=a_priori.folder(run.job.model, models))
    return rg.compile(peer_job.graph(cfg), a_priori.cluster(run.gpus), costs)


def predict_one(run: Announced, models: Path) -> dict[str, Any]:
    """Predict a run both ways."""
    said: dict[str, Any] = {"from_nothing_s": plan_of(run, models).prediction.step_s}
    if run.after and costs_of(run.after).is_file():
        costs = rg.planning.Costs.from_file(costs_of(run.after))
        said["from_costs_s"] = plan_of(run, models, costs).prediction.step_s
        said["costs_of"] = run.after
    return said


def predict(names: Iterable[str]) -> None:
    """Predict what was not measured yet."""
    found = read_results()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    with tempfile.TemporaryDirectory() as models:
        for name in names:
            row = found.setdefault(name, {})
            if "step_s" in row:
                continue
            said = predict_one(RUNS[name], Path(models))
            new = {key: value for key, value in said.items() if key not in row}  # what was said once stays
            day = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
            row |= new | ({"said": [*row.get("said", []), f"{day}, code of {commit}: {', '.join(new)}"]} if new else {})
            print(f"{name}: {said}", flush=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def run(name: str, steps: int, model: str | None) -> None:
    """Run a predicted job, and add its seconds to the file; `model` is a folder of the job's shape that a peer reads too."""
    row = read_results().get(name, {})
    if "from_nothing_s" not in row:
        raise SystemExit(f"{name!r} has no prediction in {FILE.name}; `announced.py predict` makes one, which is committed first")
    COSTS.mkdir(exist_ok=True)
    job = RUNS[name].job
    cfg = dataclasses.replace(job, model=model or job.model, steps=steps, write_costs=str(costs_of(name)), name=name)
    with tempfile.TemporaryDirectory() as folder:
        cfg.json = f"{folder}/run.json"
        peer_job.run(cfg)
        took = json.loads(Path(cfg.json).read_text(encoding="utf-8"))[name]
    took["settings"]["model"] = job.model
    found = read_results()
    found[name] |= {key: value for key, value in took.items() if not key.startswith("predicted")}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: took {took['step_s']:.2f} s, said {row}", flush=True)


def factors(kind: str) -> list[float]:
    """List the factors, above or below, between what was predicted from `nothing` or from `costs` and what the runs took."""
    rows = [row for row in read_results().values() if "step_s" in row and f"from_{kind}_s" in row]
    return [max(row[f"from_{kind}_s"] / row["step_s"], row["step_s"] / row[f"from_{kind}_s"]) for row in rows]


def tables() -> dict[str, str]:
    """Write the table by its name, as Markdown."""
    lines = ["| run on H200s | took | predicted from nothing | predicted from another run's costs |", "|---|---|---|---|"]
    for name, row in read_results().items():
        if "step_s" in row:
            cells = (seconds_with_error(row.get(f"from_{kind}_s"), row["step_s"], digits=1) for kind in ("nothing", "costs"))
            lines.append(f"| {name} | {row['step_s']:.1f} s | {' | '.join(cells)} |")
    found = [f"{statistics.median(each):.2f}, {max(each):.2f}" if (each := factors(kind)) else "" for kind in ("nothing", "costs")]
    lines.append(f"| factor, median and worst | | {' | '.join(found)} |")
    return {"announced": "\n".join(lines) + "\n"}


def parts() -> None:
    """Print the rollout and the update of each run as the present code estimates them from nothing, over what they took."""
    with tempfile.TemporaryDirectory() as models, a_priori.sharing_up_to(math.inf):
        for name, row in read_results().items():
            if "step_s" in row:
                plan = plan_of(RUNS[name], Path(models))
                took = {node: row["timings"][f"timing_s/{part}"] for node, part in (("rollout", "gen"), ("update", "update_actor"))}
                print(f"{name}: " + ", ".join(f"{node} {plan.node(node).seconds / took_s:.2f}" for node, took_s in took.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "run", "table", "parts"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--model", metavar="FOLDER", help="folder of the job's shape, instead of one that the job makes")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in RUNS]:
        raise SystemExit(f"no run is named {unknown[0]!r}; there are {', '.join(RUNS)}")
    if given.what == "predict":
        predict(given.names or RUNS)
    for name in given.names if given.what == "run" else ():
        run(name, given.steps, given.model)
    for kind in ("nothing", "costs"):
        if found := factors(kind):
            print(f"from {kind}: median factor {statistics.median(found):.3f}, worst {max(found):.3f} of {len(found)}")
    if given.what == "parts":
        parts()
    if given.what == "table":
        print(tables()["announced"])


if __name__ == "__main__":
    main()
