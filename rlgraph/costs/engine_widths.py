"""The speed-up of wider engines: fitted where runs had engines of two widths, else assumed and reported with bounds."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from rlgraph.costs.costs import Costs
from rlgraph.costs.functions import DOUBLING, Decode, NodeCost, Setting
from rlgraph.costs.lengths import Array
from rlgraph.graph.nodes import Graph

NONE = 0.5  # kept of the ideal speed-up by a doubling that makes nothing faster
LEAST = 0.05  # kept at least, however much slower wider engines were
CLOSE = 0.01  # bounds that differ by less need no words


def doubling(wider: Array, ideal_s: Array, seconds: Array) -> float | None:
    """Fit the share of the ideal speed-up that each doubling keeps; None if no engine was of another width.

    `wider` are the widths over the measured one, `ideal_s` the seconds of each firing with an ideal speed-up.

    >>> doubling(np.array([2.0, 2.0]), np.array([1.0, 3.0]), np.array([1.25, 3.75]))
    0.8
    """
    doublings = np.log2(wider)
    if not doublings.any() or (ideal_s <= 0).any() or (seconds <= 0).any():
        return None
    kept = 2 ** float(np.median(np.log2(ideal_s / seconds)[doublings != 0] / doublings[doublings != 0]))
    return float(f"{min(max(kept, LEAST), 1.0):.6g}")


def assumed(graph: Graph, settings: Mapping[str, Setting], costs: Costs, devices: str) -> Iterator[str]:
    """Say for each model on engines of an unmeasured width what its seconds assume, with bounds.

    `devices` is the word for them, "cores" or "GPUs".
    """
    rows = max(node.rows for node in graph.nodes)
    for node in (node for node in graph.nodes if node.model is not None):
        cost, setting = costs.cost_of(node.name), settings[node.name]
        if cost.measured is None or cost.measured.width == setting.width or (cost.decode is not None and cost.decode.doubling is not None):
            continue
        kept = DOUBLING if cost.decode is not None else 1.0
        seconds, *bounds = (_mean(costs, cost, setting, share, rows) for share in (kept, NONE, 1.0))
        if max(bounds) - min(bounds) > CLOSE * seconds:
            yield (
                f"'{node.name}' was measured on {cost.measured.width:.3g} {devices} an engine and is predicted on {setting.width:.3g}: "
                f"{seconds:.3g} s if each doubling keeps {kept:.2g} of the ideal speed-up, {bounds[0]:.3g} s if it keeps nothing, "
                f"{bounds[1]:.3g} s if it keeps all; profile engines of this width, or of both"
            )


def _mean(costs: Costs, cost: NodeCost, setting: Setting, kept: float, rows: int) -> float:
    """Predict mean seconds if a doubling of the width keeps the share `kept` of the ideal speed-up."""
    if cost.decode is not None:
        cost = replace(cost, decode=replace(cost.decode, doubling=kept))
    elif kept == NONE and cost.measured is not None:
        setting = replace(setting, devices=max(round(setting.engines * cost.measured.width), 1))
    return replace(costs, nodes={**costs.nodes, "": cost}).mean("", setting, rows)


def with_doubling(decode: Decode, wider: Array, measured: Array, seconds: Array) -> Decode:
    """Add the speed-up of firings on engines of other widths, if there are any; `measured` are the seconds at its own width."""
    return replace(decode, doubling=doubling(wider, measured / wider, seconds))
