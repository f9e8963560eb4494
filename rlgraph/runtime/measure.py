"""The steps of a run and their metrics: named timings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from rlgraph.plan.plan import Plan
from rlgraph.plan.schedule import Span

NO_STEP = "the job took no step; `for step in job.steps(n): …` takes them, `job.steps(n)` alone does not"


@dataclass(frozen=True)
class Step:
    """One finished step: its metrics, how many versions its oldest token was behind, and seconds since the step before."""

    index: int
    metrics: Mapping[str, float]
    staleness: int
    seconds: float


# Names that verl's users know; a node of another name keeps its own.
TIMINGS = {
    "rollout": "gen",
    "advantages": "adv",
    "update": "update_actor",
    "critic_update": "update_critic",
    "old_log_probs": "old_log_prob",
    "ref_log_probs": "ref",
}


def average_metrics(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of all workers; a metric that several ranks report is averaged."""
    values: dict[str, list[float]] = {}
    for metrics in found:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    # A number on which all ranks agree is kept as it is: a mean would round it.
    return {name: fmean(each) if len(set(each)) > 1 else each[0] for name, each in values.items()}


def bits(plan: Plan) -> dict[str, float]:
    """Make `dtype/<model>_bits` for each model: 16 if it computes in bfloat16, 32 in float32. The plan says why."""
    return {f"dtype/{model.name}_bits": 32.0 if model.dtype == "float32" else 16.0 for model in plan.models}


def timings(plan: Plan, spans: Iterable[Span]) -> dict[str, float]:
    """Sum `timing_s/*` of one step: each node's own work, the update's wait for its batch, and the wake and sleep of engines that
    time-share a pool.

    The chunks of a batch are added up, and so are the time slices of a step; of several ranks the slowest counts.
    """
    found: dict[tuple[str, str], float] = {}
    nodes = {event.name: event.node for event in plan.schedule.events}
    batches = {channel.name for channel in plan.channels if channel.kind == "batch"}
    trainers = {worker for loop in plan.loops for worker in plan.node(loop.writer).workers}
    names = {"publish": "publish", "load": "update_weights"}
    slices: dict[tuple[str, str], float] = {}  # by kind and event
    for span in spans:
        if span.kind in ("wake", "sleep"):
            slices[span.kind, span.name] = max(span.seconds, slices.get((span.kind, span.name), 0.0))
            continue
        name = TIMINGS.get(nodes[span.name], nodes[span.name]) if span.kind == "fire" else names.get(span.kind)
        if span.kind == "wait" and span.worker in trainers and span.name in batches:
            name = "wait_prev_gen"
        if name is not None:
            found[name, span.worker] = found.get((name, span.worker), 0.0) + span.end_s - span.start_s
    slowest: dict[str, float] = {}
    for (name, _), seconds in found.items():
        slowest[name] = max(slowest.get(name, 0.0), seconds)
    for (kind, _), seconds in slices.items():
        slowest[kind] = slowest.get(kind, 0.0) + seconds
    return {f"timing_s/{name}": seconds for name, seconds in slowest.items()}


def oldest(metrics: Mapping[str, float]) -> dict[str, float]:
    """Sum up the staleness of a step in which several updates measured theirs, each behind its name: the oldest token, the largest mean."""
    found = {kind: [value for name, value in metrics.items() if name.endswith(kind)] for kind in ("/staleness/max", "/staleness/mean")}
    return {kind.removeprefix("/"): max(values) for kind, values in found.items() if values}


def behind_by_loop(plan: Plan, metrics: Mapping[str, float]) -> dict[str, int]:
    """Read the staleness of each loop from the metrics of the update that closes it; loops that one update closes are not told apart."""
    trained = [loop for loop in plan.loops if loop.due is None]
    if len(trained) == 1:
        measured = {trained[0].name: metrics.get("staleness/max")}
    else:
        writers = [loop.writer for loop in trained]
        measured = {loop.name: metrics.get(f"{loop.writer}/staleness/max") for loop in trained if writers.count(loop.writer) == 1}
    return {name: int(value) for name, value in measured.items() if value is not None}
