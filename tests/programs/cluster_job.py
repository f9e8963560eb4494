"""A job over the hosts of a Ray cluster, whose numbers are compared with those of one process: `cluster_job.py HOSTS [STATUS]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import fakes

from rlgraph.graph.graph import Graph
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.local import LocalJob
from rlgraph.values.pool import Pool

STEPS = 8


def graph() -> Graph:
    judged = Pool("judge")
    return fakes.vector_loop(1, middle=lambda rollout: fakes.score_on_pool(judged, rollout))


def main(hosts: int) -> None:
    made = graph()
    with LocalJob(made, compile_plan(made, Cluster(cpus=2))) as here:
        expected = [step.metrics["loss"] for step in here.steps(STEPS)]
    plan = compile_plan(made, Cluster(cpus=2 * hosts, hosts=hosts))
    with Job(made, plan, dispatch_name="calls", deadline_s=60) as running:
        found = [step.metrics["loss"] for step in running.steps(STEPS)]
    print("hosts", sorted({worker.host for worker in plan.workers}), "same", found == expected)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
