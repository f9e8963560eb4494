"""Calibrate costs from runs: for each node the function that explains its firings with the fewest numbers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlgraph.compiler.events import load_event, publish_event, receive_event
from rlgraph.compiler.plan import Plan, PlannedJoin, PlannedNode
from rlgraph.compiler.schedule import MOVING, Sampled, Span
from rlgraph.costs import outliers
from rlgraph.costs.costs import Costs
from rlgraph.costs.engine_widths import with_doubling
from rlgraph.costs.functions import Decode, NodeCost, Setting, SleepCost
from rlgraph.costs.latency import interruptions, latencies
from rlgraph.costs.lengths import Array, Lengths
from rlgraph.costs.regression import explained, fewest, spread, told_apart, varies
from rlgraph.costs.trace import Trace
from rlgraph.costs.training_function import by_passes, share_of
from rlgraph.simulate.continuous import decoded

RUN_BITS = 32  # a step's number is below 1 << RUN_BITS
WARM_UP = 1  # steps left out: engines compile, caches fill
TOGETHER = ("train", "forward")  # work that all ranks do together, so that none can be ahead of another
Firings = Mapping[tuple[str, int], float]  # seconds by worker and step
Tokens = Mapping[tuple[str, int], Sampled]


def measured_costs(plan: Plan, spans: Sequence[Span], sampled: Sequence[Sampled], published_bytes: int = 0) -> Costs:
    """Measure what each node and moving weights cost in a run of `plan`, without the first step, which warms up.

    A cost holds the work itself and, in its serial seconds, the latency: from when the work could have begun until it did.
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
    everything = [replace(s, step=_apart(run, s.step)) for run, trace in enumerate(traces) for s in trace.sampled]
    tokens = {node.name: _by_firing(s for s in everything if s.node == node.name and s.response_tokens) for node in plan.nodes}

    def moving(event: str) -> float:
        found = [span.seconds for span in here if span.name == event and span.kind in MOVING]
        return outliers.mean(np.array(found)) + late[event] if found else 0.0

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
        publish_s=sum(moving(publish_event(loop.name)) for loop in plan.loops),
        receive_s=max((moving(receive_event(loop.name, reader)) for loop in plan.loops for reader in loop.readers), default=0.0),
        swap_s=max(
            (moving(load_event(loop.name, reader, apart=loop.due is not None)) for loop in plan.loops for reader in loop.readers),
            default=0.0,
        ),
        source="measured",
        lengths=Lengths.measured(responses, prompts / len(responses)) if responses else None,
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
                seconds[event.kind].append(outliers.mean(np.array(each)) + late[event.name])
        if seconds["wake"] and seconds["sleep"]:
            setting = setting_of(plan, plan.node(worker.nodes[0]))
            together = max(setting.engines // setting.devices, 1)  # engines of one device
            size = max(sizes) * together if sizes else None
            sleep_s, wake_s = (float(np.mean(seconds[kind])) for kind in ("sleep", "wake"))
            found[str(worker.model)] = SleepCost(sleep_s, wake_s, size, Setting(setting.devices, setting.engines))
    return found


def _spans(traces: Sequence[Trace]) -> list[Span]:
    """Collect the spans of all runs after their warm-up, with step numbers of their own for each run.

    Events that are due at some steps only, as evaluations, count from their first firing, if there is no later one.
    """
    later = {span.name for trace in traces for span in trace.spans if span.step >= _first(trace)}
    rare = {name for trace in traces for name in trace.plan.due_events()} - later
    return [
        replace(span, step=_apart(run, span.step))
        for run, trace in enumerate(traces)
        for span in trace.spans
        if span.step >= _first(trace) or span.name in rare
    ]


def _late(traces: Sequence[Trace]) -> Mapping[str, float]:
    """Average the latency of each event."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        together = [node.name for node in trace.plan.nodes if node.work in TOGETHER]
        for event, seconds in latencies(trace.plan.schedule, trace.spans, _first(trace), together).items():
            found.setdefault(event, []).append(seconds)
    return {event: float(np.mean(seconds)) for event, seconds in found.items()}


def _first(trace: Trace) -> int:
    """Find the first step after the warm-up."""
    return min((span.step for span in trace.spans), default=0) + WARM_UP


def _settings(traces: Sequence[Trace]) -> Mapping[tuple[str, int], Setting]:
    """Look up the setting of each node in each step of the runs."""
    steps = [(trace.plan, _apart(run, step)) for run, trace in enumerate(traces) for step in {span.step for span in trace.spans}]
    return {(node.name, step): setting_of(plan, node) for plan, step in steps for node in plan.nodes}


def _apart(run: int, step: int) -> int:
    """Number a step so that no other run has the same number."""
    return (run << RUN_BITS) + step


def _by_firing(sampled: Iterable[Sampled]) -> Tokens:
    """Join what each worker sampled in each step over the chunks of a batch."""
    found: dict[tuple[str, int], Sampled] = {}
    for s in sampled:
        so_far = found.get((s.worker, s.step))
        if so_far is not None:
            s = replace(s, prompt_tokens=so_far.prompt_tokens + s.prompt_tokens, response_tokens=so_far.response_tokens + s.response_tokens)
        found[s.worker, s.step] = s
    return found


def _place(plan: Plan) -> str:
    devices = f"{plan.cluster.gpus} GPUs" if plan.cluster.gpus else f"{plan.cluster.cpus} cores"
    pools = ", ".join(f"{pool.name} {len(pool.gpus) or pool.cpus}" for pool in plan.pools)
    return f"{devices} ({pools})" if pools else devices


def setting_of(plan: Plan, node: PlannedNode) -> Setting:
    """Look up the setting in which a node of a plan runs."""
    pools = {pool.name: len(pool.gpus) or pool.cpus for pool in plan.pools}
    return Setting(pools[node.pool] if node.pool else 1, len(node.workers), node.rows, node.passes)


def _cost(
    plan: Plan, node: PlannedNode, firings: Firings, tokens: Mapping[str, Tokens], settings: Mapping[tuple[str, int], Setting]
) -> NodeCost:
    setting = setting_of(plan, node)
    if tokens[node.name]:
        return _generating(setting, firings, tokens[node.name], node.joins)
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
    """Fit seconds by rows of a device, with a constant part where batches of different sizes show one."""
    found = {"rows": outliers.mean(seconds) / float(rows.mean())}
    columns = {"rows": rows}
    if varies(rows):
        columns["serial"] = np.ones_like(rows)
        found = fewest(columns, seconds)
    return NodeCost(
        serial_s=found.get("serial", 0.0),
        parallel_s=found.get("rows", 0.0) * setting.rows,
        spread=spread(seconds, explained(columns, found)),
        measured=setting,
    )


def _generating(setting: Setting, firings: Firings, tokens: Tokens, joins: PlannedJoin | None) -> NodeCost:
    """Fit decoding from every engine's firings: the seconds of its steps, its active sequences and its prompts."""
    work = _decoded(tokens, joins)
    both = sorted(firings.keys() & tokens.keys(), key=lambda key: (key[1], key[0]))
    seconds = np.array([firings[key] for key in both])
    longest, total, prompts = np.array([work[key] for key in both], dtype=float).T
    columns = told_apart({"step_s": longest, "sequence_s": total, "prefill_s": prompts, "start_s": np.ones_like(seconds)})
    found = fewest(columns, seconds)
    decode = Decode(found.get("step_s", 0.0), found.get("sequence_s", 0.0), found.get("prefill_s", 0.0), found.get("start_s", 0.0))
    fitted = explained(columns, found)
    return NodeCost(decode=decode, spread=spread(*_by_step(both, seconds, fitted)), measured=setting)


def _decoded(tokens: Tokens, joins: PlannedJoin | None) -> Mapping[tuple[str, int], tuple[float, float, float]]:
    """Count the decode steps of each firing, the sequences summed over them, and the prompt tokens of its batch and of those that
    joined it."""
    found = {key: (float(max(s.response_tokens)), float(sum(s.response_tokens)), float(s.prompt_tokens)) for key, s in tokens.items()}
    runs: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for worker, step in sorted(tokens) if joins is not None else ():
        runs.setdefault((worker, step >> RUN_BITS), []).append((worker, step))
    for keys in runs.values():
        rows = [tokens[key].response_tokens for key in keys]
        together = len({len(row) for row in rows}) == 1 and keys[-1][1] - keys[0][1] == len(keys) - 1
        if joins is not None and together:
            played = decoded(np.array(rows, dtype=float), joins).tolist()
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
    """Take the measured and fitted seconds of the last engine of each step."""
    steps = np.array([step for _, step in keys])
    each = np.unique(steps)
    return np.array([seconds[steps == s].max() for s in each]), np.array([fitted[steps == s].max() for s in each])
