"""A program that launches inside of `rg.runs.warm()`, for tests that end it: `python warm_program.py STEPS SECONDS` says its processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import fakes

import rlgraph as rg
from rlgraph.errors import RlgraphError

steps, train_s = int(sys.argv[1]), float(sys.argv[2])
plan = rg.compile(fakes.vector_loop(1, generate_s=0.1, train_s=train_s), rg.Cluster(cpus=2))
with rg.runs.warm() as warm:
    late = plan.launch()
    with plan.launch() as job:
        print("has", *warm.pids, *job.pids.values(), flush=True)
        list(job.steps(steps))
try:
    late.__enter__()
except RlgraphError as error:
    print(error, flush=True)
