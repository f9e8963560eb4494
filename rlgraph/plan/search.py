"""Search all combinations of settings and splits of the devices, and rank them by their predicted rates.

A recorded run is also replayed under another depth or another split.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias

import numpy as np

from rlgraph.errors import GraphError, PlanError, show_value
from rlgraph.graph.graph import Graph
from rlgraph.plan.calibrate import WARM_UP, Trace, interruptions, latencies, measured_costs, setting_of
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import build_plan, period_on, place_and_configure, place_and_schedule, priced_for, settings_on
from rlgraph.plan.cost_functions import NodeCost, Setting
from rlgraph.plan.costs import Costs, warnings_of
from rlgraph.plan.memory import needs_that_fit
from rlgraph.plan.model_shapes import Shapes
from rlgraph.plan.placement import FEW, Counts, Divisions, best_first, divide_devices, splits
from rlgraph.plan.plan import Plan, PlannedNode
from rlgraph.plan.play import critical_cycle, play
from rlgraph.plan.schedule import WORK, Dependency, Event, Schedule

Objective: TypeAlias = Literal["tokens_per_s", "gpu_s_per_sample"]
Settings: TypeAlias = Mapping[str, Any]
PLAYED = 12  # the least candidates that are played with lengths and spreads
NEIGHBOURS = 8  # the most divisions of one graph that are played
CLOSE = 1.1  # and all whose critical cycle is within this of the best


@dataclass(frozen=True)
class Candidate:
    """One way to run: the settings of the graph, its plan, and the predicted rates.

    `samples_per_s` counts responses; `tokens_per_s` counts the tokens of responses and prompts, if lengths are known.
    """

    settings: Settings
    graph: Graph
    plan: Plan
    samples_per_s: float
    tokens_per_s: float | None
    gpu_s_per_sample: float  # device-seconds: of cores if the cluster has no GPUs

    @property
    def step_s(self) -> float:
        """The predicted seconds of a step."""
        return self.plan.prediction.step_s

    @property
    def staleness(self) -> int:
        """The bound on how many versions a batch can be behind."""
        return self.plan.certificate.staleness_bound


@dataclass(frozen=True)
class _Draft:
    settings: Settings
    graph: Graph
    shapes: Shapes
    costs: Costs
    counts: Counts
    placed: Mapping[str, Setting]
    period_s: float

    @property
    def rows(self) -> int:
        return trained_row_count(self.graph)

    def score(self, by: Objective, step_s: float) -> float:
        """Compute the quantity to minimise: seconds per response, or device-seconds per response."""
        return step_s / self.rows * (sum(self.counts.values()) if by == "gpu_s_per_sample" else 1)


@dataclass(frozen=True)
class Search:
    """The result of a search: candidates, best first; how many it examined; and counts of the others, with the reasons."""

    ranked: tuple[Candidate, ...]
    looked_at: int
    left_out: Mapping[str, int]
    by: Objective
    verdict: str
    warnings: tuple[str, ...]


def search(
    build: Callable[..., Graph],
    cluster: Cluster,
    costs: Costs | None,
    choices: Mapping[str, Sequence[Any]],
    by: Objective,
    max_staleness: int | None,
    shapes_of: Callable[[Graph], Shapes],
) -> Search:
    """Rank the candidates. Raises PlanError if none is left."""
    left_out: Counter[str] = Counter()
    drafts = list[_Draft]()
    streams = []
    for problem in _problems(build, cluster, costs, choices, max_staleness, shapes_of, left_out):
        if len(problem.divisions) <= FEW:
            drafts += problem.drafts(problem.divisions, left_out)
        else:
            streams.append((problem, problem.drafts(problem.best_first(left_out), left_out)))
    looked_at = len(drafts) + sum(len(problem.divisions) for problem, _ in streams)
    drafts += _best([stream for _, stream in streams], by)
    if not drafts:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in left_out.items())
        raise PlanError(f"tune found no plan: {reasons or 'there is nothing to choose from'}")
    drafts.sort(key=lambda draft: draft.score(by, draft.period_s))
    least = CLOSE * drafts[0].score(by, drafts[0].period_s)
    most = 2 * PLAYED if streams else 4 * PLAYED
    close = [d for index, d in enumerate(drafts) if index < PLAYED or (index < most and d.score(by, d.period_s) <= least)]
    kinds = [next((d for d in drafts if is_async(d.graph) == wanted), None) for wanted in (False, True)]
    kept = close + [d for d in kinds if d is not None and not any(d is other for other in close)]
    warnings = warnings_of((draft.graph, draft.costs, draft.placed) for draft in drafts)
    found = [_candidate(draft, cluster, warnings) for draft in kept]
    best = min(_score(c, by) for c in found) or 1.0
    ranked = sorted(found, key=lambda c: (round(_score(c, by) / best, 3), c.staleness))  # equally good ones: less stale first
    return Search(tuple(ranked), looked_at, left_out, by, with_caveats(verdict(ranked, by), warnings), warnings)


@dataclass(frozen=True)
class _Problem:
    """One graph, and the ways to divide its devices."""

    settings: Settings
    graph: Graph
    cluster: Cluster
    shapes: Shapes
    costs: Costs
    divisions: Divisions

    def drafts(self, divisions: Iterable[Counts], left_out: Counter[str]) -> Iterator[_Draft]:
        """Yield a draft for each division that fits."""
        for counts in divisions:
            try:
                workers, placed, schedule = place_and_schedule(self.graph, self.cluster, counts, self.costs)
                needs_that_fit(self.graph, self.cluster, workers, placed, self.shapes, self.costs)
            except PlanError as refused:
                left_out[str(refused)] += 1
                continue
            yield _Draft(self.settings, self.graph, self.shapes, self.costs, counts, placed, critical_cycle(schedule).period_s)

    def best_first(self, left_out: Counter[str]) -> Iterator[Counts]:
        """Yield divisions by their period, without those that do not fit in memory."""
        like = next(iter(self.divisions))
        workers = place_and_configure(self.graph, self.cluster, like)[0]
        period = period_on(self.graph, self.cluster, self.costs, like)

        def period_if_it_fits(counts: Counts) -> float:
            placed = settings_on(self.graph, self.cluster, counts)
            try:
                needs_that_fit(self.graph, self.cluster, workers, placed, self.shapes, self.costs)
            except PlanError as refused:
                left_out[str(refused)] += 1
                return float("inf")
            return period(counts)

        return (division.counts for division in best_first(self.divisions, period_if_it_fits))


def _problems(
    build: Callable[..., Graph],
    cluster: Cluster,
    costs: Costs | None,
    choices: Mapping[str, Sequence[Any]],
    max_staleness: int | None,
    shapes_of: Callable[[Graph], Shapes],
    left_out: Counter[str],
) -> Iterator[_Problem]:
    for values in product(*choices.values()):
        settings = dict(zip(choices, values, strict=True))
        try:
            graph = build(**settings)
            shapes = shapes_of(graph)
            priced = priced_for(graph, cluster, None if costs is None else costs.only(graph), shapes)
            depth = max((feedback.depth for feedback in graph.feedbacks), default=0)
            if max_staleness is not None and depth > max_staleness:
                left_out[f"staleness {depth} is above max_staleness={max_staleness}"] += 1
                continue
            yield _Problem(settings, graph, cluster, shapes, priced, splits(graph, cluster))
        except (GraphError, PlanError) as refused:
            left_out[str(refused)] += 1


def _best(streams: Sequence[Iterator[_Draft]], by: Objective) -> list[_Draft]:
    """Select the best drafts of the streams, to be played: few of each stream, because the drafts of one stream differ little."""

    def score(draft: _Draft) -> float:
        return draft.score(by, draft.period_s)

    heads = [(score(draft), index, draft) for index, stream in enumerate(streams) if (draft := next(stream, None)) is not None]
    heapq.heapify(heads)
    found: list[_Draft] = []
    taken = Counter[int]()
    while heads and len(found) < 2 * PLAYED:
        _, index, draft = heads[0]
        found.append(draft)
        taken[index] += 1
        following = next(streams[index], None) if taken[index] < NEIGHBOURS else None
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (score(following), index, following))
    return found + [draft for _, _, draft in heads]


def _candidate(draft: _Draft, cluster: Cluster, warnings: tuple[str, ...]) -> Candidate:
    own = tuple(text for text in warnings if any(f"'{node.name}'" in text for node in draft.graph.nodes))
    plan = build_plan(draft.graph, cluster, draft.costs, draft.counts, draft.shapes, own)
    samples = draft.rows / plan.prediction.step_s if plan.prediction.step_s else float("inf")
    lengths = draft.costs.lengths
    tokens = samples * (lengths.mean + lengths.prompt_tokens) if lengths else None
    return Candidate(draft.settings, draft.graph, plan, samples, tokens, sum(draft.counts.values()) / samples)


def _score(candidate: Candidate, by: Objective) -> float:
    return candidate.gpu_s_per_sample if by == "gpu_s_per_sample" else 1 / candidate.samples_per_s


def trained_row_count(graph: Graph) -> int:
    """Count the responses per step: the rows of an update."""
    return max((node.rows for node in graph.nodes if node.traits.work == "train"), default=max(node.rows for node in graph.nodes))


def is_async(graph: Graph) -> bool:
    return any(feedback.depth > 0 for feedback in graph.feedbacks)


def verdict(ranked: Sequence[Candidate], by: Objective) -> str:
    """Describe whether stale batches are worth it, and why."""
    sync = next((c for c in ranked if not is_async(c.graph)), None)
    stale = next((c for c in ranked if is_async(c.graph)), None)
    if sync is None or stale is None:
        return ""
    gain = _score(sync, by) / _score(stale, by)
    if gain > 1:
        shallow = min((c for c in ranked if is_async(c.graph) and _score(c, by) <= 1.01 * _score(stale, by)), key=lambda c: c.staleness)
        deeper = f"; depth {shallow.staleness} is within 1 % of it" if shallow.staleness < stale.staleness else ""
        return (
            f"async wins: {gain:.2f} times the best synchronous plan, since {_sum(stale)} overlap: {stale.step_s:.3g} s a step "
            f"at depth {stale.staleness} against {sync.step_s:.3g} s{deeper}"
        )
    return (
        f"async loses: the best plan with stale batches gives {gain:.2f} times the best synchronous one. Overlap hides the shorter of "
        f"two sides, but splitting the devices makes both longer: {_sum(stale)} on {_devices_of(stale)}, a step of {stale.step_s:.3g} s, "
        f"against {_sum(sync)} on {_devices_of(sync)}, a step of {sync.step_s:.3g} s"
    )


def with_caveats(found: str, warnings: Sequence[str]) -> str:
    """Put warnings about the costs before a verdict that rests on them."""
    return " ".join([f"Not known: {'; '.join(warnings)}. With the numbers as they are:", found]) if found and warnings else found


def _sum(candidate: Candidate) -> str:
    """Name the two longest nodes on pools, with their seconds."""
    nodes = sorted((n for n in candidate.plan.nodes if n.pool is not None), key=lambda n: -n.seconds)[:2]
    return " and ".join(f"{node.name} {node.seconds:.3g} s" for node in nodes)


def _devices_of(candidate: Candidate) -> str:
    pools = [p for p in candidate.plan.pools if any(n.pool == p.name for n in candidate.plan.nodes)]
    return " + ".join(f"{len(p.gpus) or p.cpus} ({p.name})" for p in pools)


# Replay a recorded run under another depth or another split of the devices.

LEAST_STEPS = 4
PLAYED_STEPS = 200
Durations = Mapping[str, Sequence[float]]  # of each event, by recorded step after the warm-up


@dataclass(frozen=True)
class Replayed:
    """A recorded run under another configuration: mean seconds per step as recorded, played as recorded, and played changed."""

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
    """Measure the seconds of each event in each step, its latency included; among several workers the longest counts."""
    late = latencies(trace, steps[0])
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
    """Divide the devices of the named pools again by share."""
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
                f"replay(depth={depth}): '{loop.writer}' shares pool '{pool}' with the node that loads its weights, and the order of "
                "nodes there changes with the depth; compile the graph of that depth with job.costs(), or let rg.tune try several"
            )
    more = depth - max(loop.depth for loop in plan.loops)

    def with_depth(d: Dependency) -> Dependency:
        if d.reason == "loop" and d.via in loops and d.credits == loops[d.via].depth + 1:
            return replace(d, credits=depth + 1)
        return replace(d, credits=d.credits + more) if d.reason == "slots" and d.via not in loops else d

    return replace(plan.schedule, dependencies=tuple(map(with_depth, plan.schedule.dependencies)))
