"""Memory, file handles, shared memory and step time of a run over thousands of steps.

    python benchmarks/reliability/soak.py [--steps 2000] [--forked] [--json PATH]

A small training loop with simulated engines at depth 2, so that only the runtime itself can leave something behind. Every worker and
the driver are sampled each hundredth step. `--forked` starts the workers without Ray. Growth is measured from the second quarter of the
run, after the warm-up, to the last.
"""

import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from rich.progress import track
from support import fakes, forked_workers

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from rlgraph.runtime.driver.job import Job

DEPTH, PROMPTS = 2, 12


@dataclass(frozen=True)
class Look:
    """The memory and handles of one process after a number of steps."""

    step: int
    process: str
    rss_kib: int
    handles: int
    segments: int  # mappings of shared memory
    threads: int


def look(step: int, process: str, pid: int) -> Look:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    segments = sum("memfd:rlgraph" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return Look(step, process, int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), segments, int(status["Threads"]))


def soak(job: Job, steps: int) -> tuple[list[Look], list[float]]:
    looks, seconds = [], []
    with job:
        pids = {**job.pids, "driver": os.getpid()}
        for step in track(job.steps(steps), "soaking", total=steps):
            seconds.append(step.seconds)
            if step.index % (steps // 20) == 0:
                looks += [look(step.index, process, pid) for process, pid in pids.items()]
    return looks, seconds


def quarters(values: list[float]) -> tuple[float, float]:
    """Take the medians of the second quarter of the run and of the last."""
    n = len(values)
    return statistics.median(values[n // 4 : n // 2]), statistics.median(values[3 * n // 4 :])


def main() -> None:
    arguments = command_line(__doc__)
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--forked", action="store_true", help="workers as forked processes, without Ray")
    given = arguments.parse_args()
    began = time.monotonic()
    graph = fakes.vector_loop(DEPTH, buffers=2, count=PROMPTS)
    job = forked_workers.job(graph) if given.forked else rg.compile(graph, rg.Cluster(cpus=2)).launch()
    looks, seconds = soak(job, given.steps)
    before, after = quarters(seconds)
    load = os.getloadavg()[0]
    print(f"{given.steps} steps of {1e3 * before:.2f} ms in the second quarter, {1e3 * after:.2f} ms in the last; load {load:.1f}")
    growth = {}
    for process in dict.fromkeys(one.process for one in looks):
        own = [one for one in looks if one.process == process]
        growth[process] = {name: quarters([getattr(one, name) for one in own]) for name in ("rss_kib", "handles", "segments", "threads")}
        print(f"{process:12} " + "; ".join(f"{name} {a:.0f} -> {b:.0f}" for name, (a, b) in growth[process].items()))
    if given.json:
        figures = {
            "steps": given.steps,
            "seconds": sum(seconds),  # of all steps
            "seconds_with_start": time.monotonic() - began,
            "depth": DEPTH,
            "forked": given.forked,
            "load": os.getloadavg(),
            "step_s": {"second quarter": before, "last quarter": after},
            "second and last quarter": growth,
            "looks": [asdict(one) for one in looks],
        }
        write(given.json, figures)


if __name__ == "__main__":
    main()
