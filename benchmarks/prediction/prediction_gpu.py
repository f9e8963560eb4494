"""Predicted against measured step time of real engines: a dozen configurations of each model on two or four GPUs.

    python benchmarks/prediction/prediction_gpu.py [--json PATH] [--only WORD] [--skip WORD] [--seconds 470] [--model NAME …]
        [--gpus 4] [--costs PATH]
    python benchmarks/prediction/prediction_gpu.py --again PATH    # price the costs in PATH with today's code; written as fits

Three profiles of each model give the costs: one step off on 1 + 1 GPUs; the same with twice the prompts and twice the tokens; and
time-shared GPUs with half the prompts, for training on two GPUs, waking and sleeping. These costs predict all other configurations:
time-shared on one GPU and on two, steps off, other batches and groups, longer responses, engines that share a GPU, chunks of a batch,
other training passes. Then each runs, and its step is compared with the earlier prediction: the mean step if lengths have a tail, else
the median. A prediction for lengths that were not profiled gets their distribution. The profiled configuration runs once more at the
end, to show the variation between launches.

SmolLM2-135M and the 1.7B shape, with random weights, write responses of one length; the shapes 0.6B and 4B write geometric lengths:
each token is equally likely, so the number of stop tokens sets the median. For models under a billion parameters the host's work sets
the time of a decode step, and its noise.

Each prediction is made before its run. `--again` runs nothing: today's code prices the costs of an earlier file. The code may have
changed because of those runs, so that the file then holds fits (`fit_s`, `fit_error`) and no predictions.

Most of the time goes into launches. The most informative runs come first, each prints its result when it ends, and none starts that
would end after `--seconds` if it took as long as the longest so far but the first. `--tiny` runs a tiny model of transformers on two
cores.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import yaml

import rlgraph as rg
from benchmarks.lib.accuracy import accuracy, summary
from benchmarks.lib.command import write
from benchmarks.lib.machine import machine
from benchmarks.lib.shapes import VOCAB, random_model
from benchmarks.prediction.ways import ON_CORES, ON_GPUS, SMOLLM2, Way, ways, ways_on_four
from benchmarks.speed.overlap import QUESTIONS, parity
from rlgraph.plan.calibrate import Trace, costs_of
from rlgraph.plan.costs import to_yaml
from rlgraph.plan.lengths import PROBABILITIES, Lengths
from rlgraph.runtime.driver.ray_cluster import start_ray, stop_ray
from rlgraph.runtime.measure import Step

WARM_UP = 2  # steps that fill the pipeline, and the first passes of the engines
MEASURED_S, LEAST, MOST = 3.0, 5, 12  # of each configuration: about so long, and so many steps
PROFILED = 6  # steps of each of the two
FEW = 4  # steps of either on two cores, which only show that all works


@dataclass(frozen=True)
class Models:
    """The folders of the models, and the size of their vocabulary."""

    folder: Path
    tiny: bool
    prefix: str = ""  # of models that are only planned for, never read

    def path(self, way: Way) -> str:
        if self.prefix:
            return self.prefix + way.model
        if self.tiny:
            return rg.model_folder("tiny", self.folder)
        return rg.model_folder("smollm2") if way.model == SMOLLM2 else random_model(way.model, ".models")

    @property
    def vocabulary(self) -> int:
        return 288 if self.tiny else VOCAB

    def sampling(self, way: Way) -> rg.Sampling:
        if not way.tail:
            return rg.Sampling(max_tokens=way.tokens, ignore_eos=True)
        first = 260 if self.tiny else 1000  # tokens that no prompt has
        count = max(round(self.vocabulary * math.log(2) / way.tokens), 1)
        return rg.Sampling(max_tokens=way.most_tokens, stop_token_ids=tuple(range(first, first + count)))

    def cluster(self, way: Way) -> rg.Cluster:
        if self.tiny:
            return rg.Cluster(cpus=way.gpus)
        here = rg.local_cluster()
        return replace(here, gpus=way.gpus, gpus_per_node=way.gpus)


def graph(way: Way, models: Models) -> rg.Graph:
    """Make the graph of GRPO that runs this way."""
    pool = rg.Pool("gpus") if way.shared else rg.Pool("rollout", share=way.rollout_gpus)
    engine: dict[str, Any] = {"engine": "transformers", "dtype": "float32"} if models.tiny else {}
    generator = rg.Generator(
        models.path(way),
        pool=pool,
        sampling=models.sampling(way),
        max_context=way.most_tokens + 64,
        max_sequences=way.sequences,
        engines_per_gpu=way.engines_per_gpu,
        **engine,
    )
    policy = rg.Policy(
        models.path(way),
        pool=pool if way.shared else rg.Pool("train", share=way.gpus - way.rollout_gpus),
        optimizer=rg.AdamW(lr=1e-7),
        micro_batch_tokens=way.micro_batch_tokens,
        dtype="float32" if models.tiny else "bfloat16",
    )
    weights = rg.feedback("weights", depth=way.depth, buffers=2 if way.depth else 1)
    prompts = rg.prompts(QUESTIONS, count=way.prompts)
    rollout = generator.rollout(prompts, weights, group_size=way.group_size, chunks=way.chunks)
    rewards = rg.reward(parity, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("prediction", step.metrics)


def lengths(way: Way, profiled: Way, costs: rg.planning.Costs) -> Lengths:
    """Choose the lengths to expect: those measured, or where others are asked for the distribution that the sampling gives."""
    assert costs.lengths is not None
    if (way.tokens, way.most_tokens) == (profiled.tokens, profiled.most_tokens):
        return costs.lengths
    if not way.tail:
        return replace(costs.lengths, at=(0.0, 1.0), tokens=(float(way.tokens), float(way.tokens)))
    tokens = [min(math.ceil(-math.log2(max(1 - p, 1e-12)) * way.tokens), way.most_tokens) for p in PROBABILITIES]
    return replace(costs.lengths, at=PROBABILITIES, tokens=tuple(map(float, tokens)))


@dataclass(frozen=True)
class Found:
    """One configuration: what was predicted of it, and what it took. Seconds of nodes are means of a firing."""

    name: str
    way: Way
    predicted_s: float
    cycle_s: float  # by the critical cycle, without lengths
    measured_s: float
    standard_error_s: float
    steps_s: tuple[float, ...]
    predicted_nodes: dict[str, float]
    measured_nodes: dict[str, float]
    residual: float  # the share of device-seconds that nothing explains
    launch_s: float  # until the workers wait for the first step
    whole_s: float  # from before the launch until all is closed

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Progress:
    """Print each result at once, with the seconds since the start, so that a run that is cut short loses none."""

    def __init__(self, allowed_s: float) -> None:
        self.began, self.allowed_s = time.monotonic(), allowed_s
        self.launches: list[float] = []  # seconds of each, from begin to end

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def fits(self, launches: int) -> bool:
        """True if that many more launches would end in time, each as long as the longest so far, the cold first one excluded."""
        longest_s = max(self.launches[1:] or self.launches, default=0.0)
        return time.monotonic() - self.began + launches * longest_s <= self.allowed_s


@dataclass(frozen=True)
class Ran:
    """The results of a launch: its steps, the trace for costs, and its seconds."""

    steps: list[Step]
    record: Trace
    residual: float
    launch_s: float
    whole_s: float


def run(label: str, plan: rg.Plan, count: int, progress: Progress) -> Ran:
    """Run `count` steps after the warm-up, and tell what launching, warming up, running and closing took."""
    progress.say(f"{label}: launching")
    at = [time.monotonic()]
    with plan.launch() as job:
        steps = job.steps(WARM_UP + count)
        at.append(time.monotonic())
        taken = [next(steps) for _ in range(WARM_UP)]
        at.append(time.monotonic())
        taken += steps
        at.append(time.monotonic())
        record, residual = job.trace(), job.bubbles().residual
    at.append(time.monotonic())
    progress.launches.append(at[-1] - at[0])
    seconds = " ".join(f"{step.seconds:.3f}" for step in taken)
    launch, warm_up, timed, end = (after - before for before, after in pairwise(at))
    progress.say(f"{label}: launch {launch:.1f} s, warm-up {warm_up:.1f} s, steps {timed:.1f} s, end {end:.1f} s; steps of {seconds} s")
    return Ran(taken, record, residual, launch, at[-1] - at[0])


def profiled(base: Way, models: Models, progress: Progress) -> rg.planning.Costs:
    """Measure the costs of two sizes of batch, as `rg.planning.profile` does, but for the steps of the warm-up, and those of sleeping."""
    records = []
    for name, way in (("profile", base), ("profile of twice the size", base.double), ("profile in turns", base.turns)):
        plan = rg.compile(graph(way, models), models.cluster(way))
        record = run(f"{base.model}: {name}", plan, FEW if models.tiny else PROFILED, progress).record
        late = [span for span in record.spans if span.step >= WARM_UP - 1]  # `costs_of` leaves the first of them out
        records.append(replace(record, spans=late))
    return costs_of(records)


TIMINGS = {"rollout": "gen", "update": "update_actor", "publish": "publish", "load": "update_weights", "reward": "reward"}
TURNS = {"wake": "wake", "sleep": "sleep"}  # of all models that have a pool in turns


def measured(name: str, way: Way, plan: rg.Plan, models: Models, progress: Progress) -> Found:
    """Run a plan, and compare it with what it predicts."""
    count = FEW if models.tiny else min(max(math.ceil(MEASURED_S / plan.prediction.step_s), LEAST), MOST)
    ran = run(f"{way.model}: {name}", plan, count, progress)
    timed = ran.steps[WARM_UP:]
    seconds = [step.seconds for step in timed]
    moving = {kind: sum(e.seconds for e in plan.schedule.events if e.kind == kind) for kind in ("publish", "load", *TURNS)}
    keys = TIMINGS | TURNS
    return Found(
        name=name,
        way=way,
        predicted_s=plan.prediction.step_s,
        cycle_s=plan.prediction.period_s,
        measured_s=statistics.mean(seconds) if way.tail else statistics.median(seconds),
        standard_error_s=statistics.stdev(seconds) / len(seconds) ** 0.5,
        steps_s=tuple(seconds),
        predicted_nodes={node: plan.node(node).seconds for node in ("rollout", "update", "reward")} | moving,
        measured_nodes={node: statistics.mean(s.metrics.get(f"timing_s/{key}", 0.0) for s in timed) for node, key in keys.items()},
        residual=ran.residual,
        launch_s=ran.launch_s,
        whole_s=ran.whole_s,
    )


def measure(
    bases: list[Way], models: Models, given: argparse.Namespace, costs: dict[str, rg.planning.Costs], progress: Progress
) -> Iterator[Found]:
    """Profile each base into `costs`, predict and run; alternate the models, so that a run that is cut short has results of both."""
    queues = [list((ways_on_four if given.gpus == 4 else ways)(base).items()) for base in bases]
    for index in range(max(map(len, queues))):
        for base, queue in zip(bases, queues, strict=True):
            name, way = queue[index] if index < len(queue) else ("", base)
            label = f"{base.model}: {name}"
            if not name or given.only not in label or (given.skip and given.skip in label):
                continue
            if base.model not in costs and progress.fits(4):
                costs[base.model] = profiled(base, models, progress)
            if base.model not in costs or not progress.fits(1):
                progress.say(f"{label}: not run, for lack of time")
                continue
            told = replace(costs[base.model], lengths=lengths(way, base, costs[base.model]))
            one = measured(name, way, rg.compile(graph(way, models), models.cluster(way), told), models, progress)
            parts = ", ".join(f"{n} {one.predicted_nodes[n]:.3f} and {one.measured_nodes[n]:.3f}" for n in ("rollout", "update", *TURNS))
            progress.say(
                f"{label}: predicted {one.predicted_s:.3f} s, measured {one.measured_s:.3f} ± {one.standard_error_s:.3f} s, "
                f"{one.error:+.1%} ({parts})"
            )
            yield one


def pairs(found: list[Found]) -> list[tuple[Found, Found]]:
    """Pair each synchronous way to do a work with each asynchronous one."""
    return [(a, b) for a in found for b in found if a.way.depth == 0 < b.way.depth and a.way.work == b.way.work]


def works(found: list[Found]) -> dict[str, list[Found]]:
    """List the ways to do each work."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        model, prompts, group, tokens, gpus = one.way.work
        groups.setdefault(f"{model}, {prompts} x {group} of {tokens} tokens, {gpus} GPUs", []).append(one)
    return groups


def figures(found: list[Found], costs: dict[str, rg.planning.Costs]) -> dict[str, Any]:
    """Read the results in the file."""
    return {
        "kind": "prediction",
        "profiled_steps": PROFILED,
        "costs": {model: yaml.safe_load(to_yaml(each)) for model, each in costs.items()},
        "configurations_measured": len(found),
        **accuracy(found, pairs(found), works(found)),
        "configurations": [{**asdict(one), "error": one.error} for one in found],
    }


FITS = {
    "predicted_s": "fit_s", "cycle_s": "fit_cycle_s", "predicted_nodes": "fit_nodes", "error": "fit_error",
    "median_error": "fit_median_error", "worst_error": "fit_worst_error", "signs_right": "fit_signs_right",
    "signs_right_where_async_loses": "fit_signs_right_where_async_loses",
    "predicted best over measured best": "fit best over measured best",
}  # fmt: skip


def again(file: Path) -> dict[str, Any]:
    """Compute the step times again for the costs of an earlier file, and add them to its figures as fits."""
    told, costs = json.loads(file.read_text()), earlier(file)
    known, models, found = {base.model: base for base in ON_GPUS}, Models(Path(), False, "shape-of-"), []
    named = {fit: name for name, fit in FITS.items()}
    for each in told["configurations"]:
        one = {named.get(name, name): value for name, value in each.items() if name not in ("error", "fit_error")}
        way = Way(**one["way"])
        base = costs[way.model]
        priced = replace(base, lengths=lengths(way, known[way.model], base))
        plan = rg.compile(graph(way, models), rg.Cluster(gpus=way.gpus, gpus_per_node=way.gpus, cpus=told["cpus"]), priced)
        moving = {kind: sum(e.seconds for e in plan.schedule.events if e.kind == kind) for kind in ("publish", "load", *TURNS)}
        now = {
            "way": way,
            "predicted_s": plan.prediction.step_s,
            "cycle_s": plan.prediction.period_s,
            "predicted_nodes": {node: plan.node(node).seconds for node in ("rollout", "update", "reward")} | moving,
        }
        found.append(Found(**one | now))
    fits = {"kind": "fit", **{FITS.get(name, name): value for name, value in figures(found, costs).items() if name != "kind"}}
    fits["configurations"] = [{FITS.get(name, name): value for name, value in each.items()} for each in fits["configurations"]]
    return fits | {name: told[name] for name in ("gpus", "cpus", "python", "versions")}


def earlier(file: Path | None) -> dict[str, rg.planning.Costs]:
    """Read the costs from the JSON of an earlier run, by model."""
    found = {}
    for model, each in (json.loads(file.read_text())["costs"] if file else {}).items():
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as copy:
            yaml.safe_dump(each, copy)
            copy.flush()
            found[model] = rg.planning.Costs.from_file(copy.name)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write the figures here as well, after each configuration")
    arguments.add_argument("--only", default="", help="only those whose 'model: name' has this in it")
    arguments.add_argument("--skip", default="", help="not those whose 'model: name' has this in it")
    arguments.add_argument("--seconds", type=float, default=470.0, help="nothing starts that would not be over by then")
    arguments.add_argument("--model", action="append", choices=[base.model for base in (*ON_GPUS, *ON_CORES)], help="SmolLM2-135M; repeat")
    arguments.add_argument("--gpus", type=int, choices=(2, 4), default=2, help="four: what is predicted from two")
    arguments.add_argument("--costs", type=Path, help="the JSON of an earlier run on the same machine, whose costs hold")
    arguments.add_argument("--again", type=Path, help="run nothing: price the costs of this file again, and write it as fits")
    arguments.add_argument("--tiny", action="store_true", help="a tiny model on two cores")
    given = arguments.parse_args()
    if given.again:
        write(given.again, again(given.again))
        return
    progress, found, costs = Progress(given.seconds), list[Found](), earlier(given.costs)
    ours = start_ray()
    progress.say("Ray started")
    on = {"cores": os.cpu_count()} if given.tiny else machine()
    with tempfile.TemporaryDirectory() as folder:
        known = {base.model: base for base in (ON_CORES if given.tiny else ON_GPUS)}
        bases = [known[model] for model in given.model or [*known][:1]]
        for one in measure(bases, Models(Path(folder), given.tiny), given, costs, progress):
            found.append(one)
            write(given.json, figures(found, costs) | on)
    if ours:
        stop_ray()
    if not found:
        raise SystemExit("no configuration ran: nothing has these words, or there was no time")
    print(summary(figures(found, costs)))


if __name__ == "__main__":
    main()
