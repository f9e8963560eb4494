"""Predictions beyond what was measured: other engine widths, batch sizes and settings of `recompute`, each with its bounds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlgraph.graph.nodes import Graph, Node
from rlgraph.plan import estimates
from rlgraph.plan.cost_functions import DOUBLING, Decode, NodeCost, Setting
from rlgraph.plan.costs import Costs
from rlgraph.plan.estimates import Device
from rlgraph.plan.lengths import Array
from rlgraph.plan.model_shapes import Shapes, adapter_size
from rlgraph.plan.roofline import decode_estimate, operations, with_limits

# The speed-up of wider engines: fitted where runs had engines of two widths, else assumed and reported with bounds.

NONE = 0.5  # kept of the ideal speed-up by a doubling that makes nothing faster
LEAST = 0.05  # kept at least, however much slower wider engines were
CLOSE_WIDTHS = 0.01  # bounds that differ by less need no words


def fit_doubling(wider: Array, ideal_s: Array, seconds: Array) -> float | None:
    """Fit the share of the ideal speed-up that each doubling keeps; None if no engine was of another width.

    `wider` are the widths over the measured one, `ideal_s` the seconds of each firing with an ideal speed-up.

    >>> fit_doubling(np.array([2.0, 2.0]), np.array([1.0, 3.0]), np.array([1.25, 3.75]))
    0.8
    """
    doublings = np.log2(wider)
    if not doublings.any() or (ideal_s <= 0).any() or (seconds <= 0).any():
        return None
    kept = 2 ** float(np.median(np.log2(ideal_s / seconds)[doublings != 0] / doublings[doublings != 0]))
    return float(f"{min(max(kept, LEAST), 1.0):.6g}")


def width_assumptions(graph: Graph, settings: Mapping[str, Setting], costs: Costs, devices: str) -> Iterator[str]:
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
        if max(bounds) - min(bounds) > CLOSE_WIDTHS * seconds:
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
    return replace(decode, doubling=fit_doubling(wider, measured / wider, seconds))


# Generators measured with one batch size: their seconds may come from decode steps, from sequences, or from the firing.
#
# Where the device and the model's shape are known, the roofline tells how much comes from what; elsewhere the plan says how far the
# prediction may be off.

TERMS = ("step_s", "sequence_s", "prefill_s", "start_s")
CLOSE_TERMS = 0.05  # bounds that differ by less need no words


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
        scale = _decode_mean(costs, cost, there, there.rows) / _decode_mean(costs, alone, there, there.rows)
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


def single_number_caveats(graph: Graph, settings: Mapping[str, Setting], costs: Costs) -> Iterator[str]:
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
        seconds = _decode_mean(costs, cost, here, rows)
        bounds = [seconds]
        for term in TERMS:
            unit: dict[str, Any] = {term: 1.0}
            one = replace(cost, decode=Decode(**unit, doubling=decode.doubling))
            at = _decode_mean(costs, one, there, there.rows)
            if at:
                bounds.append(_decode_mean(costs, one, here, rows) * _decode_mean(costs, cost, there, there.rows) / at)
        if max(bounds) - min(bounds) > CLOSE_TERMS * seconds:
            yield (
                f"'{node.name}' was measured on {there.rows / there.engines:.4g} responses an engine and is predicted on "
                f"{setting.rows / setting.engines:.4g}, but its firings did not tell decode steps from sequences: {seconds:.3g} s by "
                f"{_terms(decode)[0]} alone, "
                f"{min(bounds):.3g} to {max(bounds):.3g} s if it stands for another; profile batches of two sizes"
            )


def _decode_mean(costs: Costs, cost: NodeCost, setting: Setting, rows: int) -> float:
    """Predict the mean seconds of decoding alone, without spread."""
    bare = NodeCost(decode=cost.decode, measured=cost.measured)
    return replace(costs, nodes={**costs.nodes, "": bare}).mean("", setting, rows)


# Take measured costs of trainers to other settings of `recompute`: by the operations of a token, and what the host launches.


def with_recompute(graph: Graph, costs: Costs, shapes: Shapes) -> Costs:
    """Scale the seconds of updates that were measured with another `recompute` than the graph's, where that and the shape are known.

    Tokens take longer by the operations that are computed again. A pass takes the host longer as `host_times.launch_s` says; where ranks
    gather shards that was not seen.
    """
    nodes = dict(costs.nodes)
    for node in graph.nodes:
        cost, model = costs.nodes.get(node.name), node.model
        shape = shapes.get(model.path) if model is not None else None
        if model is None or shape is None or costs.lengths is None or not isinstance(cost, NodeCost) or not _otherwise(node, cost):
            continue
        then = replace(model.traits, recompute=cost.measured.passes.recompute)  # type: ignore[union-attr,arg-type]  # as `_otherwise` says
        adapter = adapter_size(model, shape)
        now_and_then = [operations(traits, shape, costs.lengths, adapter, trains=True) for traits in (model.traits, then)]
        launches = [estimates.launch_s(shape, traits) for traits in (model.traits, then)]
        nodes[node.name] = replace(
            cost,
            token_s=cost.token_s * now_and_then[0] / now_and_then[1],
            pass_s=cost.pass_s * launches[0] / launches[1],
        )
    return replace(costs, nodes=nodes)


def _otherwise(node: Node, cost: NodeCost) -> bool:
    if node.traits.work != "train" or node.model is None or cost.measured is None or cost.measured.passes is None:
        return False
    return cost.measured.passes.recompute not in (None, node.model.traits.recompute)


def assumed_recompute(graph: Graph, settings: Mapping[str, Setting], costs: Costs) -> tuple[str, ...]:
    """Name the updates that were measured with another `recompute`."""
    found = []
    for node in graph.nodes:
        cost = costs.nodes.get(node.name)
        if isinstance(cost, NodeCost) and cost.token_s and _otherwise(node, cost) and cost.recomputes_otherwise(settings[node.name]):
            then = cost.measured.passes.recompute  # type: ignore[union-attr]  # as `_otherwise` says
            found.append(
                f"'{node.name}' was measured with recompute={then!r}: its seconds are scaled by the operations of the model's shape"
            )
    return tuple(found)
