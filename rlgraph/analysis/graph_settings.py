"""The settings of a graph as text: models, nodes and feedback edges with the values that the user gave them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath

from rlgraph.graph.nodes import Graph, Pool
from rlgraph.plan.plan import Plan

PLAIN = (str, int, float, bool, type(None), Enum, PurePath)


def graph_settings(graph: Graph, plan: Plan) -> Mapping[str, Mapping[str, str]]:
    """Collect the settings of each model, node and feedback edge. Functions are given by name; data is left out."""
    found: dict[str, dict[str, str]] = {}
    for model in dict.fromkeys(node.model for node in graph.nodes if node.model is not None):
        used = [node.name for node in graph.nodes if node.model is model]
        planned = next((m for m in plan.models if m.name == plan.node(used[0]).model), None)
        dtype = {"dtype": f"{planned.dtype} ({planned.why})"} if planned is not None else {}
        found[f"{model.role} of {', '.join(used)}"] = {"pool": model.pool.name, **dict(_values(model)), **dtype}
    for feedback in graph.feedbacks:
        found[f"feedback {feedback.name}"] = {
            "depth": str(feedback.depth),
            "buffers": str(feedback.buffers),
            "latest": str(feedback.latest),
            "bucket_bytes": str(feedback.bucket_bytes),
            "checksum": str(feedback.checksum),
        }
    for edge in graph.earlier:
        found[f"feedback {edge.name}"] = {"depth": str(edge.depth), "columns": ", ".join(edge.columns)}
    for node in graph.nodes:
        found[f"node {node.name}"] = {"rows": str(node.rows), "work": node.traits.work, **dict(_values(node.operation))}
    return found


def _values(value: object) -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass with their values as text, nested fields by their path."""
    for field in fields(value) if is_dataclass(value) else ():
        inner = getattr(value, field.name)
        if isinstance(inner, PLAIN):
            yield field.name, str(inner)
        elif isinstance(inner, tuple | list | frozenset) and len(inner) <= 8 and all(isinstance(part, PLAIN) for part in inner):
            yield field.name, ", ".join(map(str, inner))
        elif isinstance(inner, Mapping) and inner and all(isinstance(part, PLAIN) for part in inner.values()):
            yield field.name, json.dumps(inner)
        elif isinstance(inner, Pool):
            yield field.name, inner.name
        elif callable(inner) and hasattr(inner, "__name__"):
            yield field.name, inner.__name__
        elif is_dataclass(inner) and "pool" not in {part.name for part in fields(inner)}:  # a model has its own entry
            nested = dict(_values(inner))
            yield field.name, type(inner).__name__
            yield from ((f"{field.name}.{name}", text) for name, text in nested.items())
