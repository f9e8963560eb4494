"""`rlgraph.tune` and `rlgraph.planning.replay`: predict a graph, or a recorded run, under other settings. Nothing starts.

`tune` searches all combinations of settings and splits of the devices, and ranks them by their predicted rates.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from warnings import warn

import numpy as np

from rlgraph.analysis import words
from rlgraph.errors import GraphError, PlanError, PlanWarning, show_value
from rlgraph.graph.graph import Graph
from rlgraph.plan.calibrate import WARM_UP, Trace, interruptions, latencies, measured_costs, setting_of
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import build_plan, period_on, place_and_configure, place_and_schedule, settings_on
from rlgraph.plan.cost_functions import NodeCost, Setting
from rlgraph.plan.costs import Costs, warnings_of
from rlgraph.plan.memory import needs_that_fit
from rlgraph.plan.model_shapes import Shapes, shapes_of
from rlgraph.plan.placement import FEW, Counts, Divisions, best_first, divide_devices, splits
from rlgraph.plan.plan import Plan, PlannedNode
from rlgraph.plan.play import critical_cycle, play
from rlgraph.plan.roofline import priced_for
from rlgraph.plan.schedule import WORK, Dependency, Event, Schedule
from rlgraph.render.text import align_rows, wrap_line
from rlgraph.settings import Natural, Positive, check_arguments

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

Objective: TypeAlias = Literal["tokens_per_s", "gpu_s_per_sample"]
SHOWN = 12  # plans of a printed table
PLAYED = 12  # the least plans that are played with lengths and spreads
NEIGHBOURS = 8  # the most divisions of one graph that are played
CLOSE = 1.1  # and all whose critical cycle is within this of the best


@dataclass(frozen=True)
class Tuned:
    """A plan that `tune` compared, with the settings that gave its graph and its predicted rates.

    `samples_per_s` counts responses; `tokens_per_s` counts the tokens of responses and prompts, if the costs have lengths.
    `gpu_s_per_sample` counts device-seconds: of cores if the cluster has no GPUs.
    """

    settings: Mapping[str, Any]
    plan: Plan
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    gpu_s_per_sample: float
    staleness: int  # the bound on how many versions a batch can be behind


@dataclass(frozen=True)
class Tuning:
    """Plans, best first; prints as a table. `verdict` says whether stale batches pay, and why."""

    ranked: tuple[Tuned, ...]
    looked_at: int
    left_out: Mapping[str, int]
    verdict: str
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> Tuned:
        """The first plan of the ranking."""
        return self.ranked[0]

    def __iter__(self) -> Iterator[Tuned]:
        return iter(self.ranked)

    def __len__(self) -> int:
        return len(self.ranked)

    def __getitem__(self, index: int) -> Tuned:
        return self.ranked[index]

    def __str__(self) -> str:
        cluster, names = self.best.plan.cluster, list(self.best.settings)
        device = "GPU" if cluster.gpus else "core"
        rate = "tokens/s" if self.best.tokens_per_s is not None else "samples/s"
        head = [*names, "devices", ">step", f">{rate}", f">{device}-s a sample", "busy"]
        cells = [
            [
                *(str(row.settings[name]) for name in names),
                row.plan.split_text,
                words.seconds(row.step_s, row.plan.prediction.cost),
                _rate(row.tokens_per_s if row.tokens_per_s is not None else row.samples_per_s),
                f"{row.gpu_s_per_sample:.4g}",
                ", ".join(f"{p.busy:.0%}" for p in row.plan.pools),
            ]
            for row in self.ranked[:SHOWN]
        ]
        lines = [f"{words.with_count(self.looked_at, 'plan')} compared on {words.cluster(cluster)}, the best first"]
        lines += align_rows(head, cells)
        notes = [f"left out {count}: {words.clean(reason)}" for reason, count in self.left_out.items()]
        notes += [f"warning: {warning}" for warning in self.warnings if warning not in self.verdict]
        notes += [self.verdict] if self.verdict else []
        lines += [part for note in notes for part in wrap_line(note, indent=2)]
        return "\n".join(line.rstrip() for line in lines)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@check_arguments(PlanError)
def tune(
    build: Callable[..., Graph],
    cluster: Cluster,
    costs: Costs | None = None,
    *,
    by: Objective = "tokens_per_s",
    max_staleness: Natural | None = None,
    **choices: Iterable[Any],
) -> Tuning:
    """Compile the graphs that `build` returns for each combination of settings and rank the plans by prediction.

    >>> import torch, rlgraph as rg
    >>> @rg.node(reads="prompt_texts", writes="rewards")
    ... def brevity(batch):
    ...     return {"rewards": torch.tensor([-float(len(text)) for text in batch["prompt_texts"]])}
    >>> def build(count):
    ...     return rg.Graph("lengths", brevity(rg.prompts([{"prompt": "1 + 1 ="}], count=count)))
    >>> rg.tune(build, rg.Cluster(cpus=2), count=(4, 8)).best.settings
    {'count': 8}

    * `build`: a function that returns the graph for a combination of settings.
    * `cluster`: the hosts and devices to plan for.
    * `costs`: seconds of nodes, which may name more nodes than a graph has. None: placeholders, which rank plans but do not mean seconds.
      A plain number counts the same on any number of devices; a PlanWarning says if such a number decides between plans.
    * `by`: "tokens_per_s" ranks by tokens per second, "gpu_s_per_sample" by device-seconds per response.
    * `max_staleness`: leaves out plans whose batches lag behind by more versions. None: any.
    * `choices`: each further keyword is a setting of `build` with the values to try, e.g. `depth=range(4), buffers=(1, 2)`.

    Pools with `share=None` are split in every possible way. Plans that `build`, the cluster or its memory refuses are left out and counted.

    Raises PlanError for a setting without values, an unknown objective, or if no plan is left.
    """
    tried = {
        name: list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None for name, values in choices.items()
    }
    for name, values in tried.items():
        if not values:
            raise PlanError(f"tune({name}={show_value(choices[name])}): pass the values to try, e.g. {name}=(1, 2)")
    found = _rank(build, cluster, costs, {name: values or [] for name, values in tried.items()}, by, max_staleness)
    for warning in found.warnings:
        warn(f"tune: {warning}", PlanWarning, stacklevel=3)
    return found


@dataclass(frozen=True)
class _Draft:
    """A division of the devices for one graph, with the period of its critical cycle."""

    problem: "_Problem"
    counts: Counts
    placed: Mapping[str, Setting]
    period_s: float

    @property
    def score(self) -> float:
        """The quantity to minimise: seconds per response, or device-seconds per response."""
        return self.period_s / self.problem.rows * (sum(self.counts.values()) if self.problem.by == "gpu_s_per_sample" else 1)

    def predict(self, warnings: tuple[str, ...]) -> Tuned:
        """Make the plan of the draft, and predict its rates."""
        p = self.problem
        own = tuple(text for text in warnings if any(f"'{node.name}'" in text for node in p.graph.nodes))
        plan = build_plan(p.graph, p.cluster, p.costs, self.counts, p.shapes, own)
        step_s, lengths = plan.prediction.step_s, p.costs.lengths
        samples = p.rows / step_s if step_s else float("inf")
        tokens = samples * (lengths.mean + lengths.prompt_tokens) if lengths else None
        return Tuned(p.settings, plan, step_s, samples, tokens, sum(self.counts.values()) / samples, plan.certificate.staleness_bound)


@dataclass(frozen=True)
class _Problem:
    """One graph, and the ways to divide its devices; `left_out` counts the reasons of divisions that do not fit."""

    settings: Mapping[str, Any]
    graph: Graph
    cluster: Cluster
    shapes: Shapes
    costs: Costs
    divisions: Divisions
    by: Objective
    left_out: Counter[str]

    @property
    def rows(self) -> int:
        """The responses per step: the rows of an update."""
        return max((node.rows for node in self.graph.nodes if node.traits.work == "train"), default=self.graph.rows)

    def drafts(self, divisions: Iterable[Counts]) -> Iterator[_Draft]:
        """Yield a draft for each division that fits."""
        for counts in divisions:
            try:
                workers, placed, schedule = place_and_schedule(self.graph, self.cluster, counts, self.costs)
                needs_that_fit(self.graph, self.cluster, workers, placed, self.shapes, self.costs)
            except PlanError as refused:
                self.left_out[str(refused)] += 1
                continue
            yield _Draft(self, counts, placed, critical_cycle(schedule).period_s)

    def best_first(self) -> Iterator[Counts]:
        """Yield divisions by their period, without those that do not fit in memory."""
        like = next(iter(self.divisions))
        workers = place_and_configure(self.graph, self.cluster, like)[0]
        period = period_on(self.graph, self.cluster, self.costs, like)

        def period_if_it_fits(counts: Counts) -> float:
            placed = settings_on(self.graph, self.cluster, counts)
            try:
                needs_that_fit(self.graph, self.cluster, workers, placed, self.shapes, self.costs)
            except PlanError as refused:
                self.left_out[str(refused)] += 1
                return float("inf")
            return period(counts)

        return (division.counts for division in best_first(self.divisions, period_if_it_fits))


def _rank(
    build: Callable[..., Graph],
    cluster: Cluster,
    costs: Costs | None,
    choices: Mapping[str, Sequence[Any]],
    by: Objective,
    max_staleness: int | None,
) -> Tuning:
    """Rank the plans. Raises PlanError if none is left."""
    left_out = Counter[str]()
    drafts, streams, looked_at = list[_Draft](), list[Iterator[_Draft]](), 0
    for problem in _problems(build, cluster, costs, choices, by, max_staleness, left_out):
        if len(problem.divisions) <= FEW:
            drafts += problem.drafts(problem.divisions)
        else:
            streams.append(problem.drafts(problem.best_first()))
            looked_at += len(problem.divisions)
    looked_at += len(drafts)
    drafts += _best(streams)
    if not drafts:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in left_out.items())
        raise PlanError(f"tune found no plan: {reasons or 'there is nothing to choose from'}")
    drafts.sort(key=attrgetter("score"))
    most = 2 * PLAYED if streams else 4 * PLAYED
    close = [d for index, d in enumerate(drafts) if index < PLAYED or (index < most and d.score <= CLOSE * drafts[0].score)]
    kinds = [next((d for d in drafts if is_async(d.problem.graph) == wanted), None) for wanted in (False, True)]
    kept = close + [d for d in kinds if d is not None and not any(d is other for other in close)]
    caveats = warnings_of((draft.problem.graph, draft.problem.costs, draft.placed) for draft in drafts)
    found = [draft.predict(caveats) for draft in kept]
    best = min(_score(tuned, by) for tuned in found) or 1.0
    ranked = sorted(found, key=lambda tuned: (round(_score(tuned, by) / best, 3), tuned.staleness))  # equally good ones: less stale first
    return Tuning(tuple(ranked), looked_at, left_out, with_caveats(verdict(ranked, by), caveats), caveats)


def _problems(
    build: Callable[..., Graph],
    cluster: Cluster,
    costs: Costs | None,
    choices: Mapping[str, Sequence[Any]],
    by: Objective,
    max_staleness: int | None,
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
            yield _Problem(settings, graph, cluster, shapes, priced, splits(graph, cluster), by, left_out)
        except (GraphError, PlanError) as refused:
            left_out[str(refused)] += 1


def _best(streams: Sequence[Iterator[_Draft]]) -> list[_Draft]:
    """Select the best drafts of the streams, to be played: few of each stream, because the drafts of one stream differ little."""
    heads = [(draft.score, index, draft) for index, stream in enumerate(streams) if (draft := next(stream, None)) is not None]
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
            heapq.heapreplace(heads, (following.score, index, following))
    return found + [draft for _, _, draft in heads]


def _score(tuned: Tuned, by: Objective) -> float:
    return tuned.gpu_s_per_sample if by == "gpu_s_per_sample" else 1 / tuned.samples_per_s


def is_async(graph: object) -> bool:
    return isinstance(graph, Graph) and any(feedback.depth > 0 for feedback in graph.feedbacks)


def verdict(ranked: Sequence[Tuned], by: Objective) -> str:
    """Describe whether stale batches are worth it, and why."""
    sync = next((c for c in ranked if not is_async(c.plan.source)), None)
    ahead = [c for c in ranked if is_async(c.plan.source)]
    if sync is None or not ahead:
        return ""
    stale = ahead[0]
    gain = _score(sync, by) / _score(stale, by)
    if gain > 1:
        shallow = min((c for c in ahead if _score(c, by) <= 1.01 * _score(stale, by)), key=lambda c: c.staleness)
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


def _sum(tuned: Tuned) -> str:
    """Name the two longest nodes on pools, with their seconds."""
    nodes = sorted((n for n in tuned.plan.nodes if n.pool is not None), key=lambda n: -n.seconds)[:2]
    return " and ".join(f"{node.name} {node.seconds:.3g} s" for node in nodes)


def _devices_of(tuned: Tuned) -> str:
    pools = [p for p in tuned.plan.pools if any(n.pool == p.name for n in tuned.plan.nodes)]
    return " + ".join(f"{p.count} ({p.name})" for p in pools)


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


@check_arguments(PlanError)
def replay(trace: "Job | str | Path", *, shares: Mapping[str, Positive] | None = None, depth: Natural | None = None) -> Replayed:
    """Play a recorded run again with other shares of the devices or another depth, and predict its step time; prints as a line.

        print(rg.planning.replay("runs/grpo", shares={"rollout": 3, "train": 1}))

    `trace` is a job, the folder that `rlgraph.record` wrote, or a trace file. `shares` divide the devices of the named pools. Each
    recorded firing is played again; on another number of devices its seconds are scaled by the cost functions fitted to the run.

    Raises PlanError if the record is missing or too short, or the plan does not allow the change.

    >>> import rlgraph as rg
    >>> rg.planning.replay("no/such/run", depth=1)
    Traceback (most recent call last):
    rlgraph.errors.PlanError: replay('no/such/run'): there is no such trace; rg.record writes trace.json into its folder
    """
    if isinstance(trace, str | Path):
        path = Path(trace)
        recorded = Trace.from_file(path / "trace.json" if path.is_dir() else path)
    else:
        recorded = trace.trace()
    return replay_trace(recorded, shares, depth)


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
    pools = plan.counts
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
