"""Two hosts with network stacks of their own and a GPU each: `hosts_here.py` trains there, and on one host with both GPUs.

The hosts share nothing but a network, so ranks of one model meet by NCCL's sockets, and weights go from host to host by TCP. What is
computed has the same bits as on one host. `--smoke` takes gloo and the CPU. Needs root and iproute2, as `namespaces.py` says.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from programs import network_program as hosts
from ray import cloudpickle
from support import forked_workers, namespaces
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.worker import process

SMOKE = "--smoke" in sys.argv
STEPS = 4
SUMS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(1, 9) for b in range(1, 9)]


def serve(pickled: bytes, driver: str) -> None:
    """Be a worker, on its GPUs of those that its host has."""
    spec = cloudpickle.loads(pickled)
    each = 1 if spec.listen_at else 2
    first = (spec.worker.host if spec.listen_at else 0) * each
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + gpu) for gpu in spec.local_gpus)
    process.serve(spec, driver)


def ranks(model: str) -> rg.Graph:
    """One model whose two ranks sum their gradients."""
    policy = rg.Policy(model, pool=rg.Pool("train", **({"share": 2.0} if SMOKE else {"gpus": 2})), data_parallel=2)
    return rg.Graph("ranks", policy.update(rg.examples(SUMS, 8, policy), loss=rg.SFTLoss()).metrics)


def published(model: str) -> rg.Graph:
    """A trainer and a generator that gets its weights."""
    sampling = rg.Sampling(max_tokens=8)
    pools = [rg.Pool(name, **({} if SMOKE else {"gpus": 1})) for name in ("rollout", "train")]
    generator = rg.Generator(model, pool=pools[0], engine="transformers", sampling=sampling, max_context=64)
    policy = rg.Policy(model, pool=pools[1], optimizer=rg.AdamW(lr=1e-3))
    return grpo_graph(generator, policy, [{"prompt": row["prompt"]} for row in SUMS], name="published", rewards=hosts.lengths, group_size=4)


def metrics(graph: rg.Graph, on: int) -> tuple[set[int], list[dict[str, Any]]]:
    """Run a graph on so many hosts; return the hosts that computed, and the metrics of each step but its times."""
    gpus: dict[str, Any] = {} if SMOKE else {"gpus": 2, "gpus_per_node": 2 // on, "gpu": "NVIDIA H200"}
    plan = compile_plan(graph, Cluster(cpus=8, hosts=on, **gpus))
    with Job(graph, plan, dispatch_name="placed", deadline_s=150.0) as running:
        given = [step.metrics for step in running.steps(STEPS)]
    left_out = "timing_s/", "perf/", "memory/"
    return {worker.host for worker in plan.workers}, [{k: v for k, v in step.items() if not k.startswith(left_out)} for step in given]


def compared(control: hosts.Control) -> Mapping[str, object]:
    """Run both graphs on two hosts and on one."""
    writing = os.fork()  # a process that has computed with torch cannot be forked
    if writing == 0:
        tiny_model(control.shared / "model", hidden=128)
        os._exit(0)
    os.waitpid(writing, 0)
    outcome: dict[str, object] = {}
    for made in (ranks, published):
        graph = made(str(control.shared / "model"))
        (apart, two), (_, one) = metrics(graph, 2), metrics(graph, 1)
        differ = sorted({f"{key}: {a[key]} {b.get(key)}" for a, b in zip(two, one, strict=True) for key in a if a[key] != b.get(key)})
        outcome[made.__name__] = {"hosts": sorted(apart), "steps": len(two), "differ": differ}
    return outcome


def main() -> None:
    if os.getpid() != 1:
        sys.exit(subprocess.run(namespaces.isolate_command([sys.executable, __file__, *sys.argv[1:]]), check=False).returncode)
    forked_workers.serve = serve
    hosts.CASES["compared"] = compared
    found: dict[str, Any] = {}
    worst = hosts.main(1, ["compared"], found.update)
    print(found)
    both = [found.get(name, {}) for name in ("ranks", "published")]
    print("equal" if not worst and all(one.get("hosts") == [0, 1] and one["differ"] == [] for one in both) else "different")


if __name__ == "__main__":
    main()
