"""A program as a user writes it, for tests that stop it: `python killed_driver.py FOLDER STEPS [forked]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import fakes, forked_workers

import rlgraph as rg
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES

if __name__ == "__main__":
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    if "forked" in sys.argv:
        DISPATCHES["compiled_graph"] = forked_workers.Forked
    plan = rg.compile(fakes.vector_loop(1, generate_s=0.05, train_s=0.05), rg.Cluster(cpus=2))
    with plan.launch(checkpoint=folder / "checkpoints", every=4) as job:
        for step in rg.record(job, steps, folder):
            print("did", step.index, flush=True)
