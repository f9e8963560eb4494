"""Tell whether a graph can resume a checkpoint: by its nodes, columns and depths, not by learning rates, pools or ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.engines.hf_models.model_files import revision_of
from rlgraph.errors import shown
from rlgraph.graph.nodes import Graph
from rlgraph.plan.plan import Plan


def fingerprint(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Collect, as plain values, what a checkpoint and the graph that resumes from it must have in common."""
    nodes = {n.name: {"work": n.work, "reads": list(n.reads), "writes": list(n.writes), "rows": n.rows} for n in plan.nodes}
    loops = {p.name: {"writer": p.writer, "readers": list(p.readers), "depth": p.depth, "freshest": p.latest} for p in plan.loops}
    loops |= {
        c.name: {"writer": c.writer, "readers": list(c.readers), "depth": c.credits // c.chunks - 1, "columns": list(c.columns)}
        for c in plan.channels
        if c.kind == "earlier"
    }
    found = {"name": graph.name, "nodes": nodes, "feedback": loops}
    named = ((plan.node(node.name).model, node.model.path) for node in graph.nodes if node.model is not None)
    revisions = {str(name): "@".join(revision) for name, path in named if (revision := revision_of(path)) is not None}
    return found | ({"revisions": revisions} if revisions else {})


def difference(saved: Any, now: Any, where: str = "") -> str:
    """Describe the first place at which two plain values differ; empty if they are equal."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*saved, *now)):
            place = f"{where} '{key}'".strip()
            if key not in saved or key not in now:
                return f"{place} is {'new' if key in now else 'missing now'}"
            if found := difference(saved[key], now[key], place):
                return found
        return ""
    if isinstance(saved, Sequence) and isinstance(now, Sequence) and not isinstance(saved, str):
        return "" if list(saved) == list(now) else f"{where} was {list(saved)} and is {list(now)}"
    return "" if saved == now else f"{where} was {shown(saved)} and is {shown(now)}"
