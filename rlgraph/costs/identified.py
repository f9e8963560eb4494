"""Generators measured with one batch size: their seconds may come from decode steps, from sequences, or from the firing.

Where the device and the model's shape are known, the roofline tells how much comes from what; elsewhere the plan says how far the
prediction may be off.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlgraph.costs.costs import Costs
from rlgraph.costs.estimates import Device
from rlgraph.costs.functions import Decode, NodeCost, Setting
from rlgraph.costs.model_shapes import Shapes
from rlgraph.costs.roofline import decode_estimate, with_limits
from rlgraph.graph.nodes import Graph

TERMS = ("step_s", "sequence_s", "prefill_s", "start_s")
CLOSE = 0.05  # bounds that differ by less need no words


def with_decode_terms(graph: Graph, costs: Costs, device: Device | None, shapes: Shapes) -> Costs:
    """Divide the seconds of a generator into those of decode steps and of sequences as the roofline of its device does, where all
    responses that it was measured with had one length, and so one number stands for both. The lengths become those of this graph."""
    here = with_limits(graph, costs)
    if device is None or costs.lengths is None or costs.source != "measured" or not 0 < costs.lengths.longest == costs.lengths.tokens[0]:
        return here
    assert here.lengths is not None
    found = dict(costs.nodes)
    for node in graph.nodes:
        cost = costs.cost_of(node.name)
        there = cost.measured
        if node.traits.work != "generate" or node.model is None or node.model.path not in shapes or there is None or not _single(cost):
            continue
        law, then = (decode_estimate(node, device, shapes[node.model.path], lengths) for lengths in (here.lengths, costs.lengths))
        alone = replace(cost, decode=then, measured=replace(there, devices=there.engines))
        scale = _mean(costs, cost, there, there.rows) / _mean(costs, alone, there, there.rows)
        seconds = asdict(law)
        parts = {term: scale * seconds[term] for term in (*TERMS, "host_step_s", "host_sequence_s")}
        kept = cost.decode.doubling if cost.decode else None
        found[node.name] = replace(alone, decode=replace(law, **parts, doubling=kept, divided=True))
    return replace(here, nodes=found)


def _single(cost: NodeCost) -> bool:
    """Whether the fit of a generator has a single number."""
    return cost.decode is not None and len(_terms(cost.decode)) == 1


def _terms(decode: Decode) -> Sequence[str]:
    found = asdict(decode)
    return [term for term in TERMS if found[term]]


def not_told_apart(graph: Graph, settings: Mapping[str, Setting], costs: Costs) -> Iterator[str]:
    """Say how far the seconds of a generator may be off if its fit has a single number and it runs with other rows an engine than
    were measured: the number may stand for decode steps, for sequences or for the firing."""
    rows = max(node.rows for node in graph.nodes)
    for node in graph.nodes:
        cost, setting = costs.cost_of(node.name), settings[node.name]
        there, decode = cost.measured, cost.decode
        if there is None or decode is None or costs.source != "measured":
            continue
        if decode.divided and there.rows / there.engines != setting.rows / setting.engines:
            yield (
                f"'{node.name}' was measured with responses of one length, {there.rows} an engine, and its seconds are divided into decode "
                "steps and sequences as the roofline does; profile batches of two sizes"
            )
        if not _single(cost):
            continue
        here = replace(there, rows=setting.rows, engines=setting.engines, devices=setting.devices)
        seconds = _mean(costs, cost, here, rows)
        bounds = [seconds]
        for term in TERMS:
            unit: dict[str, Any] = {term: 1.0}
            one = replace(cost, decode=Decode(**unit, doubling=decode.doubling))
            at = _mean(costs, one, there, there.rows)
            if at:
                bounds.append(_mean(costs, one, here, rows) * _mean(costs, cost, there, there.rows) / at)
        if max(bounds) - min(bounds) > CLOSE * seconds:
            yield (
                f"'{node.name}' was measured on {there.rows / there.engines:.4g} responses an engine and is predicted on "
                f"{setting.rows / setting.engines:.4g}, but its firings did not tell decode steps from sequences: {seconds:.3g} s by "
                f"{_terms(decode)[0]} alone, "
                f"{min(bounds):.3g} to {max(bounds):.3g} s if it stands for another; profile batches of two sizes"
            )


def _mean(costs: Costs, cost: NodeCost, setting: Setting, rows: int) -> float:
    """Predict the mean seconds of decoding alone, without spread."""
    bare = NodeCost(decode=cost.decode, measured=cost.measured)
    return replace(costs, nodes={**costs.nodes, "": bare}).mean("", setting, rows)
