"""Jobs with an engine that `rg.runs.warm(engines=True)` keeps, and what tests ask of it."""

import time
from pathlib import Path
from typing import Any

from support import forked_workers
from support.digests import clockless_metrics, digest_loop
from support.renewable_engine import ENGINE

import rlgraph as rg

GONE_S = 30.0
Found = tuple[list[dict[str, float]], int]  # the metrics of a job's steps, and the process of its engine


def renewable_loop(model: Path, engine: object = ENGINE, **given: Any) -> rg.Graph:
    return digest_loop(model, engine, **given)


def run_job(graph: rg.Graph, steps: int = 3, **options: object) -> Found:
    with rg.compile(graph, rg.Cluster(cpus=2)).launch(**options) as job:  # type: ignore[arg-type]
        return [clockless_metrics(step) for step in job.steps(steps)], job.pids["generator"]


def wait_until_gone(pid: int) -> bool:
    end = time.monotonic() + GONE_S
    while forked_workers.alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not forked_workers.alive(pid)
