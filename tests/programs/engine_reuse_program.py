"""A program that keeps an engine, for a test that kills it: `engine_reuse_program.py MODEL forked|alone` prints its process id."""

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.digests import ITEMS
from support.renewable_engine import ENGINE

import rlgraph as rg
from rlgraph.runtime.driver import warm

model, alone = sys.argv[1], sys.argv[2] == "alone"
found = warm.ForkedProcesses._requirements
warm.ForkedProcesses._requirements = lambda self, spec: replace(found(self, spec), opens_gpus=alone)  # type: ignore[method-assign]
generator = rg.Generator(model, pool=rg.Pool("rollout"), engine=ENGINE, sampling=rg.Sampling(max_tokens=4), dtype="float32")
rollout = generator.rollout(rg.prompts(ITEMS, count=2, seed=3))
with rg.runs.warm(engines=True):
    with rg.compile(rg.Graph("samples", rollout), rg.Cluster(cpus=2)).launch() as job:
        pid = job.pids["generator"]
        list(job.steps(1))
    print("kept", pid, flush=True)
    time.sleep(300)
