"""Fit costs to the firings of runs: for each node, the function that explains them with the fewest parameters."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np

from rlgraph.errors import PlanError
from rlgraph.plan.cost_functions import Decode, NodeCost, Setting, SleepCost
from rlgraph.plan.costs import Costs
from rlgraph.plan.events import load_event, publish_event, receive_event
from rlgraph.plan.forecast import count_decode_work
from rlgraph.plan.lengths import Array, Lengths
from rlgraph.plan.plan import Plan, PlannedJoin, PlannedNode, with_new_names
from rlgraph.plan.play import firing_order
from rlgraph.plan.roofline import with_doubling
from rlgraph.plan.schedule import MOVING, WORK, Dependency, Sampled, Span

# The trace of a run's firings: costs are fitted to it, and it is replayed under other settings.


@dataclass(frozen=True)
class Trace:
    """A recorded run: its plan, the spans of each worker, the sampled tokens, and the bytes of a published version.

    At most `window` steps were in flight; 0: as many as the plan allows.
    """

    plan: Plan
    spans: Sequence[Span]
    sampled: Sequence[Sampled]
    published_bytes: int = 0
    window: int = 0

    def to_file(self, path: str | Path) -> None:
        """Write the trace as JSON, which `Trace.from_file` reads."""
        Path(path).write_bytes(msgspec.json.encode(replace(self, plan=self.plan.values)))

    @classmethod
    def from_file(cls, path: str | Path) -> "Trace":
        """Read a trace. Raises PlanError for a missing file, or a file without a trace."""
        file = Path(path)
        if not file.is_file():
            raise PlanError(f"replay('{path}'): there is no such trace; rg.record writes trace.json into its folder")
        try:
            raw = msgspec.json.decode(file.read_bytes())
            if isinstance(raw, dict):
                raw["plan"] = with_new_names(raw.get("plan"))
            return msgspec.convert(raw, Trace)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise PlanError(f"replay('{path}'): {error}; pass the trace.json that rg.record writes") from None


# Leave rare firings, during which the machine stalled, out of a fit.

FAR = 8.0  # times the usual distance from the fit
LEAST = 0.1  # of the fitted seconds: a nearer firing is not an outlier
RARE = 0.05  # of all firings: more frequent ones are not outliers
FEW = 5  # firings of which one may be an outlier, e.g. the second update of a trainer


def steady(seconds: Array, fitted: Array | float = 0.0) -> Array:
    """Mark, as booleans, the firings to keep: all but the rare firings that lasted far longer than the fit.

    The unit of distance is the median of all distances (median absolute deviation), which outliers do not change.
    """
    beyond = seconds - fitted
    beyond = beyond - np.median(beyond)
    far: Array = beyond > np.maximum(FAR * np.median(np.abs(beyond)), LEAST * (seconds - beyond))
    most = max(RARE * far.size, 1.0 if far.size >= FEW else 0.0)
    return ~far if far.sum() <= most else np.ones_like(far)


def mean(seconds: Array) -> float:
    """Average the firings without the outliers."""
    return float(seconds[steady(seconds)].mean())


# Explain measured seconds with the fewest parameters: least squares with non-negative coefficients, and only with those that help.

KEPT_SPREAD = 40  # single firings kept in the costs of a node
HARDLY = 0.1  # share of the mean firing: shorter firings do not count for the spread
STEADY = 0.02  # a quantity that varies by less, relative to its mean, explains nothing


def independent_columns(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Keep the columns that are not zero and not nearly a multiple of an earlier column.

    Which of two such columns fits better would be noise, so the first stands for both.
    """
    kept: dict[str, Array] = {}
    for name, column in columns.items():
        if column.any() and all(varies(column / np.maximum(other, 1e-30)) for other in kept.values()):
            kept[name] = column
    return kept


def varies(values: Array) -> bool:
    """Whether a quantity varies enough to explain anything."""
    return bool(values.std() > STEADY * values.mean())


def fewest(columns: Mapping[str, Array], seconds: Array) -> dict[str, float]:
    """Fit non-negative coefficients for the subset of columns that the firings support, without outliers."""
    kept = np.ones(len(seconds), dtype=bool)
    while True:
        found = _least_squares({name: column[kept] for name, column in columns.items()}, seconds[kept])
        ordinary = kept & steady(seconds, predict_seconds(columns, found))
        if ordinary.sum() == kept.sum():
            return found
        kept = ordinary


def predict_seconds(columns: Mapping[str, Array], coefficients: Mapping[str, float]) -> Array:
    """Predict the seconds of each firing from fitted coefficients."""
    predicted: Array = np.sum([coefficients.get(name, 0.0) * column for name, column in columns.items()], axis=0)
    return predicted


def _least_squares(columns: Mapping[str, Array], seconds: Array) -> dict[str, float]:
    """Fit non-negative coefficients by least squares, for the subset of columns that the data support.

    The Bayesian information criterion (Schwarz, 1978) sets how much a further parameter must explain. As many parameters as firings would
    explain nothing, so a subset has fewer.
    """
    best, least = dict[str, float](), float("inf")
    count, floor = len(seconds), 1e-12 * float((seconds**2).sum()) + 1e-30
    for size in range(1, min(len(columns), max(count - 1, 1)) + 1):
        for names in combinations(columns, size):
            table = np.stack([columns[name] for name in names], axis=1)
            scale = np.maximum(table.max(axis=0), 1e-30)
            found, _, rank, _ = np.linalg.lstsq(table / scale, seconds, rcond=1e-6)
            if rank < size or (found < 0).any():
                continue
            left = float(((seconds - (table / scale) @ found) ** 2).sum()) + floor
            score = count * np.log(left / count) + size * np.log(max(count, 2))
            if score < least - 1e-9:
                best, least = dict(zip(names, (found / scale).tolist(), strict=True)), score
    return best


def spread(seconds: Array, fitted: Array | float) -> tuple[float, ...]:
    """Divide single firings by their fitted seconds, and reduce many of them to quantiles.

    Firings with hardly any fitted time are left out: their responses ended while another batch decoded, which the fit does not describe."""
    by_law = np.broadcast_to(np.asarray(fitted, dtype=float), seconds.shape)
    told = by_law > HARDLY * by_law.mean()
    ratios = seconds[told] / by_law[told] if told.any() else np.ones(1)
    if len(ratios) > KEPT_SPREAD:
        ratios = np.quantile(ratios, (np.arange(KEPT_SPREAD) + 0.5) / KEPT_SPREAD)
    return tuple(float(f"{ratio:.6g}") for ratio in ratios)


# Fit the seconds of training and log-probs to the firings of a run: by tokens, by the host's time per micro-batch, or by neither.

EXPLAINED = 0.3  # tokens determine a time if at most this share of its variance stays unexplained
FLOORS = 64  # candidates for the floor: the largest micro-batch that lasts no longer than smaller ones
FINELY = 512  # candidates for the least seconds of a micro-batch, with all else known
KNOWN = 2.0  # of the information criterion: evidence "not worth more than a bare mention" (Kass and Raftery, 1995)


@dataclass(frozen=True)
class Share:
    """The work of one rank in a step: its tokens per device, the tokens of each micro-batch if known, and whether it gathered no shards."""

    tokens: float
    passes: Array | None = None
    is_unsharded: bool = True

    def at_least(self, floor: float) -> float:
        """Sum the tokens; each micro-batch counts at least `floor`."""
        return self.tokens if self.passes is None or floor == 0 else float(np.maximum(self.passes, floor).sum())


def share_of(setting: Setting, sampled: Sequence[Sampled]) -> Share:
    """Compute a rank's share of a step's tokens. Rows that were not sampled, e.g. examples next to a rollout, count like sampled rows."""
    lengths = np.array([[length for s in sampled for length in s.response_tokens]], dtype=float)
    prompts = float(sum(s.prompt_tokens for s in sampled))
    if 0 < lengths.size < setting.rows:
        prompts *= setting.rows / lengths.size
        lengths = np.resize(lengths, (1, int(setting.rows)))  # repeats them
    tokens, unsharded = (prompts + float(lengths.sum())) / setting.devices, setting.is_unsharded
    if setting.passes is None or not lengths.size:
        return Share(tokens, None, unsharded)
    passes = setting.passes.of_a_rank(lengths, prompts / lengths.size, setting.engines)[0] / setting.width
    return Share(tokens if setting.passes.group == 1 else float(passes.sum()), passes[passes > 0], unsharded)


def by_passes(setting: Setting, shares: Sequence[Share], seconds: Array, plain: NodeCost) -> NodeCost:
    """Fit the function of the measured ranks.

    Runs on other devices add the least seconds of a micro-batch with or without a sharded model. The function is `plain` if tokens explain
    nothing.
    """
    unsharded = setting.is_unsharded
    own = np.array([share.is_unsharded == unsharded for share in shares])
    cost = _by_tokens(setting, [share for share in shares if share.is_unsharded == unsharded], seconds[own], plain)
    floor = _least(cost, [share for share in shares if share.is_unsharded != unsharded], seconds[~own])
    pass_s, sharded_s = (cost.pass_s, floor) if unsharded else (floor, cost.pass_s)
    return replace(cost, pass_s=pass_s, sharded_pass_s=sharded_s)


def _by_tokens(setting: Setting, shares: Sequence[Share], seconds: Array, plain: NodeCost) -> NodeCost:
    """Fit seconds by tokens, with a constant part per step or per micro-batch if the steps show one; `plain` if tokens explain nothing."""
    tokens = np.array([share.tokens for share in shares])
    if (tokens <= 0).any():
        return plain
    if not varies(tokens):
        slope = mean(seconds) / float(tokens.mean())
        return NodeCost(token_s=slope, spread=spread(seconds, slope * tokens), measured=setting)
    floor, columns, found = _floor(shares, seconds)
    fitted = predict_seconds(columns, found)
    kept = steady(seconds, fitted)
    if ((seconds - fitted)[kept] ** 2).sum() > EXPLAINED * ((seconds - seconds.mean())[kept] ** 2).sum() and varies(seconds):
        return plain
    token_s = found.get("token", 0.0)
    return NodeCost(
        serial_s=found.get("serial", 0.0),
        token_s=token_s,
        pass_s=token_s * floor,
        spread=spread(seconds, fitted),
        measured=setting,
    )


def _floor(shares: Sequence[Share], seconds: Array) -> tuple[float, dict[str, Array], dict[str, float]]:
    """Fit the function together with a floor: the fewest tokens that a micro-batch counts as, since the host needs that long to launch it.

    A floor is judged by absolute errors (the information criterion of a Laplace distribution), which outliers do not dominate. If a
    constant part of the whole firing explains no more, the floor is preferred, since micro-batches are known to have one and firings are
    not.
    """
    largest = max((float(share.passes.max()) for share in shares if share.passes is not None), default=0.0)
    best: tuple[float, dict[str, Array], dict[str, float]] = 0.0, {}, {}
    least = float("inf")
    for floor in (largest * step / FLOORS for step in range(FLOORS + 1) if largest or not step):
        token = np.array([share.at_least(floor) for share in shares])
        for columns in ({"serial": np.ones_like(seconds), "token": token}, {"token": token}):
            found = fewest(columns, seconds)
            left = float(np.abs(seconds - predict_seconds(columns, found)).mean()) + 1e-12 * float(seconds.mean())
            numbers = len(found) + (floor > 0)
            score = 2 * len(seconds) * np.log(left) + numbers * np.log(len(seconds)) - (KNOWN if floor and numbers == 2 else 0.0)
            if score < least - 1e-9:
                least, best = score, (floor, columns, found)
    return best


def _least(cost: NodeCost, shares: Sequence[Share], seconds: Array) -> float:
    """Fit the least seconds of a micro-batch to firings outside of the fit: the seconds that explain them best, or 0."""
    known = [(share.passes, own_s - cost.serial_s) for share, own_s in zip(shares, seconds, strict=True) if share.passes is not None]
    if not cost.token_s or not known:
        return 0.0

    def error(floor: float) -> float:
        return sum(abs(float(np.maximum(cost.token_s * passes, floor).sum()) - float(own_s)) for passes, own_s in known)

    most = max(max(float(own_s) / len(passes) for passes, own_s in known), 0.0)  # no pass is shorter
    return min((most * step / FINELY for step in range(FINELY + 1)), key=error)


# Measure a run's latencies (from when an event could have begun until it did) and what interrupts its firings.

Ends = dict[tuple[str, int], dict[str, float]]  # by event and step: when each worker was done


def interruptions(spans: Iterable[Span]) -> Mapping[Span, Sequence[Span]]:
    """Find, for each firing, the loads of weights that interrupted it, and the waits for them."""
    everything = list(spans)
    firings: dict[tuple[str, int], list[Span]] = {}
    for span in everything:
        if span.kind == "fire":
            firings.setdefault((span.worker, span.step), []).append(span)
    found: dict[Span, list[Span]] = {}
    for span in everything:
        if span.kind in ("load", "wait"):
            for firing in firings.get((span.worker, span.step), ()):
                if firing.start_s <= span.start_s < firing.end_s:
                    found.setdefault(firing, []).append(span)
    return found


def latencies(trace: Trace, first_step: int, together: Collection[str] = ()) -> Mapping[str, float]:
    """Average, by event, the seconds from the end of its last wait to its start: copies, wake-ups, messages.

    Played with the events' own seconds and these, the schedule lasts as long as the run did. An event that waited for room in a channel
    ends when there is room. A step that waited for an older step to leave the window has no latency either: a slow first step blocks the
    nodes that would be far ahead. Weights that load within a firing have no latency. Events that wait for a step before the first span are
    left out. For nodes whose ranks work `together` the last rank counts, because the others wait for it.
    """
    spans, schedule, window = trace.spans, trace.plan.schedule, trace.window or trace.plan.window
    within = {span for inner in interruptions(spans).values() for span in inner}
    measured: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.kind in WORK and span not in within:
            measured.setdefault((span.name, span.step), []).append(span)
    steps = sorted({span.step for span in spans})
    within_run = set(steps)
    waits: dict[str, list[Dependency]] = {event.name: [] for event in schedule.events}
    for dependency in schedule.dependencies:
        waits[dependency.after].append(dependency)
    ends: Ends = {}
    step_ends: dict[int, float] = {}
    unknown: set[tuple[str, int]] = set()  # ended outside the spans
    late: dict[str, list[float]] = {event.name: [] for event in schedule.events}
    order = firing_order(schedule)
    for number in range(steps[0], steps[-1] + 1 + schedule.most_lag) if steps else ():
        for event, step in ((event, number - event.lag) for event in order if number - event.lag in within_run):
            found = measured.get((event.name, step), [])
            before = [(d.before, step - d.credits) for d in waits[event.name] if d.before != event.name]
            known = not any(place in unknown or 0 <= place[1] < steps[0] or place[1] > steps[-1] for place in before)
            if not found:  # weights of a step that needs none, and unmeasured events, count as done as soon as they could begin
                ends[event.name, step] = {"": max((_ready_time(ends, d, step, "") for d in waits[event.name]), default=0.0)}
                if not known:
                    unknown.add((event.name, step))
                continue
            starts = [d for d in waits[event.name] if not d.holds]
            window_s = step_ends.get(step - window, 0.0)
            ends[event.name, step] = {
                span.worker: max([span.end_s, *(_ready_time(ends, d, step, span.worker) for d in waits[event.name] if d.holds)])
                for span in found
            }
            step_ends[step] = max(step_ends.get(step, 0.0), *ends[event.name, step].values())
            began = [(span.start_s, max(window_s, *(_ready_time(ends, d, step, span.worker) for d in starts))) for span in found]
            if event.node in together:
                began = [(max(start_s for start_s, _ in began), max(ready_s for _, ready_s in began))]
            if step >= first_step and known:
                late[event.name] += [start_s - ready_s for start_s, ready_s in began if ready_s > 0]
    return {name: max(mean(np.array(values)), 0.0) if values else 0.0 for name, values in late.items()}


def _ready_time(ends: Ends, dependency: Dependency, step: int, worker: str) -> float:
    done = ends.get((dependency.before, step - dependency.credits), {})
    return done[worker] if worker in done else max(done.values(), default=0.0)


# Calibrate costs from runs: for each node, the function that explains its firings with the fewest parameters.

RUN_BITS = 32  # step numbers are below 1 << RUN_BITS
WARM_UP = 1  # steps left out: engines compile, caches fill
TOGETHER = ("train", "forward")  # all ranks do this work together, so that none can be ahead of another
Firings = Mapping[tuple[str, int], float]  # seconds by worker and step
Tokens = Mapping[tuple[str, int], Sampled]


def measured_costs(plan: Plan, spans: Sequence[Span], sampled: Sequence[Sampled], published_bytes: int = 0) -> Costs:
    """Measure the cost of each node and of moving weights in a run of `plan`, without the first step, which warms up.

    A cost includes the work itself and, in its serial seconds, the latency: from when the work could have begun until it did.
    """
    return costs_of([Trace(plan, spans, sampled, published_bytes)])


def costs_of(traces: Sequence[Trace]) -> Costs:
    """Fit costs that explain several runs of the same nodes, with batches of different sizes.

    Batches of different sizes show which seconds are constant and which grow with the batch. Lengths, devices and the measured
    setting are the first run's. A run on other devices, for example time-shared ones, adds firings of engines and ranks of the same
    width, and the costs of waking and sleeping.
    """
    places: dict[str, list[Trace]] = {}
    for trace in traces:
        places.setdefault(_place(trace.plan), []).append(trace)
    groups = [(group[0].plan, _spans(group), _late(group)) for group in places.values()]
    plan, here, late = groups[0]
    traces = [trace for group in places.values() for trace in group]
    anywhere = _spans(traces)
    within = interruptions(anywhere)
    settings = _settings(traces)
    everything = [replace(s, step=_global_step(run, s.step)) for run, trace in enumerate(traces) for s in trace.sampled]
    tokens = {node.name: _by_firing(s for s in everything if s.node == node.name and s.response_tokens) for node in plan.nodes}

    def move_seconds(event: str) -> float:
        found = [span.seconds for span in here if span.name == event and span.kind in MOVING]
        return mean(np.array(found)) + late[event] if found else 0.0

    events = {(event.node, event.name) for trace in traces for event in trace.plan.schedule.events if event.kind == "fire"}
    nodes: dict[str, float | NodeCost] = {}
    for node in plan.nodes:
        own = {event for of, event in events if of == node.name}
        width = setting_of(plan, node).width
        each = _firings(here if node.model is None else anywhere, own, within, together=node.work in TOGETHER)
        firings = {key: seconds for key, seconds in each.items() if settings[node.name, key[1]].width == width}
        if not firings:
            nodes[node.name] = 0.0
            continue
        cost = _cost(plan, node, firings, tokens, settings)
        if cost.decode is not None:
            cost = replace(cost, decode=_at_other_widths(cost.decode, node.name, each, tokens[node.name], settings, width))
        nodes[node.name] = replace(cost, serial_s=cost.serial_s + sum(late.get(event, 0.0) for event in sorted(own)))
    responses = [length for s in traces[0].sampled for length in s.response_tokens]
    prompts = sum(s.prompt_tokens for s in traces[0].sampled)
    return Costs(
        nodes,
        publish_s=sum(move_seconds(publish_event(loop.name)) for loop in plan.loops),
        receive_s=max((move_seconds(receive_event(loop.name, reader)) for loop in plan.loops for reader in loop.readers), default=0.0),
        swap_s=max(
            (move_seconds(load_event(loop.name, reader, apart=loop.due is not None)) for loop in plan.loops for reader in loop.readers),
            default=0.0,
        ),
        source="measured",
        lengths=Lengths.fit(responses, prompts / len(responses)) if responses else None,
        publish_bytes=traces[0].published_bytes or None,
        on=_place(plan),
        sleep={model: cost for group in reversed(groups) for model, cost in _sleep(*group).items()},
    )


def _firings(spans: Sequence[Span], events: Collection[str], within: Mapping[Span, Sequence[Span]], *, together: bool) -> Firings:
    """Sum the seconds of a node's firings over the chunks of a batch, without the interruptions in `within`.

    Ranks that work `together` are counted as one, from when the last of them began, since an early one waits for it.
    """
    fired: dict[tuple[str, str, int], list[Span]] = {}
    for span in spans:
        if span.name in events and span.kind == "fire":
            fired.setdefault((span.name, "" if together else span.worker, span.step), []).append(span)
    found: dict[tuple[str, int], float] = {}
    for (_, worker, step), ranks in fired.items():
        seconds = max(span.end_s for span in ranks) - max(span.start_s for span in ranks)
        inner_s = max(sum(inner.seconds for inner in within.get(span, ())) for span in ranks)
        found[worker, step] = found.get((worker, step), 0.0) + seconds - inner_s
    return found


def _sleep(plan: Plan, kept: Sequence[Span], late: Mapping[str, float]) -> dict[str, SleepCost]:
    """Measure the wake and sleep of each model that time-shares its devices: the mean over its time slices, of the slowest rank."""
    found: dict[str, SleepCost] = {}
    for worker in (worker for worker in plan.workers if worker.model is not None and worker.rank == 0):
        seconds: dict[str, list[float]] = {"wake": [], "sleep": []}
        sizes: list[int] = []
        for event in (e for e in plan.schedule.events if e.kind in seconds and e.node in worker.nodes):
            spans = [span for span in kept if (span.name, span.kind) == (event.name, event.kind)]
            each = [max(span.seconds for span in spans if span.step == step) for step in sorted({span.step for span in spans})]
            sizes += [span.bytes for span in spans if span.bytes is not None]
            if each:
                seconds[event.kind].append(mean(np.array(each)) + late[event.name])
        if seconds["wake"] and seconds["sleep"]:
            setting = setting_of(plan, plan.node(worker.nodes[0]))
            together = max(setting.engines // setting.devices, 1)  # engines of one device
            size = max(sizes) * together if sizes else None
            sleep_s, wake_s = (float(np.mean(seconds[kind])) for kind in ("sleep", "wake"))
            found[str(worker.model)] = SleepCost(sleep_s, wake_s, size, Setting(setting.devices, setting.engines))
    return found


def _spans(traces: Sequence[Trace]) -> list[Span]:
    """Collect the spans of all runs after their warm-up, with separate step numbers for each run.

    Events that are due at some steps only, e.g. evaluations, count from their first firing, if there is no later one.
    """
    firsts = [_first(trace) for trace in traces]
    later = {span.name for trace, first in zip(traces, firsts, strict=True) for span in trace.spans if span.step >= first}
    rare = {name for trace in traces for name in trace.plan.due_events()} - later
    return [
        replace(span, step=_global_step(run, span.step))
        for run, (trace, first) in enumerate(zip(traces, firsts, strict=True))
        for span in trace.spans
        if span.step >= first or span.name in rare
    ]


def _late(traces: Sequence[Trace]) -> Mapping[str, float]:
    """Average the latency of each event."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        together = [node.name for node in trace.plan.nodes if node.work in TOGETHER]
        for event, seconds in latencies(trace, _first(trace), together).items():
            found.setdefault(event, []).append(seconds)
    return {event: float(np.mean(seconds)) for event, seconds in found.items()}


def _first(trace: Trace) -> int:
    """Find the first step after the warm-up."""
    return min((span.step for span in trace.spans), default=0) + WARM_UP


def _settings(traces: Sequence[Trace]) -> Mapping[tuple[str, int], Setting]:
    """Look up the setting of each node in each step of the runs."""
    steps = [(trace.plan, _global_step(run, step)) for run, trace in enumerate(traces) for step in {span.step for span in trace.spans}]
    return {(node.name, step): setting_of(plan, node) for plan, step in steps for node in plan.nodes}


def _global_step(run: int, step: int) -> int:
    """Number a step so that no other run has the same number."""
    return (run << RUN_BITS) + step


def _by_firing(sampled: Iterable[Sampled]) -> Tokens:
    """Join the samples of each worker in each step over the chunks of a batch."""
    found: dict[tuple[str, int], Sampled] = {}
    for s in sampled:
        so_far = found.get((s.worker, s.step))
        if so_far is not None:
            s = replace(s, prompt_tokens=so_far.prompt_tokens + s.prompt_tokens, response_tokens=so_far.response_tokens + s.response_tokens)
        found[s.worker, s.step] = s
    return found


def _place(plan: Plan) -> str:
    devices = f"{plan.cluster.gpus} GPUs" if plan.cluster.gpus else f"{plan.cluster.cpus} cores"
    return f"{devices} ({plan.split_text})" if plan.pools else devices


def setting_of(plan: Plan, node: PlannedNode) -> Setting:
    """Look up the setting in which a node of a plan runs."""
    return Setting(plan.counts[node.pool] if node.pool else 1, len(node.workers), node.rows, node.passes)


def _cost(
    plan: Plan, node: PlannedNode, firings: Firings, tokens: Mapping[str, Tokens], settings: Mapping[tuple[str, int], Setting]
) -> NodeCost:
    setting = setting_of(plan, node)
    if tokens[node.name]:
        return _fit_decoding(setting, firings, tokens[node.name], node.joins)
    steps = sorted({step for _, step in firings})
    seconds = np.array([max(s for (_, at), s in firings.items() if at == step) for step in steps])
    at = [settings[node.name, step] for step in steps]
    plain = _by_rows(setting, np.array([each.rows / each.devices for each in at]), seconds)
    sources = list(dict.fromkeys(c.writer for c in plan.channels if c.kind != "order" and node.name in c.readers and tokens[c.writer]))
    if node.work not in TOGETHER or not sources:
        return plain
    read = [[s for name in sources for (_, of), s in sorted(tokens[name].items()) if of == step] for step in steps]
    return by_passes(setting, [share_of(*both) for both in zip(at, read, strict=True)], seconds, plain)


def _by_rows(setting: Setting, rows: Array, seconds: Array) -> NodeCost:
    """Fit seconds by rows per device, with a constant part if batches of different sizes show one."""
    found = {"rows": mean(seconds) / float(rows.mean())}
    columns = {"rows": rows}
    if varies(rows):
        columns["serial"] = np.ones_like(rows)
        found = fewest(columns, seconds)
    return NodeCost(
        serial_s=found.get("serial", 0.0),
        parallel_s=found.get("rows", 0.0) * setting.rows,
        spread=spread(seconds, predict_seconds(columns, found)),
        measured=setting,
    )


def _fit_decoding(setting: Setting, firings: Firings, tokens: Tokens, joins: PlannedJoin | None) -> NodeCost:
    """Fit decoding from every engine's firings: the seconds of its steps, its active sequences and its prompts."""
    work = _decode_counts(tokens, joins)
    both = sorted(firings.keys() & tokens.keys(), key=lambda key: (key[1], key[0]))
    seconds = np.array([firings[key] for key in both])
    longest, total, prompts = np.array([work[key] for key in both], dtype=float).T
    columns = independent_columns({"step_s": longest, "sequence_s": total, "prefill_s": prompts, "start_s": np.ones_like(seconds)})
    found = fewest(columns, seconds)
    decode = Decode(found.get("step_s", 0.0), found.get("sequence_s", 0.0), found.get("prefill_s", 0.0), found.get("start_s", 0.0))
    fitted = predict_seconds(columns, found)
    return NodeCost(decode=decode, spread=spread(*_by_step(both, seconds, fitted)), measured=setting)


def _decode_counts(tokens: Tokens, joins: PlannedJoin | None) -> Mapping[tuple[str, int], tuple[float, float, float]]:
    """Count the decode steps of each firing, the sequences summed over them, and the prompt tokens of its batch and of joining batches."""
    found = {key: (float(max(s.response_tokens)), float(sum(s.response_tokens)), float(s.prompt_tokens)) for key, s in tokens.items()}
    runs: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for worker, step in sorted(tokens) if joins is not None else ():
        runs.setdefault((worker, step >> RUN_BITS), []).append((worker, step))
    for keys in runs.values():
        rows = [tokens[key].response_tokens for key in keys]
        together = len({len(row) for row in rows}) == 1 and keys[-1][1] - keys[0][1] == len(keys) - 1
        if joins is not None and together:
            played = count_decode_work(np.array(rows, dtype=float), joins).tolist()
            found |= {key: (steps, total, begun * found[key][2]) for key, (steps, total, begun) in zip(keys, played, strict=True)}
    return found


def _at_other_widths(
    decode: Decode, node: str, firings: Firings, tokens: Tokens, settings: Mapping[tuple[str, int], Setting], width: float
) -> Decode:
    """Add the share of the ideal speed-up that wider and narrower engines keep, if the runs have engines of other widths."""
    both = sorted(key for key in firings.keys() & tokens.keys() if settings[node, key[1]].width != width)
    if not both:
        return decode
    sampled = [tokens[key] for key in both]
    own = [decode.seconds(np.array([s.response_tokens], dtype=float), s.prompt_tokens / len(s.response_tokens), 1).item() for s in sampled]
    wider = np.array([settings[node, step].width / width for _, step in both])
    return with_doubling(decode, wider, np.array(own), np.array([firings[key] for key in both]))


def _by_step(keys: Sequence[tuple[str, int]], seconds: Array, fitted: Array) -> tuple[Array, Array]:
    """Select the measured and fitted seconds of the last engine of each step."""
    steps = np.array([step for _, step in keys])
    each = np.unique(steps)
    return np.array([seconds[steps == s].max() for s in each]), np.array([fitted[steps == s].max() for s in each])
