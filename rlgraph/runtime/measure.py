"""What a run tells about its steps: named timings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from rlgraph.planning.plan import Plan
from rlgraph.planning.schedule import Span


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


def averaged(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all workers; one that several ranks tell is their mean."""
    values: dict[str, list[float]] = {}
    for metrics in found:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    # Ranks that tell the same number give it as it is, without rounding.
    return {name: fmean(each) if len(set(each)) > 1 else each[0] for name, each in values.items()}


def timings(plan: Plan, spans: Iterable[Span]) -> dict[str, float]:
    """Return `timing_s/*` of one step: each node's own work, and what the update waited for its rollout."""
    found: dict[str, float] = {}
    fired: dict[tuple[str, str], float] = {}  # by node and worker, all parts of a batch together
    nodes = {event.name: event.node for event in plan.schedule.events}
    trainers = {worker for loop in plan.loops for worker in plan.node(loop.writer).workers}
    for span in spans:
        seconds = span.end_s - span.start_s
        if span.kind == "fire":
            key = nodes[span.name], span.worker
            fired[key] = fired.get(key, 0.0) + seconds
        elif span.kind == "publish":
            _add(found, "publish", seconds)
        elif span.kind == "load":
            _add(found, "update_weights", seconds)
        elif span.worker in trainers:
            _add(found, "wait_prev_gen", seconds)
    for (node, _), seconds in fired.items():
        _add(found, TIMINGS.get(node, node), seconds)
    return {f"timing_s/{name}": seconds for name, seconds in found.items()}


def _add(found: dict[str, float], name: str, seconds: float) -> None:
    found[name] = max(found.get(name, 0.0), seconds) if name != "wait_prev_gen" else found.get(name, 0.0) + seconds
