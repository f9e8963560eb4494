"""Quantities, names and settings as text that people read."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlgraph.errors import escape_controls
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Due
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.plan import CostSource, Plan, PlannedAdapter, PlannedChannel, PlannedLoop, PlannedNode, PlannedPool
from rlgraph.values.pool import Pool

# Format quantities for people: seconds, bytes, devices and columns, and names made safe to print.

WAITS: Mapping[str, Callable[[str], str]] = {
    "data": lambda name: f"'{name}'",
    "slots": lambda name: f"a free slot in '{name}'",
    "loop": lambda name: f"the weights of '{name}'",
}
PAGE = 100  # columns of what is printed
HOST = "host"  # the lane of nodes that belong to no pool


class Terminal(Console):
    """A console of rich that prints text unchanged: without markup, and without escapes that the terminal obeys.

    It prints lines of text in a notebook too, where rich would make a box of HTML for each and ask for ipywidgets.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, **settings)
        if self.is_jupyter:
            super().__init__(markup=False, **settings, force_jupyter=False, force_terminal=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with control characters of texts escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)


def seconds(value: float, cost: CostSource = "measured") -> str:
    """Format a time to three digits, with a tilde if it was not measured."""
    mark = "~" if cost in ("nominal", "roofline", "estimated") else ""
    if value == 0:
        return f"{mark}0 s"
    if value < 0.0995:
        return f"{mark}{value * 1e3:.3g} ms"
    if value < 9.995:
        return f"{mark}{value:.2f} s"
    return f"{mark}{value:.1f} s" if value < 99.95 else f"{mark}{value:.0f} s"


def node_time(node: PlannedNode) -> str:
    """Format the time of a node in a step, with the number of chunks if there are several."""
    return (
        seconds(node.seconds, node.cost)
        + (f" in {node.chunks} parts" if node.chunks > 1 else "")
        + (f" / {node.due.every} steps" if node.due else "")
    )


def due(value: Due) -> str:
    """Name the steps at which an event happens that does not happen at every step."""
    last = "" if value.steps is None else f" and step {value.steps - 1}"
    return f"every {value.every} steps{last}{' and step 0' if value.at_start else ''}"


def by_chunks(count: int, chunks: int) -> str:
    """Format a count per step: `2 x 4` for 2 in each of 4 chunks."""
    return str(count) if chunks == 1 else f"{count // chunks} x {chunks}"


def size(count: int | None) -> str:
    """Format a number of bytes in binary units, "?" for None."""
    if count is None:
        return "?"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def with_count(count: int, noun: str) -> str:
    """Format a count with its noun, in the plural unless it is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def devices(pool: PlannedPool) -> str:
    """Format the devices of a pool: `2 GPUs`, `32 cores`."""
    return with_count(len(pool.gpus), "GPU") if pool.device == "gpu" else with_count(pool.cpus, "core")


def cluster(value: Cluster) -> str:
    """Format the devices of a cluster: `8 GPUs, 64 cores`."""
    hosts = f" of {value.hosts} hosts" if value.hosts > 1 and not value.gpus else ""
    cores = with_count(value.cpus, "core") + hosts
    return f"{with_count(value.gpus, 'GPU')}, {cores}" if value.gpus else cores


def elide(names: Sequence[str], shown: int = 2) -> str:
    """List the first names and the number of the rest: `a, b +2`."""
    rest = len(names) - shown
    return ", ".join(map(clean, names[:shown])) + (f" +{rest}" if rest > 0 else "")


def read_of(columns: Sequence[str], reads: Sequence[str]) -> list[str]:
    """Pick the columns of a channel that a node reads, under their own names or behind a prefix."""
    return [column for column in columns if column in {read.rpartition(".")[2] for read in reads}]


def loop_terms(loop: PlannedLoop) -> str:
    """Describe the depth, buffers and transport of a feedback edge, as the picture shows them."""
    if loop.due is not None:
        return f"{due(loop.due)}, {with_count(loop.buffers, 'buffer')}, {loop.transport}"
    return f"depth {loop.depth} (staleness at most {loop.depth}), {with_count(loop.buffers, 'buffer')}, {loop.transport}"


def adapter(planned: PlannedAdapter) -> str:
    """Describe an adapter that a feedback edge carries."""
    size = "" if planned.bytes is None else f" of {planned.bytes / 1e6:.2f} MB a version"
    return f"carries an adapter of rank {planned.rank}{size}, which its readers merge into the base they keep"


def earlier(channel: PlannedChannel) -> str:
    """Describe what an edge of columns carries, as the picture shows it."""
    return f"{elide(channel.columns)} of {with_count(channel.credits // channel.chunks, 'step')} before"


def costs(plan: Plan) -> str:
    """Name the costs of a plan by their source: "measured costs"."""
    return "placeholder costs" if plan.prediction.cost == "nominal" else f"{plan.prediction.cost} costs"


def prediction(plan: Plan) -> str:
    """Format the predicted step time, with the source of its costs if they were not measured on this plan."""
    said = f"predicted step {seconds(plan.prediction.step_s, plan.prediction.cost)}"
    if plan.prediction.cost == "nominal":
        return f"{said} (placeholder costs: compare plans with them, do not read them as seconds)"
    if plan.prediction.cost == "roofline":
        return f"{said} (estimated from model shapes and devices: nothing was measured)"
    scaled = [clean(node.name) for node in plan.nodes if node.cost == "scaled"]
    scaled += [f"sleep and wake of {clean(sleep.model)}" for sleep in plan.sleeps if sleep.cost == "scaled"]
    estimated = [f"sleep and wake of {clean(sleep.model)}" for sleep in plan.sleeps if sleep.cost == "estimated" and sleep.bytes != 0]
    parts = {"scaled to this plan": scaled, "estimated": estimated}
    told = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)
    return f"{said} ({told})" if told else said


def clean(name: str) -> str:
    """Put a name on one line and replace control characters and lone surrogates, which XML and terminals do not allow."""
    return "".join(" " if char in "\t\n\r" else char if _printable(char) else "\ufffd" for char in name)


def _printable(char: str) -> bool:
    code = ord(char)
    return not (code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in (0xFFFE, 0xFFFF, 0x2028, 0x2029))


# The settings of a graph as text: models, nodes and feedback edges with the values that the user gave them.

PLAIN = (str, int, float, bool, type(None), Enum, PurePath)


def graph_settings(graph: Graph, plan: Plan) -> Mapping[str, Mapping[str, str]]:
    """Collect the settings of each model, node and feedback edge. Functions appear by name; data is left out."""
    found: dict[str, dict[str, str]] = {}
    for model in graph.models:
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
