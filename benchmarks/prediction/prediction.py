"""Predicted against measured step time on Ray, with stages that wait for a given time and with real engines of a small model.

    python benchmarks/prediction/prediction.py [--json PATH] [--family NAME] [--steps N] [--only WORD]

The profile of one configuration (depth 1, one engine each) gives the costs. They predict all other configurations of its family:
synchronous and 1 to 3 steps off, colocated and split, other batch sizes, some with a reference pass, uniform lengths and a long tail.
Then each configuration runs, and its step is compared with the earlier prediction: the mean step for a long tail, the median step if
all steps take equally long, because a busy machine sometimes stops a stage for seconds.

Real engines that compute at the same time compete for the cores of one small machine. So synchronous runs are predicted from a
synchronous profile, and the others from a profile in which engines overlap. A shared machine also changes speed, so each profile is
made just before its run, at another batch size. Steps take 0.5 s to 2 s, which averages out the noise of the scheduler, and are
compared by their mean without stalls, as costs are computed. Each configuration is profiled and run three times, because a neighbour
may disturb one of the launches: the median error counts, and the file holds all three. It also holds the fit, the step computed
from the costs of the run itself: the remaining error means that the machine changed speed between profile and run.

If one side takes much longer than the other ("uneven"), splitting the devices makes a step longer than time-sharing all of them, so the
synchronous configuration wins. A pair is a synchronous and an asynchronous configuration for the same work on equally many devices.

Two more figures: the share of each run's device-seconds that no row of `job.bubbles()` explains; and, among the configurations for the
same work on equally many devices, the step of the one predicted fastest over the fastest step.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
from support.simulated_stages import LONG_TAIL, UNIFORM, Loop, Times
from support.tiny import WeightedLikelihood

import rlgraph as rg
from benchmarks.lib.accuracy import accuracy, summary
from benchmarks.lib.command import command_line, write
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.plan import calibrate
from rlgraph.runtime.driver.ray_cluster import start_ray, stop_ray

SLOW_REWARD = Times(reward_s=0.06)
REAL = "real engines"
WARM_UP, WARM_UP_REAL = 6, 3  # steps that fill the pipeline and warm the engines
UNEVEN = {  # one side takes most of the time, and more devices shorten it
    "uneven, long generation": Times(step_s=0.1e-3, sequence_s=0.3e-3, train_token_s=0.02e-3),
    "uneven, long training": Times(train_token_s=0.35e-3),
    "uneven, generation twice training": Times(step_s=0.1e-3, sequence_s=0.2e-3, train_token_s=0.08e-3),
    "uneven, long training, long tail": Times(train_token_s=0.35e-3),
}
PROFILED = {"uniform": 40, "long tail": 200, REAL: 12, "uneven": 30}  # steps; a tail of lengths must have been seen to be foreseen
STEPS_UNEVEN = 30
STEPS_REAL = 16  # measured, of half a second to two
ROUNDS = 3  # of real engines, each a profile and a run


@dataclass(frozen=True)
class Case:
    """One configuration: its graph, the cluster it is planned for, and the family whose profile predicts it."""

    family: str
    name: str
    graph: Callable[[], rg.Graph]
    cores: int
    asynchronous: bool
    profiled: tuple[Callable[[], rg.Graph], ...] = ()  # the sizes of batch that its costs are read off


@dataclass(frozen=True)
class Found:
    family: str
    name: str
    devices: int
    asynchronous: bool
    predicted_s: float
    cycle_s: float  # by the critical cycle, without lengths
    mean_s: float
    median_s: float
    standard_error_s: float
    residual: float  # the share of device-seconds that nothing explains
    load: float  # of the machine, after the run
    steady_s: float | None = None  # of real engines: the mean of the steps that were no stalls
    own_s: float | None = None  # of real engines: the step fitted to the costs of the run itself
    rounds: tuple[float, ...] = ()  # of real engines: the errors of all rounds, of which this is the median one
    steps: int | None = None  # measured, where not as many as `steps` of the file

    @property
    def measured_s(self) -> float:
        if self.steady_s is not None:
            return self.steady_s
        return self.mean_s if self.family.startswith("long tail") else self.median_s

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def simulated() -> Iterator[Case]:
    """Stages that wait; the pretended devices are ranks."""
    for family, lengths in (("uniform", UNIFORM), ("long tail", LONG_TAIL)):
        base = Loop(lengths=lengths)
        loops = {
            "sync, colocated": replace(base, depth=0, shared=True),
            "depth 0": replace(base, depth=0),
            "depth 1": base,
            "depth 2": replace(base, depth=2),
            "depth 3, 2 buffers": replace(base, depth=3, buffers=2),
            "depth 1, batch 32": replace(base, rows=32),
            "sync on 2, split 1:1": replace(base, depth=0, shared=True, generators=2, trainers=2),
            "depth 1, split 2:1": replace(base, generators=2),
            "depth 1, split 1:2": replace(base, trainers=2),
            "depth 2, split 3:2": replace(base, depth=2, generators=3, trainers=2),
            "sync, colocated on 3": replace(base, depth=0, shared=True, generators=3, trainers=3),
            "depth 0, 4 chunks, slow reward": replace(base, depth=0, chunks=4, times=SLOW_REWARD),
            "depth 0, slow reward": replace(base, depth=0, times=SLOW_REWARD),
            "depth 1, reference with training": replace(base, reference="train"),
            "depth 1, reference on its own": replace(base, reference="own"),
        }
        for name, loop in loops.items():
            slow = ", slow reward" if loop.times == SLOW_REWARD else ""
            yield Case(family + slow, name.removesuffix(slow), loop.graph, loop.devices, loop.depth > 0)


def uneven() -> Iterator[Case]:
    """Two devices in turns, and one for each side, where one side takes most of the time."""
    for family, times in UNEVEN.items():
        base = Loop(lengths=lengths_of(family), times=times)
        loops = {
            "sync, colocated on both": replace(base, depth=0, shared=True, generators=2, trainers=2),
            "depth 1": base,
            "depth 2": replace(base, depth=2),
        }
        for name, loop in loops.items():
            yield Case(family, name, loop.graph, loop.devices, loop.depth > 0)


def lengths_of(family: str) -> rg.planning.Lengths:
    return LONG_TAIL if "long tail" in family else UNIFORM


def profiled_loop(family: str) -> Loop:
    """The configuration that is profiled: with a reference, so that its cost is known to those that have one."""
    if family in UNEVEN:
        return Loop(lengths=lengths_of(family), times=UNEVEN[family])
    return Loop(lengths=UNIFORM if family.startswith("uniform") else LONG_TAIL, reference="own", times=times_of(family))


def times_of(family: str) -> Times:
    return SLOW_REWARD if family.endswith("slow reward") else Times()


@dataclass(frozen=True)
class Real:
    """GRPO of a small model: transformers samples, FSDP2 trains."""

    folder: str
    depth: int
    prompts: int = 8
    shared: bool = False

    def graph(self) -> rg.Graph:
        together = rg.Pool("shared")
        rollout_pool, train_pool = (together, together) if self.shared else (rg.Pool("rollout"), rg.Pool("train"))
        sampling = rg.Sampling(max_tokens=64, ignore_eos=True)
        generator = rg.Generator(self.folder, pool=rollout_pool, engine="transformers", sampling=sampling, max_context=128, dtype="float32")
        policy = rg.Policy(self.folder, pool=train_pool, dtype="float32", micro_batch_tokens=1024)
        weights = rg.feedback("weights", depth=self.depth)
        items = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(40)]
        source = rg.prompts(items, count=self.prompts)
        rollout = generator.rollout(source, weights, group_size=4)
        rewards = rg.reward(length_reward, rollout)
        advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
        step = policy.update(rollout, advantages, loss=WeightedLikelihood())
        weights.close(step.weights)
        return rg.Graph("small", step.metrics)


def length_reward(responses: list[str]) -> list[float]:
    return [float(len(set(text)) % 7) for text in responses]


def real(folder: str) -> Iterator[Case]:
    loops = {
        "sync, colocated on 1 core": Real(folder, depth=0, shared=True),
        "depth 0": Real(folder, depth=0),
        "depth 1": Real(folder, depth=1),
        "depth 2": Real(folder, depth=2),
        "depth 0, batch 64": Real(folder, depth=0, prompts=16),
        "depth 1, batch 64": Real(folder, depth=1, prompts=16),
        "depth 2, batch 64": Real(folder, depth=2, prompts=16),
    }
    for name, loop in loops.items():
        base = Real(folder, depth=min(loop.depth, 1))
        sizes = (base,) if loop.prompts == base.prompts else (base, replace(base, prompts=3 * base.prompts))
        profiled = tuple(size.graph for size in sizes)
        yield Case(REAL, name, loop.graph, 1 if loop.shared else 2, loop.depth > 0, profiled)


def costs_for(case: Case, costs: rg.planning.Costs) -> rg.planning.Costs:
    """Pick the profile's costs of the nodes that this graph has."""
    names = {node.name for node in case.graph().nodes}
    return replace(costs, nodes={name: cost for name, cost in costs.nodes.items() if name in names})


def measured(case: Case, costs: rg.planning.Costs, steps: int) -> Found:
    graph = case.graph()
    plan = rg.compile(graph, rg.Cluster(cpus=case.cores), costs_for(case, costs))
    with plan.launch() as job:
        warm_up = WARM_UP_REAL if case.profiled else WARM_UP
        seconds = [step.seconds for step in job.steps(steps + warm_up)][warm_up:]
        residual = job.bubbles().residual
        own = rg.compile(graph, plan.cluster, job.costs()).prediction.step_s if case.profiled else None
    error = statistics.stdev(seconds) / len(seconds) ** 0.5
    predicted = plan.prediction
    return Found(
        family=case.family,
        name=case.name,
        devices=case.cores,
        asynchronous=case.asynchronous,
        predicted_s=predicted.step_s,
        cycle_s=predicted.period_s,
        mean_s=statistics.mean(seconds),
        median_s=statistics.median(seconds),
        standard_error_s=error,
        residual=residual,
        load=os.getloadavg()[0],
        steady_s=calibrate.mean(np.array(seconds)) if case.profiled else None,
        own_s=own,
    )


def profile(case: Case) -> rg.planning.Costs:
    if case.profiled:
        return rg.planning.profile([graph() for graph in case.profiled], rg.Cluster(cpus=2), PROFILED[case.family])
    loop = profiled_loop(case.family)
    return rg.planning.profile(loop.graph(), cores_for(loop), PROFILED[case.family.split(",")[0]])


def cores_for(loop: Loop) -> rg.Cluster:
    """A core for each rank: with more, a rank would count as an engine of several cores, and be scaled to one of a single core."""
    return rg.Cluster(cpus=loop.devices)


def measure(cases: list[Case], steps: int) -> Iterator[Found]:
    profiles = dict[str, rg.planning.Costs]()
    print(f"{'family':22} {'configuration':33} {'predicted':>9} {'measured':>9} {'±':>6} {'error':>7}  load")
    for case in cases:
        if case.profiled:
            one = median_round([measured(case, profile(case), STEPS_REAL) for _ in range(ROUNDS)])
        else:
            if case.family not in profiles:
                profiles[case.family] = profile(case)
            few = case.family in UNEVEN
            one = measured(case, profiles[case.family], STEPS_UNEVEN if few else steps)
            one = replace(one, steps=STEPS_UNEVEN) if few else one
        own = f"  fitted to its own costs {one.own_s / one.measured_s - 1:+.1%}" if one.own_s is not None else ""
        own += f"; rounds {', '.join(f'{error:+.1%}' for error in one.rounds)}" if one.rounds else ""
        times = f"{1e3 * one.predicted_s:6.1f} ms {1e3 * one.measured_s:6.1f} ms {1e3 * one.standard_error_s:6.1f}"
        print(f"{one.family:22} {one.name:33} {times} {one.error:+7.1%}  {one.load:.1f}{own}", flush=True)
        yield one


def median_round(rounds: list[Found]) -> Found:
    """Pick the round with the median error, and note the errors of all."""
    errors = tuple(one.error for one in rounds)
    return replace(sorted(rounds, key=lambda one: one.error)[len(rounds) // 2], rounds=errors)


def pairs(found: list[Found]) -> list[tuple[Found, Found]]:
    """Pair each synchronous configuration with each asynchronous one that does the same work on equally many devices."""
    return [
        (one, other)
        for one in found
        for other in found
        if (one.family, one.devices) == (other.family, other.devices)
        and not one.asynchronous
        and other.asynchronous
        and comparable(one.name, other.name)
    ]


def works(found: list[Found]) -> dict[str, list[Found]]:
    """Group the configurations that do the same work, by family and number of devices."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        if not any(word in one.name for word in ("batch", "reference")):
            groups.setdefault(f"{one.family}, {one.devices} devices", []).append(one)
    return groups


def comparable(sync: str, asynchronous: str) -> bool:
    """True if two configurations of a family do the same work."""
    return ("batch" in sync) == ("batch" in asynchronous) and "reference" not in sync + asynchronous


def earlier(path: Path | None, family: str | None) -> list[Found]:
    """Read the results of the other families if only one is measured."""
    if path is None or family is None or not path.exists():
        return []
    kept = [one for one in json.loads(path.read_text())["configurations"] if not one["family"].startswith(family)]
    return [Found(**{key: value for key, value in one.items() if key not in ("measured_s", "error")}) for one in kept]


def figures(found: list[Found], steps: int, load: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "machine": {"cores": rg.local_cluster().cpus, "load_before": load, "load_after": os.getloadavg()},
        "steps": steps,
        "profiled_steps": PROFILED,
        **accuracy(found, pairs(found), works(found)),
        "configurations": [{**asdict(one), "measured_s": one.measured_s, "error": one.error} for one in found],
    }


def main() -> None:
    arguments = command_line(__doc__)
    families = ["uniform", "long tail", REAL, "uneven", *UNEVEN]
    arguments.add_argument("--family", choices=families, help="only those whose name begins so; the file keeps the others")
    arguments.add_argument("--steps", type=int, default=100, help="of stages that wait")
    arguments.add_argument("--only", default="", help="only configurations whose name has this in it")
    given = arguments.parse_args()
    ours, began, load = start_ray(), time.time(), os.getloadavg()
    found = earlier(given.json, given.family)
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model(Path(folder) / "small", hidden=256, layers=4))
        cases = [
            case
            for case in (*simulated(), *uneven(), *real(model))
            if case.family.startswith(given.family or "") and given.only in case.name
        ]
        for one in measure(cases, given.steps):
            found.append(one)
            # after each, so that a run that is cut short leaves what it has
            write(given.json, figures(found, given.steps, load))
    if ours:
        stop_ray()
    print(summary(figures(found, given.steps, load)))
    print(f"{time.time() - began:.0f} s, load {load[0]:.1f} before")


if __name__ == "__main__":
    main()
