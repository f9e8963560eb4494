"""The cost of dispatch: an empty step of four workers against plain actor calls, the driver while it waits, overlap, compiling.

    python benchmarks/speed/dispatch.py [--json PATH]

Everything is measured in one run; medians, with the 10th and 90th percentile.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import ray
import torch
from support import fakes

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from rlgraph.graph.nodes import Operation, Output, declare
from rlgraph.runtime.driver.ray_cluster import start_ray

STEPS, WARM_UP = 300, 50


@dataclass(frozen=True)
class Idle(Operation):
    """Does nothing, so that what is left is dispatch."""

    def start(self, context: Any) -> Any:
        return lambda step, columns: {"rewards": torch.zeros(1)}


class PlainActor:
    """The usual loop of actor calls, without a graph."""

    def step(self, step: int) -> int:
        return step


def empty_graph(workers: int) -> rg.Graph:
    nodes = [declare(f"idle {i}", Idle(), (), reads=(), writes=("rewards",), rows=1) for i in range(workers)]
    return rg.Graph("empty", *(Output(node) for node in nodes))


def plain_calls() -> list[float]:
    actors = [ray.remote(PlainActor).options(num_cpus=0).remote() for _ in range(4)]
    times = []
    for step in range(WARM_UP + STEPS):
        start = time.perf_counter()
        ray.get([actor.step.remote(step) for actor in actors])
        times.append(time.perf_counter() - start)
    for actor in actors:
        ray.kill(actor)
    return times[WARM_UP:]


def rlgraph_steps(dispatch: str) -> list[float]:
    with rg.compile(empty_graph(4), rg.Cluster(cpus=4)).launch(dispatch=dispatch) as job:  # type: ignore[arg-type]
        return [step.seconds for step in job.steps(WARM_UP + STEPS)][WARM_UP:]


def driver_share() -> float:
    """Measure the share of a core that the driver takes while stages of one second run."""
    graph = fakes.vector_loop(1, generate_s=1.0, train_s=1.0)
    with rg.compile(graph, rg.Cluster(cpus=2)).launch() as job:
        steps = job.steps(8)
        next(steps)
        start, used = time.perf_counter(), time.process_time()
        list(steps)
        return (time.process_time() - used) / (time.perf_counter() - start)


def overlap(depth: int) -> list[float]:
    graph = fakes.vector_loop(depth, generate_s=0.3, train_s=0.3)
    with rg.compile(graph, rg.Cluster(cpus=2)).launch() as job:
        return [step.seconds for step in job.steps(12)][2:]


def compile_times() -> list[float]:
    questions = [{"prompt": "1 + 1 =", "answer": "2"}]

    def exact(responses: list[str], answers: list[str]) -> list[float]:
        return [float(r == a) for r, a in zip(responses, answers, strict=True)]

    def once() -> float:
        pools = [rg.Pool(name) for name in ("rollout", "train", "score")]
        generator, policy = rg.Generator("m", pool=pools[0]), rg.Policy("m", pool=pools[1])
        critic, reference = rg.Critic("m", pool=pools[1]), rg.Reference("m", pool=pools[2])
        weights = rg.feedback("weights", depth=1)
        prompts = rg.prompts(questions, count=128)
        rollout = generator.rollout(prompts, weights)
        rewards = rg.reward(exact, prompts, rollout)
        old, ref, values = policy.log_probs(rollout), reference.log_probs(rollout), critic.values(rollout)
        shaped = rg.stages.kl_shaped_rewards(rollout, rewards, old, ref, coef=0.05)
        targets = rg.advantages(rollout, shaped, values, estimator=rg.GAE())
        correction = rg.stages.rollout_correction(rollout, old, weights=rg.estimators.TruncatedIS(level="token", threshold=2.0))
        step = policy.update(rollout, old, targets, correction, loss=rg.ClippedLoss())
        critic_step = critic.update(rollout, values, targets, loss=rg.losses.ValueLoss())
        weights.close(step.weights)
        graph = rg.Graph("ppo", step.metrics, critic_step.metrics)
        start = time.perf_counter()
        rg.compile(graph, rg.Cluster(gpus=8, cpus=64))
        return time.perf_counter() - start

    return [once() for _ in range(20)]


def spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=10)
    return {"median_s": statistics.median(times), "p10_s": cuts[0], "p90_s": cuts[-1]}


def main() -> None:
    arguments = command_line(__doc__)
    path = arguments.parse_args().json
    figures: dict[str, Any] = {"machine": {"cores": rg.local_cluster().cpus, "python": platform.python_version()}}
    figures["versions"] = {"ray": ray.__version__, "torch": torch.__version__}
    ours = start_ray()
    measures: dict[str, Callable[[], list[float]]] = {
        "empty step, plain actor calls": plain_calls,
        "empty step, Compiled Graph": lambda: rlgraph_steps("compiled_graph"),
        "empty step, rlgraph over calls": lambda: rlgraph_steps("calls"),
        "0.3 s + 0.3 s, depth 0": lambda: overlap(0),
        "0.3 s + 0.3 s, depth 1": lambda: overlap(1),
        "rlgraph.compile of PPO": compile_times,
    }
    print(f"{'what':32} {'median':>10} {'p10':>10} {'p90':>10}")
    for name, measure in measures.items():
        found = figures[name] = spread(measure())
        print(f"{name:32} " + " ".join(f"{1e3 * value:7.2f} ms" for value in found.values()))
    figures["driver share of a core"] = driver_share()
    print(f"{'driver, waiting for 1 s stages':32} {figures['driver share of a core']:7.1%} of a core")
    if ours:
        ray.shutdown()
    write(path, figures)


if __name__ == "__main__":
    main()
