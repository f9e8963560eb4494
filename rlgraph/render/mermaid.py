"""A plan as Mermaid text: a subgraph for each pool, an arrow for each channel and reader, dotted arrows for feedback edges."""

from rlgraph.analysis import words
from rlgraph.analysis.critical import critical
from rlgraph.plan.plan import Plan, PlannedNode, PlannedPool
from rlgraph.render.plan_svg.layout import drawn_channels

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
            lines.append(f"  subgraph p{index}[{_quoted(_pool_label(pool))}]")
            lines += [f"    {ids[node.name]}[{_quoted(_node_label(node))}]" for node in members]
            lines.append("  end")
    marked = []
    links = 0
    for channel in drawn_channels(plan):
        for reader in channel.readers:
            columns = words.elided(words.read_of(channel.columns, plan.node(reader).reads))
            lines.append(f"  {ids[channel.writer]} -->|{_quoted(columns)}| {ids[reader]}")
            marked += [links] if (channel.writer, reader) in red.edges else []
            links += 1
    for channel in (channel for channel in plan.channels if channel.kind == "earlier"):
        for reader in channel.readers:
            label = f"{words.clean(channel.name)}: {words.earlier(channel)}"
            lines.append(f"  {ids[channel.writer]} -.->|{_quoted(label)}| {ids[reader]}")
            links += 1
    for loop in plan.loops:
        for reader in loop.readers:
            lines.append(f"  {ids[loop.writer]} -.->|{_quoted(f'{words.clean(loop.name)}: {words.loop_terms(loop)}')}| {ids[reader]}")
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
    return f"{words.clean(node.name)} {words.firing(node)}"


def _quoted(text: str) -> str:
    """Quote a Mermaid string; quotes and possible markup become character codes."""
    plain = "".join(char if char.isalnum() or char in " _-.,:+~()=" else f"#{ord(char)};" for char in text)
    return f'"{plain}"' if plain.strip() else '" "'


def _yaml(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
