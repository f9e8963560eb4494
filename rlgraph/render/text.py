"""A plan as plain text in aligned tables of at most 100 columns, as `print(plan)` shows it, and as Mermaid text."""

from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from rlgraph.analysis import words
from rlgraph.channels.host.protocol import part_bytes
from rlgraph.plan.advice import critical
from rlgraph.plan.channels import (
    UNKNOWN_BYTES,
    Route,
    Shape,
    crossings,
    ends_on_hosts,
    hosts_of,
    kinds_of_routes,
    least_part,
    seconds_of,
    shape_of,
)
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedEnd, PlannedLoop, PlannedNode, PlannedPool, PlannedWorker
from rlgraph.render.plan_layout import drawn_channels

WIDTH = 100
NAME_MOST = 30  # the most cells of a table's column, except the last, which is wrapped


def align_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as a table. A head that begins with `>` aligns its column to the right; the last column is wrapped."""
    right = [name.startswith(">") for name in head]
    cells = [[name.removeprefix(">") for name in head], *([words.clean(cell) for cell in row] for row in rows)]
    widths = [min(max(cell_len(row[i]) for row in cells), NAME_MOST) for i in range(len(head) - 1)]
    lines = []
    for row in cells:
        fixed = "  ".join(_cell(row[i], widths[i], right[i]) for i in range(len(widths)))
        first, *more = _pieces(row[-1], WIDTH - cell_len(fixed) - 2) or [""]
        lines += [f"{fixed}  {first}", *(f"{' ' * cell_len(fixed)}  {part}" for part in more)]
    return lines


def _cell(value: str, width: int, right: bool) -> str:
    if cell_len(value) > width:
        return set_cell_size(set_cell_size(value, width - 3).rstrip() + "...", width)
    space = " " * (width - cell_len(value))
    return space + value if right else value + space


def wrap_line(line: str, indent: int = 0) -> Iterator[str]:
    """Yield a line in pieces of at most the page width; all but the first are indented."""
    lead = line[: len(line) - len(line.lstrip())]
    parts = _pieces(line.strip(), WIDTH - max(indent, len(lead)))
    for index, part in enumerate(parts):
        yield (lead if index == 0 else " " * indent) + part


def _pieces(line: str, room: int) -> list[str]:
    """Split at spaces into pieces of at most `room` cells; a longer word is broken."""
    parts: list[str] = []
    for word in line.split():
        if parts and cell_len(f"{parts[-1]} {word}") <= room:
            parts[-1] += f" {word}"
            continue
        while cell_len(word) > room:
            kept = next(n for n in range(len(word), 0, -1) if cell_len(word[:n]) <= room)
            parts.append(word[:kept])
            word = word[kept:]
        parts.append(word)
    return parts


WAIT_LEAST = 0.01  # share of the step: shorter waits are not listed
WAITS_MOST = 6
HOPS_MOST = 4


def text(plan: Plan) -> str:
    """Write a plan as text: pools, nodes, workers, channels, feedback edges, critical cycle, waits, advice, memory and certificate."""
    predicted = plan.prediction
    cycle = " -> ".join(map(words.clean, predicted.critical))
    round_s = words.seconds(predicted.period_s * predicted.critical_credits, predicted.cost)
    sections = [
        [*wrap_line(f"{words.clean(plan.graph)} on {words.cluster(plan.cluster)}{_hosts(plan)}: {words.prediction(plan)}")],
        _pools(plan),
        _nodes(plan),
        _sleeps(plan),
        _workers(plan),
        _models(plan),
        _channels(plan),
        [line for channel in plan.channels for line in _passed_on(channel, plan)],
        *(_earlier(channel) for channel in plan.channels if channel.kind == "earlier"),
        *(_loop(loop, plan) for loop in plan.loops),
        [*wrap_line(f"critical cycle: {cycle} ({round_s} over {words.with_count(predicted.critical_credits, 'credit')})", indent=2)],
        _waits(plan),
        [line for what in predicted.left_out for line in wrap_line(f"not predicted: {what}", indent=2)],
        [line for what in predicted.assumed for line in wrap_line(f"assumed: {what}", indent=2)],
        [line for warning in predicted.warnings for line in wrap_line(f"warning: {warning}", indent=2)],
        [line for advice in predicted.advice for line in wrap_line(f"advice: {advice}", indent=2)],
        _memory(plan),
        _certificate(plan),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in section) for section in sections if section)


def _hosts(plan: Plan) -> str:
    if not plan.cluster.gpus:
        return ""
    return f" ({words.with_count(plan.hosts, 'host')} of {words.with_count(plan.cluster.gpus_per_node, 'GPU')})"


def _pools(plan: Plan) -> list[str]:
    rows = [[p.name, words.devices(p), f"{p.busy:.0%}", _members(plan, p.name) or "no nodes"] for p in plan.pools]
    if any(node.pool is None for node in plan.nodes):
        rows.append([words.HOST, "", "", _members(plan, None)])
    return align_rows(["pool", "devices", ">busy", "nodes"], rows)


def _members(plan: Plan, pool: str | None) -> str:
    return ", ".join(words.clean(node.name) for node in plan.nodes if node.pool == pool)


def _nodes(plan: Plan) -> list[str]:
    rows = [
        [
            node.name,
            node.work,
            words.seconds(node.seconds, node.cost) + (f" / {node.due.every}" if node.due else ""),
            node.cost + (", any devices" if node.any_devices else ""),
            words.by_chunks(node.rows, node.chunks),
            ", ".join(map(words.clean, node.writes)),
        ]
        for node in plan.nodes
    ]
    return align_rows(["node", "work", ">time", "is", ">rows", "writes"], rows)


def _sleeps(plan: Plan) -> list[str]:
    """Write the table of models that time-share their devices, with the seconds that they need to wake and to sleep; empty if there are
    none."""
    rows = [[s.model, words.seconds(s.wake_s, s.cost), words.seconds(s.sleep_s, s.cost), s.cost, words.size(s.bytes)] for s in plan.sleeps]
    return align_rows(["time-shared", ">wakes in", ">sleeps in", "is", "of a device to the host"], rows) if rows else []


def _workers(plan: Plan) -> list[str]:
    groups: dict[tuple[str | None, str], list[PlannedWorker]] = {}
    for worker in plan.workers:
        groups.setdefault((worker.model, worker.model or worker.name), []).append(worker)
    rows = []
    for group in groups.values():
        first = group[0]
        name = first.name if len(group) == 1 else f"{first.model}[0..{len(group) - 1}]"
        gpus = [gpu for worker in group for gpu in worker.gpus]
        place = f"GPU {_ranges(gpus)}" if gpus else words.with_count(first.threads, "thread") + (" each" if len(group) > 1 else "")
        if plan.cluster.hosts > 1:
            place += f", host {_ranges(sorted({worker.host for worker in group}))}"
        rows.append([name, str(len(group)), place, ", ".join(map(words.clean, first.nodes))])
    return align_rows(["worker", ">processes", "on", "fires in this order"], rows)


def _models(plan: Plan) -> list[str]:
    """Write the table of models: the type each computes in and the reason for it, how ranks share passes, and the arguments of engines."""
    if not plan.models:
        return []
    optional = {"ranks": [m.split for m in plan.models], "engine_args": [m.engine_args for m in plan.models]}
    given = {name: cells for name, cells in optional.items() if any(cells)}
    rows = [[m.name, m.dtype, m.why, *(cells[index] for cells in given.values())] for index, m in enumerate(plan.models)]
    return align_rows(["model", "computes in", "since", *given], rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers with runs shortened: `0-3, 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _channels(plan: Plan) -> list[str]:
    rows = [[c.name, c.transport, words.by_chunks(c.slots, c.chunks), _batch_size(c), _route(c)] for c in plan.channels]
    return align_rows(["channel", "transport", ">slots", ">batch", "to: columns"], rows) if rows else []


def _batch_size(channel: PlannedChannel) -> str:
    if channel.kind == "order":
        return ""
    return words.size(None if channel.bytes is None else channel.bytes * channel.chunks)


def _route(channel: PlannedChannel) -> str:
    lead = "" if channel.kind == "batch" else f"{words.clean(channel.writer)} -> "
    carried = "order only" if channel.kind == "order" else ", ".join(map(words.clean, channel.columns))
    return f"{lead}{', '.join(map(words.clean, channel.readers))}: {carried}"


def _earlier(channel: PlannedChannel) -> list[str]:
    to = ", ".join(map(words.clean, channel.readers))
    line = f"feedback {words.clean(channel.name)}: {words.clean(channel.writer)} -> {to}: {words.earlier(channel)}"
    return [*wrap_line(line, indent=4)]


def _loop(loop: PlannedLoop, plan: Plan) -> list[str]:
    taken = "the latest published version" if loop.latest else f"version max(0, k - {loop.depth})" if loop.depth else "version k"
    if loop.due is not None:
        taken = "the version that step k publishes"
    cost = "hidden behind other work" if loop.hidden else "which lengthens the step"
    lines = [
        f"feedback {words.clean(loop.name)}: {words.clean(loop.writer)} -> {', '.join(map(words.clean, loop.readers))}",
        f"  {words.loop_terms(loop)}, {words.with_count(loop.slots, 'slot')}",
        *([] if loop.adapter is None else [f"  {words.adapter(loop.adapter)}"]),
        f"  the firing of step k uses {taken}; expected staleness {loop.staleness:.2f}",
        f"  publishing takes {words.seconds(loop.publish_s, plan.prediction.cost)} a step, {cost}",
    ]
    return [*(part for line in lines for part in wrap_line(line, indent=4)), *_passed_on(loop, plan)]


def _passed_on(end: PlannedEnd, plan: Plan) -> list[str]:
    """Describe which readers forward a rank's messages, in which shape and why, and how often they cross a link; empty if none does."""
    found, hosts = kinds_of_routes(plan, end), hosts_of(plan)
    writer, route = next(((one, to) for one, to in found.items() if set(to.values()) > {one}), next(iter(found.items())))
    several = sum(hosts[first] != hosts[feeder] for first, feeder in route.items()) > 1
    passing = set(route.values()) > {writer}
    if shape_of(plan, end) == "each" or not (passing or several):
        return []
    what = "a version" if isinstance(end, PlannedLoop) else "a batch"
    entered, left = (max(counts) for counts in zip(*(crossings(one, hosts) for one in found.values()), strict=True))
    times = "crosses each link once each way" if left == entered == 1 else f"comes into each host once, and leaves one up to {left} times"
    others = ", other ranks by other readers" if sum(ends_on_hosts(plan, end)[0].values()) > 1 else ""
    lines = [f"{words.clean(end.name)} is {'passed on' if passing else 'sent'}: {_hops(writer, route, hosts)}{others}; {what} {times}"]
    if several:
        lines.append(f"  {_shape(end, plan)}")
    return [part for line in lines for part in wrap_line(f"  {line}", indent=4)]


def _hops(writer: str, route: Route, hosts: Mapping[str, int]) -> str:
    """Write how a message travels between hosts: `a -> b of host 1 -> c of host 2`, with an entry for each worker that feeds several."""
    hops = [(first, feeder) for first, feeder in route.items() if hosts[first] != hosts[feeder]]
    chained = all(feeder == before for (_, feeder), (before, _) in zip(hops, [(writer, ""), *hops], strict=False))
    shown = [f"{words.clean(first)} of host {hosts[first]}" for first, _ in hops]
    if not chained:
        fed: dict[str, list[str]] = {}
        for one, (_, feeder) in zip(shown, hops, strict=True):
            fed.setdefault(feeder, []).append(one)
        shown = [f"{words.clean(feeder)} -> {', '.join(_shorten_middle(ones, 'hosts'))}" for feeder, ones in fed.items()]
        return "; ".join(_shorten_middle(shown, "that pass it on"))
    return " -> ".join([words.clean(writer), *_shorten_middle(shown, "hosts")])


def _shorten_middle(shown: list[str], what: str) -> list[str]:
    """Leave out all but the first and the last of many."""
    left_out = len(shown) - HOPS_MOST
    return [*shown[: HOPS_MOST - 1], f"{left_out} more {what}", shown[-1]] if left_out > 0 else shown


def _shape(end: PlannedEnd, plan: Plan) -> str:
    """Name the shape, and how much later the last host would receive a message in the other shape."""
    chosen, seconds = shape_of(plan, end), seconds_of(plan, end)
    other: Shape = "tree" if chosen == "chain" else "chain"
    size = words.size(end.bytes) if end.bytes is not None else f"{words.size(UNKNOWN_BYTES)} (the size is not known)"
    writers, _ = ends_on_hosts(plan, end)
    known = UNKNOWN_BYTES if end.bytes is None else end.bytes
    how = "in parts" if part_bytes(known / sum(writers.values()), end.slots, least_part(end)) else "whole"
    late = seconds[other] / seconds[chosen]
    return f"in a {chosen}, for {size} passed on {how}; in a {other} it takes {late:.2f} times as long"


def _waits(plan: Plan) -> list[str]:
    """Write the longest waits per step, without the waits that are too short to matter."""
    predicted = plan.prediction
    shown = [wait for wait in predicted.waits if wait.seconds > WAIT_LEAST * predicted.step_s][:WAITS_MOST]
    if not shown:
        return []
    said = [
        f"{words.clean(w.who)} {words.seconds(w.seconds, predicted.cost)} for {words.WAITS[w.reason](words.clean(w.on))}" for w in shown
    ]
    return [*wrap_line(f"waits a step: {'; '.join(said)}", indent=2)]


def _memory(plan: Plan) -> list[str]:
    lines: list[str] = []
    for need in plan.memory:
        parts = ", ".join(f"{what} {words.size(size)}" for what, size in need.parts)
        limit = f" of {words.size(need.limit)}" if need.limit is not None else ""
        queues = need.limit is not None and need.peak_bytes > need.limit
        least = f"; the engine queues responses without room, so {words.size(need.least_bytes)} are enough" if queues else ""
        what = f"memory of {words.clean(need.place)}: {words.size(need.peak_bytes)}{limit} at its peak ({parts}){least}"
        lines += wrap_line(what, indent=2)
    return lines


def _certificate(plan: Plan) -> list[str]:
    proof = plan.certificate
    claims = [
        f"staleness at most {proof.staleness_bound}",
        "no deadlock" if proof.deadlock_free else "a deadlock is possible",
        f"at most {words.with_count(proof.open_batches, 'batch')} open",
        f"at most {words.size(proof.buffered_bytes)} buffered" if proof.buffered_bytes is not None else "buffered bytes not known",
        f"at most {words.with_count(plan.window, 'step')} in flight",
        f"a step of {words.seconds(proof.period_s, plan.prediction.cost)}",
        *(["rollout and trainer agree to the bit (one kernel on both sides, some tokens checked in each step)"] if proof.exact else []),
    ]
    return [*wrap_line(f"certificate: {'; '.join(claims)}", indent=2)]


# A plan as Mermaid text: a subgraph for each pool, an arrow for each channel and reader, dotted arrows for feedback edges.

RED = "#c2330f"


def mermaid(plan: Plan) -> str:
    """Write a plan as a Mermaid flowchart; the critical cycle is red."""
    red = critical(plan)
    ids = {node.name: f"n{index}" for index, node in enumerate(plan.nodes)}
    lines = [
        "---",
        f"title: {_yaml(f'{words.clean(plan.graph)}: {words.cluster(plan.cluster)}, {words.prediction(plan)}')}",
        "---",
        "flowchart LR",
    ]
    for index, pool in enumerate((*plan.pools, None)):
        members = [node for node in plan.nodes if node.pool == (pool.name if pool else None)]
        if members:
            lines.append(f"  subgraph p{index}[{_quote_text(_pool_label(pool))}]")
            lines += [f"    {ids[node.name]}[{_quote_text(_node_label(node))}]" for node in members]
            lines.append("  end")
    marked = []
    links = 0
    for channel in drawn_channels(plan):
        for reader in channel.readers:
            columns = words.elide(words.read_of(channel.columns, plan.node(reader).reads))
            lines.append(f"  {ids[channel.writer]} -->|{_quote_text(columns)}| {ids[reader]}")
            marked += [links] if (channel.writer, reader) in red.edges else []
            links += 1
    for channel in (channel for channel in plan.channels if channel.kind == "earlier"):
        for reader in channel.readers:
            label = f"{words.clean(channel.name)}: {words.earlier(channel)}"
            lines.append(f"  {ids[channel.writer]} -.->|{_quote_text(label)}| {ids[reader]}")
            links += 1
    for loop in plan.loops:
        for reader in loop.readers:
            lines.append(f"  {ids[loop.writer]} -.->|{_quote_text(f'{words.clean(loop.name)}: {words.loop_terms(loop)}')}| {ids[reader]}")
            marked.append(links)
            links += 1
    if marked:
        lines.append(f"  linkStyle {','.join(map(str, marked))} stroke:{RED},color:{RED}")
    if red.nodes:
        lines += [
            f"  classDef critical stroke:{RED},stroke-width:2px",
            f"  class {','.join(sorted(ids[name] for name in red.nodes))} critical",
        ]
    return "\n".join(lines) + "\n"


def _pool_label(pool: PlannedPool | None) -> str:
    return words.HOST if pool is None else f"{words.clean(pool.name)}: {words.devices(pool)}, busy {pool.busy:.0%}"


def _node_label(node: PlannedNode) -> str:
    return f"{words.clean(node.name)} {words.node_time(node)}"


def _quote_text(text: str) -> str:
    """Quote a Mermaid string; quotes and possible markup become character codes."""
    plain = "".join(char if char.isalnum() or char in " _-.,:+~()=" else f"#{ord(char)};" for char in text)
    return f'"{plain}"' if plain.strip() else '" "'


def _yaml(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
