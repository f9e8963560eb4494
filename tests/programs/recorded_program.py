"""A recorded run, for tests that kill it: `python recorded_program.py FOLDER STEPS DEPTH FORMAT` says which steps it did."""

import sys
from collections.abc import Iterator
from pathlib import Path

from support import fakes, forked_workers  # noqa: F401 (a way of dispatch)

import rlgraph as rg
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job


def run(folder: Path, steps: int, depth: int, format: str) -> Iterator[int]:
    """Record steps, or those that are left, with small files of samples."""
    graph = fakes.vector_loop(depth, generate_s=0.01, train_s=0.01)
    recovery = Recovery(folder / "checkpoints", 4, 2)
    samples = rg.runs.Samples(share=0.5, format=format, file_bytes=1500)  # type: ignore[arg-type]
    with Job(graph, rg.compile(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=60.0, recovery=recovery) as job:
        for step in rg.record(job, steps, folder, samples=samples, quiet=True):
            yield step.index


if __name__ == "__main__":
    for done in run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]):
        print("did", done, flush=True)
