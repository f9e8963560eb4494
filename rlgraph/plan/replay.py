"""Replay a recorded run under another depth or another split of the devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlgraph.errors import PlanError, show_value
from rlgraph.plan.calibrate import WARM_UP, Trace, interruptions, latencies, measured_costs, setting_of
from rlgraph.plan.cost_functions import NodeCost, Setting
from rlgraph.plan.placement import divide_devices
from rlgraph.plan.plan import Plan, PlannedNode
from rlgraph.plan.play import play
from rlgraph.plan.schedule import WORK, Dependency, Event, Schedule

LEAST_STEPS = 4
PLAYED_STEPS = 200
Durations = Mapping[str, Sequence[float]]  # of each event, by recorded step after the warm-up


@dataclass(frozen=True)
class Replayed:
    """A recorded run under another configuration: mean seconds a step as recorded, played as recorded, and played changed."""

    recorded_s: float
    again_s: float  # played as recorded: the difference to recorded_s is the error of playing
    step_s: float
    changed: str

    @property
    def ratio(self) -> float:
        return self.step_s / self.again_s

    def __str__(self) -> str:
        return (
            f"{self.changed}: {self.step_s:.4g} s a step, {self.ratio:.2f} times the {self.again_s:.4g} s of the recorded configuration "
            f"(recorded: {self.recorded_s:.4g} s)"
        )


def replay_trace(trace: Trace, shares: Mapping[str, float] | None, depth: int | None) -> Replayed:
    """Play the recorded firings under a change. Raises PlanError for a change that the plan does not allow."""
    plan = trace.plan
    steps = sorted({span.step for span in trace.spans})
    if len(steps) < LEAST_STEPS:
        raise PlanError(f"replay: the trace has {len(steps)} steps; at least {LEAST_STEPS} are needed, the first of which warms up")
    recorded = _durations(plan, trace, steps[WARM_UP:])
    counts = _counts(plan, shares)
    schedule = plan.schedule if depth is None else deeper(plan, depth)
    scaled = _scale_durations(plan, trace, recorded, counts, steps[WARM_UP:])
    ends = [max(span.end_s for span in trace.spans if span.step == step) for step in steps]
    changes = [f"depth {depth}"] if depth is not None else []
    changes += [f"{name} {count}" for name, count in counts.items()] if shares else []
    return Replayed(
        recorded_s=(ends[-1] - ends[WARM_UP - 1]) / (len(steps) - WARM_UP),
        again_s=_period(plan.schedule, recorded),
        step_s=_period(schedule, scaled),
        changed=", ".join(changes) or "as recorded",
    )


def _period(schedule: Schedule, durations: Durations) -> float:
    """Play the recorded steps again and again, and average the seconds of a step."""

    def seconds(event: Event, step: int) -> float:
        return durations[event.name][step % len(durations[event.name])]

    ends = play(schedule, PLAYED_STEPS, seconds).step_ends()
    first = PLAYED_STEPS // 8
    return (ends[-1] - ends[first]) / (PLAYED_STEPS - 1 - first)


def _durations(plan: Plan, trace: Trace, steps: Sequence[int]) -> Durations:
    """Measure the seconds of each event in each step, its latency included; of several workers the longest counts."""
    late = latencies(plan, trace.spans, steps[0])
    within = interruptions(trace.spans)
    longest: dict[tuple[str, int], float] = {}
    for span in trace.spans:
        if span.kind in WORK:
            own_s = span.seconds - sum(inner.seconds for inner in within.get(span, ()))
            longest[span.name, span.step] = max(own_s, longest.get((span.name, span.step), 0.0))
    found = {}
    for event in plan.schedule.events:
        seen = [longest[event.name, step] + late[event.name] for step in steps if (event.name, step) in longest]
        usual = float(np.mean(seen)) if seen else 0.0  # weights of the first steps were not loaded
        found[event.name] = [longest.get((event.name, step), usual - late[event.name]) + late[event.name] for step in steps]
    return found


def _scale_durations(plan: Plan, trace: Trace, recorded: Durations, counts: Mapping[str, int], steps: Sequence[int]) -> Durations:
    """Scale the durations to other device counts, by the cost functions of the run and the lengths of each step."""
    costs = measured_costs(plan, trace.spans, trace.sampled)
    found = dict(recorded)
    for node in plan.nodes:
        old = setting_of(plan, node)
        new = _resize_setting(plan, node, old, counts)
        cost = costs.nodes[node.name]
        if new == old or not isinstance(cost, NodeCost):
            continue
        rows = [[n for s in trace.sampled if s.step == step for n in s.response_tokens][: old.rows] for step in steps]
        batch = np.array(rows, dtype=float) if all(len(row) == old.rows for row in rows) else None
        prompts = costs.lengths.prompt_tokens if costs.lengths else 0.0
        then, now = (replace(cost, spread=()).of(s, batch, prompts, len(steps)).max(axis=1) for s in (old, new))
        for event in plan.schedule.events:
            if event.node == node.name and event.kind == "fire":
                found[event.name] = (np.asarray(recorded[event.name]) * now / np.maximum(then, 1e-12)).tolist()
    return found


def _resize_setting(plan: Plan, node: PlannedNode, old: Setting, counts: Mapping[str, int]) -> Setting:
    """Work out the setting on the pool's new devices: more engines of the same width on GPUs, wider engines on cores."""
    devices = counts.get(node.pool or "", old.devices)
    engines = max(round(devices / old.width), 1) if plan.cluster.gpus else old.engines
    return replace(old, devices=devices, engines=engines)


def _counts(plan: Plan, shares: Mapping[str, float] | None) -> Mapping[str, int]:
    """Divide the devices of the named pools anew by share."""
    if not shares:
        return {}
    pools = {pool.name: len(pool.gpus) or pool.cpus for pool in plan.pools}
    for name, share in shares.items():
        if name not in pools:
            raise PlanError(f"replay(shares={dict(shares)}): the plan has no pool '{name}'; its pools are {sorted(pools)}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < float("inf"):
            raise PlanError(f"replay(shares={dict(shares)}): a share is a number above 0")
    widths = {name: max((len(w.gpus) for w in plan.workers if w.pool == name), default=1) or 1 for name in shares}
    total = sum(pools[name] for name in shares)
    if total < sum(widths.values()):
        raise PlanError(f"replay(shares={dict(shares)}): the pools have {total} devices, but need at least {sum(widths.values())}")
    return divide_devices(shares, widths, total)


def deeper(plan: Plan, depth: int) -> Schedule:
    """Change the depth of every feedback edge of the plan's schedule, and the slots that follow from it."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise PlanError(f"replay(depth={show_value(depth)}): depth is a whole number of at least 0")
    if not plan.loops:
        raise PlanError("replay(depth=...): the plan has no feedback edge")
    loops = {loop.name: loop for loop in plan.loops}
    for loop in plan.loops:
        pool = plan.node(loop.writer).pool
        if depth != loop.depth and any(plan.node(reader).pool == pool for reader in loop.readers):
            raise PlanError(
                f"replay(depth={depth}): '{loop.writer}' shares pool '{pool}' with what it gives weights to, and the order of nodes there "
                "changes with the depth; compile the graph of that depth with job.costs(), or let rg.tune try several"
            )
    more = depth - max(loop.depth for loop in plan.loops)

    def changed(d: Dependency) -> Dependency:
        if d.reason == "loop" and d.via in loops and d.credits == loops[d.via].depth + 1:
            return replace(d, credits=depth + 1)
        return replace(d, credits=d.credits + more) if d.reason == "slots" and d.via not in loops else d

    return replace(plan.schedule, dependencies=tuple(map(changed, plan.schedule.dependencies)))
