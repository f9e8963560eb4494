"""Seconds of a program's launches one after the other: on Ray, as processes, inside of `rg.runs.warm()`, and with engines kept.

    python benchmarks/speed/launches.py [--model FOLDER] [--shape 0.6B] [--launches 3] [--repeats 3] [--json PATH]
    python benchmarks/speed/launches.py --smoke                 # a tiny model

Each run is a program of its own; runs of the kinds alternate. A launch is the graph of `recipes/one_step_off.py`, as `start.py` has
it: timed from `plan.launch()` until every worker is ready, until its first step has ended, and until it is closed. CPU seconds are
those that the program and all processes below it use until the first step has ended.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write
from benchmarks.lib.machine import machine
from benchmarks.speed import start

KINDS = ("on Ray", "processes", "warm", "engines kept")
TIMEOUT_S = 900.0


def launched(plan: Any, dispatch: str | None) -> dict[str, float]:
    """Launch a plan for one step, and say what it took."""
    began_s, used_s = time.monotonic(), sum(start.cpu_seconds({}).values())
    with plan.launch(dispatch=dispatch) as job:
        ready_s = time.monotonic() - began_s
        step = next(iter(job.steps(1)))
        step_s, cpu_s = time.monotonic() - began_s, sum(start.cpu_seconds({}).values()) - used_s
    closed_s = time.monotonic() - began_s
    return {"ready_s": ready_s, "first_step_s": step_s, "closed_s": closed_s, "cpu_s": cpu_s, "loss": step.metrics["actor/pg_loss"]}


def child(kind: str, model: str, launches: int) -> None:
    """Launch a plan again and again, and print what each launch took."""
    import rlgraph as rg

    cluster = rg.local_cluster()
    plan = rg.compile(start.graph(rg.model_folder(model), 5, in_turns=cluster.gpus == 1), cluster)
    with rg.runs.warm(engines=kind == "engines kept") if kind in ("warm", "engines kept") else contextlib.nullcontext():
        found = [launched(plan, "processes" if kind == "processes" else None) for _ in range(launches)]
    print(json.dumps({"kind": kind, "load": os.getloadavg()[0], "launches": found}))


def one(kind: str, model: str, launches: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", kind, model, str(launches)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def medians(runs: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """The median over runs of each figure of a kind's first launch, and of all its later ones."""
    found = {}
    for kind in kinds:
        own = [run["launches"] for run in runs if run["kind"] == kind]
        for which, rows in (("first", [row for run in own for row in run[:1]]), ("later", [row for run in own for row in run[1:]])):
            if rows:  # a single launch has no later ones
                found[f"{kind}, {which}"] = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "loss"}
    return found


def main() -> None:
    parser = command_line(__doc__, smoke="two launches of each kind with a tiny model")
    parser.add_argument("--model", default="smollm2", help="a folder, or a name that rg.model_folder knows")
    parser.add_argument("--shape", help="a model of this shape with random weights instead: 0.6B, 1.7B, 4B, 8B")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], given.child[1], int(given.child[2]))
        return
    model, launches, repeats = ("tiny", 2, 1) if given.smoke else (given.model, given.launches, given.repeats)
    if given.shape:
        from benchmarks.lib.shapes import random_model

        model = random_model(given.shape, Path(tempfile.gettempdir()) / "rlgraph-shapes")
    runs = []
    for _ in range(repeats):
        for kind in given.kinds:
            runs.append(one(kind, model, launches))
            for row in runs[-1]["launches"]:
                print(f"{kind}: " + ", ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
    losses = {row["loss"] for run in runs for row in run["launches"]}
    result = {
        "script": "benchmarks/speed/launches.py",
        "model": given.shape or ("tiny" if given.smoke else given.model),
        "machine": machine(),
        "one_loss": len(losses) == 1,
        "medians": medians(runs, given.kinds),
        "runs": runs,
    }
    write(given.json, result)


if __name__ == "__main__":
    main()
