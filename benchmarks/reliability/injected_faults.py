"""Over a hundred faults injected into a job, each kind in each stage, with the time until the error or the recovery.

    python benchmarks/reliability/injected_faults.py forked [--json PATH] [--only KIND]
    python benchmarks/reliability/injected_faults.py ray [--json PATH] [--only KIND] [--part 1/4]

`forked` workers are processes without Ray, which start in milliseconds; driver, channels, watchdog and weights are those of a job, and
every fault happens both at the first step and in the middle. On `ray`, each happens at one of the two. The first line of the error must
name the faulty node or its worker, and the whole error must name a channel; a slow node must give a warning and a finished run. Seconds
count from the fault in the worker to the error in the driver, after its workers ended. `--part` injects a share of the faults and adds
them to the file.
"""

import json
import logging
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import ray
import torch
from rich.progress import track
from support import fakes, faults, forked_workers

from benchmarks.lib.command import command_line, write
from rlgraph.errors import RlgraphError
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.ray_cluster import start_ray

DEADLINE_S = 3.0
STEPS = 8
LATE_S = {"forked": 2.0, "ray": 5.0}  # that the error of a stall may come after the deadline


class Warnings(logging.Handler):
    """Keeps what the watchdog says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def run(fault: faults.Fault, warnings: Warnings, on: str) -> dict[str, Any]:
    """Run a job with the fault; describe its end, and whether that is the expected one."""
    warnings.said.clear()
    ended, pids = "finished", []
    graph = faults.graph(fault)
    dispatch = {"forked": "forked", "ray": "compiled_graph"}[on]
    job = Job(graph, compile_plan(graph, Cluster(cpus=2)), dispatch_name=dispatch, deadline_s=DEADLINE_S)
    try:
        with job:
            pids = list(job.pids.values())
            list(job.steps(STEPS))
    except RlgraphError as error:
        ended = f"{type(error).__name__}: {error}"
    now = time.monotonic()
    clock = Path(fault.clock)
    seconds = now - float(clock.read_text()) if clock.exists() else None
    for path in re.findall(r"stacks of all workers are in (\S+\.txt)", ended):
        os.unlink(path)
    first = ended.splitlines()[0]
    names = any(f"'{name}'" in first for name in (fault.node, fault.worker))
    right = (
        f"in worker '{fault.worker}'" in str(warnings.said)
        if fault.kind == "slow" and ended == "finished"
        else names and "channel" in ended
    )
    limit = DEADLINE_S + LATE_S[on] if fault.kind in faults.HANGS or fault.kind == "full channel" else 5.0
    return {
        "kind": fault.kind,
        "stage": fault.stage,
        "step": fault.step,
        "first line": first[:240],
        "named": bool(right),
        "seconds": seconds,
        "in time": ended == "finished" or (seconds is not None and seconds <= limit),
        "left": [pid for pid in pids if forked_workers.alive(pid)],
    }


def chosen(on: str, only: str | None, part: str, folder: str) -> list[faults.Fault]:
    """List the faults to inject: on Ray, where a job takes seconds to start, each kind in each stage at one of the steps."""
    cases = [fault for fault in faults.cases(folder) if only in (None, fault.kind)]
    if on == "ray":
        half = len(cases) // 2
        cases = [pair[i % 2] for i, pair in enumerate(zip(cases[:half], cases[half:], strict=True))]
    number, parts = (int(n) for n in part.split("/"))
    return cases[number - 1 :: parts]


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the faults in one place where workers run."""
    right = [row for row in found if row["named"] and row["in time"] and not row["left"]]
    named = sum(row["named"] for row in found)
    return {"faults": len(found), "first line names the culprit": named, "as they should be": len(right), "cases": found}


def main() -> None:
    arguments = command_line(__doc__)
    arguments.add_argument("on", choices=["forked", "ray"])
    arguments.add_argument("--only", help="faults of this kind alone")
    arguments.add_argument("--part", default="1/1", help="the faults of one part, 2/4 say, added to those in the file")
    given = arguments.parse_args()
    warnings = Warnings()
    logging.getLogger("rlgraph.watchdog").addHandler(warnings)
    if given.on == "ray":
        start_ray()
    else:
        with forked_workers.job(fakes.vector_loop(1)) as warm:  # the server that workers are forked from imports torch once
            list(warm.steps(2))
    with tempfile.TemporaryDirectory() as folder:
        cases = chosen(given.on, given.only, given.part, folder)
        found = [run(fault, warnings, given.on) for fault in track(cases, "injecting faults")]
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row in found:
        by_kind[row["kind"]].append(row["seconds"] if row["seconds"] is not None else float("nan"))
    for kind, seconds in by_kind.items():
        print(f"{kind:24} {len(seconds):3} faults, median {statistics.median(seconds):5.2f} s, longest {max(seconds):5.2f} s")
    wrong = [row for row in found if not row["named"] or not row["in time"] or row["left"]]
    print(f"{len(found)} faults, {len(found) - len(wrong)} as they should be; load average {os.getloadavg()[0]:.1f}")
    for row in wrong:
        print(row)
    if given.json:
        figures = json.loads(given.json.read_text()) if given.json.exists() else {}
        before = figures.get(given.on, {}).get("cases", []) if given.part[0] != "1" else []
        versions = {"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__}
        machine = {"cpus": len(os.sched_getaffinity(0)), "load average": os.getloadavg(), **versions}
        figures |= {"deadline_s": DEADLINE_S, given.on: {"machine": machine, **summary([*before, *found])}}
        write(given.json, figures)


if __name__ == "__main__":
    main()
