"""Find generators measured with one batch size: their seconds may come from decode steps, from sequences, or from the firing."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlgraph.costs.costs import Costs
from rlgraph.costs.functions import Decode, NodeCost, Setting
from rlgraph.graph.nodes import Graph

TERMS = ("step_s", "sequence_s", "prefill_s", "start_s")
CLOSE = 0.05  # bounds that differ by less need no words


def not_told_apart(graph: Graph, settings: Mapping[str, Setting], costs: Costs) -> Iterator[str]:
    """Say how far the seconds of a generator may be off if its fit has a single number and it runs with other rows an engine than
    were measured: the number may stand for decode steps, for sequences or for the firing."""
    rows = max(node.rows for node in graph.nodes)
    for node in graph.nodes:
        cost, setting = costs.cost_of(node.name), settings[node.name]
        found = [term for term in TERMS if cost.decode is not None and getattr(cost.decode, term)]
        if cost.measured is None or len(found) != 1 or costs.source != "measured":
            continue
        there, here = cost.measured, replace(cost.measured, rows=setting.rows, engines=setting.engines, devices=setting.devices)
        seconds = _mean(costs, cost, here, rows)
        bounds = [seconds]
        for term in TERMS:
            unit: dict[str, Any] = {term: 1.0}
            one = replace(cost, decode=Decode(**unit, doubling=cost.decode.doubling if cost.decode else None))
            at = _mean(costs, one, there, there.rows)
            if at:
                bounds.append(_mean(costs, one, here, rows) * _mean(costs, cost, there, there.rows) / at)
        if max(bounds) - min(bounds) > CLOSE * seconds:
            yield (
                f"'{node.name}' was measured on {there.rows / there.engines:.4g} responses an engine and is predicted on "
                f"{setting.rows / setting.engines:.4g}, but its firings did not tell decode steps from sequences: {seconds:.3g} s by "
                f"{found[0]} alone, {min(bounds):.3g} to {max(bounds):.3g} s if it stands for another; profile batches of two sizes"
            )


def _mean(costs: Costs, cost: NodeCost, setting: Setting, rows: int) -> float:
    """Predict the mean seconds of decoding alone, without spread."""
    bare = NodeCost(decode=cost.decode, measured=cost.measured)
    return replace(costs, nodes={**costs.nodes, "": bare}).mean("", setting, rows)
