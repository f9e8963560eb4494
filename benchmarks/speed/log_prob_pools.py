"""Reference log-probs on a pool of their own against the trainer's pool: how much the step time falls, and what the plan predicts.

    python benchmarks/speed/log_prob_pools.py [--model FOLDER] [--json PATH]

Rollout, reference and update wait instead of computing, so that their times are known and take no cores. The predicted ratio comes from
the costs measured in the run on the trainer's pool alone; both runs are measured in one go. `--model` adds a run of real engines.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from support import fakes

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from rlgraph.columns import Columns
from rlgraph.graph.nodes import Operation, Output, declare
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Stage
from rlgraph.runtime.driver.ray_cluster import start_ray
from rlgraph.values.pool import Pool

STEPS, WARM_UP = 24, 4
REAL_STEPS, REAL_WARM_UP = 10, 2
CLUSTER = rg.Cluster(cpus=2)
WAITS = [  # depth, and the seconds of rollout, reference and update
    (1, (0.3, 0.15, 0.15)),  # rollout is the longest: nothing to win
    (1, (0.2, 0.2, 0.2)),  # one batch after another on their way round sets the step
    (2, (0.2, 0.2, 0.2)),  # the pools set it
    (2, (0.1, 0.2, 0.3)),
    (2, (0.2, 0.3, 0.1)),
]


@dataclass(frozen=True)
class Score(Operation):
    """A reference that waits."""

    seconds: float

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="forward", by_group=True)

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Columns:
            time.sleep(self.seconds)
            values = columns["values"]
            assert isinstance(values, torch.Tensor)
            return {"ref_log_probs": torch.zeros_like(values)}

        return fire


@dataclass(frozen=True, eq=False, kw_only=True)
class VectorReference(fakes.VectorModel):
    role: ClassVar[str] = "reference"


def waiting(depth: int, seconds: tuple[float, float, float], own: bool) -> rg.Graph:
    """Make a graph whose stages wait so long; the reference is on a pool of its own, or on the trainer's."""
    generate_s, score_s, train_s = seconds
    train_pool, weights = Pool("train"), rg.feedback("weights", depth=depth)
    source = rg.prompts(fakes.ITEMS, 4, seed=1)
    writes = ("values", "response_mask", "weight_version", "group_ids")
    generator = fakes.VectorGenerator("vector", pool=Pool("rollout"))
    rollout = Output(
        declare("rollout", fakes.Generate(generate_s), (source,), reads=("prompt_ids",), writes=writes, model=generator, feedback=weights)
    )
    reference = VectorReference("vector", pool=Pool("score") if own else train_pool)
    ref = Output(declare("ref_log_probs", Score(score_s), (rollout,), reads=("values",), writes=("ref_log_probs",), model=reference))
    rewards = fakes.score(rollout)
    reads = ("values", "response_mask", "weight_version", "rewards", "ref_log_probs")
    policy = fakes.VectorPolicy("vector", pool=train_pool)
    update = declare("update", fakes.Train(train_s), (rollout, rewards, ref), reads=reads, writes=(), model=policy)
    weights.close(Output(update, "weights"))
    return rg.Graph("pools", Output(update, "metrics"))


def real(model: str, own: bool) -> rg.Graph:
    """Make a graph of GRPO with a KL term over real engines, one core each."""
    sys.path.append(str(Path(__file__).parents[2] / "recipes"))
    from tasks.addition import right_number, sums

    train_pool, weights = Pool("train"), rg.feedback("weights", depth=2)
    generator = rg.Generator(model, pool=Pool("rollout"), sampling=rg.Sampling(max_tokens=5), engine="transformers", max_context=64)
    policy = rg.Policy(model, pool=train_pool, optimizer=rg.AdamW(lr=5e-6))
    reference = rg.Reference(model, pool=Pool("score") if own else train_pool)
    prompts = rg.prompts(sums(0), count=8, seed=0)
    rollout = generator.rollout(prompts, weights, group_size=4)
    ref = reference.log_probs(rollout)
    advantages = rg.advantages(rollout, rg.reward(right_number, prompts, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, ref, loss=rg.ClippedLoss(kl_coef=0.02))
    weights.close(step.weights)
    return rg.Graph("pools", step.metrics)


def measure(graph: rg.Graph, steps: int, warm_up: int) -> tuple[list[float], rg.planning.Costs]:
    """Measure the seconds of steps after the pipeline has filled, and the costs of the nodes.

    Where the loop sets the pace, the batches that are open end close to one another and then there is a gap: so a time is the mean over
    as many steps as batches are open.
    """
    plan = rg.compile(graph, CLUSTER)
    with plan.launch() as job:
        times = [step.seconds for step in job.steps(steps)][warm_up:]
        window = plan.certificate.open_batches
        return [statistics.mean(times[i : i + window]) for i in range(len(times) - window + 1)], job.costs()


def compare(build: Callable[[bool], rg.Graph], steps: int, warm_up: int) -> dict[str, Any]:
    """Measure both placements; the costs of the first, which fit its own step, predict that of the second."""
    shared, costs = measure(build(False), steps, warm_up)
    own, _ = measure(build(True), steps, warm_up)
    fitted_s, predicted_s = (rg.compile(build(flag), CLUSTER, costs).prediction.period_s for flag in (False, True))
    found = {"train_pool": spread(shared) | {"fitted_s": fitted_s}, "own_pool": spread(own) | {"predicted_s": predicted_s}}
    ratio, expected = statistics.median(own) / statistics.median(shared), predicted_s / fitted_s
    return {**found, "ratio": ratio, "predicted_ratio": expected, "error": ratio / expected - 1}


def spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=10)
    return {"median_s": statistics.median(times), "p10_s": cuts[0], "p90_s": cuts[-1]}


def main() -> None:
    arguments = command_line(__doc__)
    arguments.add_argument("--model", help="a model folder, or smollm2: measure real engines as well")
    options = arguments.parse_args()
    machine = {"cores": rg.local_cluster().cpus, "python": platform.python_version(), "load": os.getloadavg()[0]}
    figures: dict[str, Any] = {"machine": machine, "versions": {"torch": torch.__version__}}
    ours = start_ray()
    cases: dict[str, tuple[Callable[[bool], rg.Graph], int, int]] = {
        f"depth {depth}, rollout {seconds[0]} s, reference {seconds[1]} s, update {seconds[2]} s": (
            partial(waiting, depth, seconds),
            STEPS,
            WARM_UP,
        )
        for depth, seconds in WAITS
    }
    if options.model:
        folder = rg.model_folder(options.model)
        cases["real engines, depth 2"] = (lambda own: real(folder, own), REAL_STEPS, REAL_WARM_UP)
    print(f"{'what':58} {'train pool':>10} {'own pool':>10} {'ratio':>7} {'predicted':>9} {'error':>7}")
    for name, (build, steps, warm_up) in cases.items():
        found = figures[name] = compare(build, steps, warm_up)
        times = " ".join(f"{found[pool]['median_s']:8.3f} s" for pool in ("train_pool", "own_pool"))
        print(f"{name:58} {times} {found['ratio']:7.3f} {found['predicted_ratio']:9.3f} {found['error']:+7.1%}", flush=True)
        write(options.json, figures)
    if ours:
        import ray

        ray.shutdown()


if __name__ == "__main__":
    main()
