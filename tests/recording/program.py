"""A program as a user writes it, for tests that kill it: `python program.py FOLDER STEPS DEPTH FORMAT`. Says which steps it did."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fakes
import forked  # noqa: F401 (a way of dispatch)

import rlgraph as rg
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job

if __name__ == "__main__":
    folder, steps, depth, format = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    graph = fakes.vector_loop(depth, generate_s=0.01, train_s=0.01)
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    recovery = Recovery(folder / "checkpoints", 4, 2)
    samples = rg.Samples(share=0.5, format=format, file_bytes=1500)  # type: ignore[arg-type]
    with Job(graph, plan, dispatch_name="forked", deadline_s=60.0, recovery=recovery) as job:
        for step in rg.record(job, steps, folder, samples=samples):
            print("did", step.index, flush=True)
