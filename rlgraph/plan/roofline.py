"""Estimate costs that no run has measured.

The roofline of the device and a table of host times yield costs from model shapes. Measured costs are extended to other engine widths,
batch sizes and settings of `recompute`, each with its bounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlgraph.batching import cutting
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Node
from rlgraph.graph.traits import ModelTraits
from rlgraph.plan import estimates
from rlgraph.plan.cluster import Cluster, itemsize_of
from rlgraph.plan.cost_functions import DOUBLING, Decode, NodeCost, Setting, Shards, SleepCost, group_of, passes_of
from rlgraph.plan.costs import FORWARD, NOMINAL, Costs, check_costs, epochs_of, walks_of
from rlgraph.plan.estimates import DECODING, GENERATING, ITEMSIZE, LINKED, PREFILL, Device, default_estimates, exchange_s
from rlgraph.plan.events import readers
from rlgraph.plan.lengths import Array, Lengths
from rlgraph.plan.model_shapes import (
    GRADIENT,
    MASTER,
    MOMENTS,
    OPTIMIZER,
    AdapterSize,
    ModelShape,
    Shapes,
    adapter_size,
    generators_tower,
    has_shapes,
    recomputed_operations,
    tower_of,
    trained_tower,
)
from rlgraph.plan.placement import model_names

# What a pass of sharded ranks costs a GPU beside its products: shards are gathered, and gradients reduced to shards.
#
# FSDP2 gathers the parameters of a unit in the dtype of passes, forward and again backward (layers that compute again do so with those
# gathered for the backward pass), and reduces gradients in float32. Beside what passes the link each collective copies: shards are cast and
# put side by side, gathered ones are taken apart, gradients are cast and put in the order of ranks, and added up.
#
# Nothing of it counts as hidden. Most of it runs beside products, but takes memory traffic and processors from them. In a profile of
# 4B on two H200s ranks waited for collectives for 4.5 % of an update only, and the update took 0.41 s longer than half of one rank's. This
# counts 0.37 s.

# Bytes of memory traffic for each parameter, read and written. Of all that is gathered: taken apart.
APART = 2 * ITEMSIZE
# Of a rank's own shard at a gather: cast to the dtype of passes, then copied to its place among the others.
PLACED = MASTER + ITEMSIZE + 2 * ITEMSIZE
# Of all gradients: read in the dtype of passes, and written in float32 in the order of ranks. Of a rank's own: added to those of passes.
ORDERED, ADDED = ITEMSIZE + GRADIENT, 3 * GRADIENT


def shards_of(node: Node, shape: ModelShape, device: Device, *, idle_alone: bool = False) -> tuple[Shards, ...]:
    """Estimate the seconds of a node's passes in which ranks gather and reduce shards: those of experts, and those of the rest.

    Ranks that share matrices or experts have no shards of each other's. With `idle_alone` only the experts that a token does not take
    count. Nothing where the engine `gathers_shards` of none.
    """
    model = node.model
    if model is None or not gathers(node):
        return ()
    tensor, expert = model.traits.tensor_parallel, model.traits.expert_parallel
    experts, rest = shape.expert_parameters, shape.parameters - shape.expert_parameters
    if idle_alone:
        experts, rest = experts * (shape.experts - shape.experts_used) // shape.experts, 0
    adapter = adapter_size(model, shape)
    learnt = 1.0 if adapter is None else adapter.parameters / shape.parameters
    parts = ((rest / tensor, tensor), (experts / expert, expert))  # ranks that share matrices cut no expert
    return tuple(_shards(node, parameters, learnt, device, apart) for parameters, apart in parts if parameters)


def gathers(node: Node) -> bool:
    """Whether ranks of a node's model gather its shards in each pass."""
    estimates = node.model.traits.estimates if node.model is not None else None
    return (estimates or default_estimates({node.traits.work})).gathers_shards


def _shards(node: Node, parameters: float, learnt: float, device: Device, apart: int) -> Shards:
    """Sum the gathers of a pass forwards and backwards and the reduction, or the gather of a pass that only scores."""
    trains = node.traits.work == "train"
    gathers = epochs_of(node) * ((2 if trains else 1) + node.traits.scored)
    reduces = epochs_of(node) * learnt * trains
    read, link = device.bandwidth * DECODING / parameters, device.peer_link * LINKED / parameters
    return Shards(
        whole_s=(gathers * APART + reduces * ORDERED) / read,
        own_s=(gathers * PLACED + reduces * ADDED) / read,
        sent_s=(gathers * ITEMSIZE + reduces * GRADIENT) / link,
        apart=apart,
    )


GB = 10**9
PCIE_4, PCIE_5 = 31.5e9, 63e9  # bytes per second, one way, of 16 lanes: 16 and 32 GT/s each, 128 bits sent as 130
DEVICES: Mapping[str, Device] = {
    "A100": Device(312e12, 2.039e12, 80 * GB, PCIE_4, 300e9),
    "H100": Device(989e12, 3.35e12, 80 * GB, PCIE_5, 450e9),
    "H200": Device(989e12, 4.8e12, 141 * GB, PCIE_5, 450e9),
    "H20": Device(148e12, 4.0e12, 96 * GB, PCIE_5, 450e9),
    "L40S": Device(362e12, 0.864e12, 48 * GB, PCIE_4, PCIE_4),
    "B200": Device(2250e12, 8.0e12, 180 * GB, PCIE_5, 900e9),
}
TRAINING = 0.4  # share of these peaks that well-tuned trainers reach; an assumption, which a profile replaces
LINK = 25e9  # bytes per second at which a version reaches a generator
# Assumed lengths: the quantiles of a long-tailed task, as shares of the most tokens that are allowed.
SHARES = ((0.0, 0.5, 0.9, 0.99, 1.0), (0.02, 0.2, 0.6, 0.95, 1.0))
PROMPT_TOKENS = 256.0  # where the data set's prompts are not text
CHARACTERS = 3.0  # of a token, cautiously: prose has 4, sums have 1
CUT_OFF = 0.05  # share of responses that are as long as the longest, from which on a limit cut them off
OPTIMIZER_BYTES = 36  # of traffic for each parameter of an update: gradients summed and cleared, weights and moments read and written


def device_of(name: str) -> Device | None:
    """Find the device whose name is a word of `name`, as "H100" of "NVIDIA H100 80GB HBM3"."""
    return next((device for key, device in DEVICES.items() if key in name.upper().replace("-", " ").split()), None)


def roofline(graph: Graph, device: Device, shapes: Shapes) -> Costs:
    """Estimate the costs of a graph whose models' shapes are all known.

    A token takes 2 operations per parameter forwards and 6 in training (Kaplan et al., 2020, section 2.1), 2 more where layers are
    recomputed, those of gate and up where a part of them is, and 2 less of frozen ones; decoding is by the `decode_law` of the
    generator's engine. The host's time for each decode step, sequence and pass, and what logits take, are those of `host_times`.
    """
    lengths = _lengths(graph)
    towers = _towers_s(graph, device)
    nodes = {node.name: _cost(node, device, shapes, lengths, towers.get(node.name, 0.0)) for node in graph.nodes}
    sources = [f.source.node.model for f in graph.feedbacks if f.source and f.source.node.model]
    moved, written = map(max, zip((0.0, 0.0), *(_version_traffic(graph, model, shapes) for model in sources), strict=True))
    return Costs(
        nodes,
        publish_s=moved / device.bandwidth * 2,
        receive_s=moved / LINK,
        swap_s=written / device.bandwidth,
        source="roofline",
        lengths=lengths,
        publish_bytes=int(moved),
        on=f"the roofline of {device.flops / 1e12:.0f} TFLOP/s and {device.bandwidth / 1e12:.2f} TB/s",
    )


def _towers_s(graph: Graph, device: Device) -> dict[str, float]:
    """Estimate the GPU's seconds in which towers make features of the images of a step, by node.

    Each prompt is read once, also where several responses have it, and by the first node of a trained model, whose workers keep features.
    A tower that is trained keeps none, and an update computes three times as much, and again what `recompute` says.
    """
    found: dict[str, float] = {}
    for node in graph.nodes:
        tower, generates = tower_of(node), node.traits.work == "generate"
        traits = node.model.traits if node.model is not None else ModelTraits()
        learns = traits.train_vision
        if tower is not None and (generates or learns or not any(graph.node(name).model is node.model for name in found)):
            work = tower.operations
            if learns and node.traits.work == "train":
                work = epochs_of(node) * (3 * work + tower.repeated_work(traits.recompute))
            found[node.name] = work * node.rows / group_of(node) / (device.flops * (PREFILL if generates else TRAINING))
    return found


def _version_traffic(graph: Graph, model: Model, shapes: Shapes) -> tuple[float, float]:
    """Count the bytes of a version that a model publishes: of an adapter as it is trained, of whole weights in bfloat16. And the memory
    traffic of that version in an engine: all weights are copied, or matrices are merged with those of an adapter."""
    adapter = adapter_size(model, shapes[model.path])
    if adapter is not None:
        return float(adapter.bytes), estimates.MERGED_BYTES.value * adapter.matrices
    whole = shapes[model.path].parameters + trained_tower(graph, model)
    return 2.0 * whole, 4.0 * whole


def with_sleep(graph: Graph, costs: Costs, cluster: Cluster, device: Device | None, shapes: Shapes) -> Costs:
    """Add estimates of the sleep costs that are missing, marked as estimated.

    An estimate is the time in which the bytes pass the link between device and host: the weights of a generator, the moments of a
    model that is trained. A model of unknown shape counts as large as the published version, if that is known.
    """
    named = model_names(graph).items()
    missing = {name: model for name, model in named if name not in costs.sleep or (_stays(model) and costs.sleep[name].bytes)}
    found = {name: _sleep(graph, model, costs, cluster, device, shapes) for name, model in missing.items()}
    return replace(costs, sleep={**costs.sleep, **found})


def _sleep(graph: Graph, model: Model, costs: Costs, cluster: Cluster, device: Device | None, shapes: Shapes) -> SleepCost:
    works = {node.traits.work for node in graph.nodes if node.model is model}
    published = min((itemsize_of(node.model, cluster) for f in graph.feedbacks for node in readers(graph, f)), default=2)
    adapter = adapter_size(model, shapes.get(model.path))
    count = shapes[model.path].parameters if model.path in shapes else (costs.publish_bytes or 0) // published
    count = (count if adapter is None else adapter.parameters) + generators_tower(graph, model)
    # What only scores keeps its memory in most engines.
    sleeps = (works & {"generate", "train"} or model.traits.frees_memory) and not _stays(model)
    size = (model.traits.estimates or default_estimates(works)).sleep_bytes(count, itemsize_of(model, cluster)) if sleeps else 0
    size = int(size * MOMENTS[model.traits.optimizer.moments] / OPTIMIZER)
    size = int(size * _in_fp8(shapes[model.path])) if model.traits.weights_dtype is not None and model.path in shapes else size
    seconds = size / (estimates.COPYING.value * (device.host_link if device else PCIE_4))
    return SleepCost(seconds, seconds, size if count else None, Setting(), estimated=True)


def _stays(model: Model) -> bool:
    """Whether a trainer's moments stay where they are: on the host already, or on the GPU for good."""
    return model.traits.host_moments or model.traits.moments_stay


def _lengths(graph: Graph) -> Lengths:
    """Assume lengths: `max_tokens` for all if nothing ends a response sooner, else a long tail up to it."""
    most, always = _limit(graph)
    characters = [c for node in graph.nodes if (c := node.operation.prompt_characters) is not None]
    prompt = max(characters) / CHARACTERS if characters else PROMPT_TOKENS
    prompt += max((tower.tokens for node in graph.nodes if node.due is None and (tower := tower_of(node)) is not None), default=0.0)
    if most is None and characters:  # examples and pairs: all that they are is given, and nothing is sampled
        return Lengths((0.0, 1.0), (1.0, 1.0), max(prompt - 1, 1.0))
    most = most or 1024.0
    if always:
        return Lengths((0.0, 1.0), (most, most), prompt)
    return Lengths(SHARES[0], tuple(share * most for share in SHARES[1]), prompt)


def _limit(graph: Graph) -> tuple[float | None, bool]:
    """The most tokens of a response that the graph samples, and whether every response has as many."""
    samplings = [node.model.traits.sampling for node in graph.nodes if node.model is not None and node.traits.work == "generate"]
    longest = max((s for s in samplings if s is not None), key=lambda s: s.max_tokens, default=None)
    return (float(longest.max_tokens), longest.ignore_eos and not (longest.stop_token_ids or longest.stop)) if longest else (None, False)


def with_limits(graph: Graph, costs: Costs) -> Costs:
    """Bound measured lengths by the most tokens that this graph samples: they may be those of another graph's responses."""
    most, always = _limit(graph)
    if costs.lengths is None or most is None:
        return costs
    tokens = tuple(most if always else min(each, most) for each in costs.lengths.tokens)
    return costs if tokens == costs.lengths.tokens else replace(costs, lengths=replace(costs.lengths, tokens=tokens))


def _assumed_lengths(graph: Graph, costs: Costs) -> Iterator[str]:
    """Say where many measured responses are as long as the longest, as those that a limit cut off, and this graph lets them go on."""
    most, _ = _limit(graph)
    lengths = costs.lengths
    if most is None or lengths is None or costs.source != "measured" or lengths.longest >= most:
        return
    first = lengths.at[lengths.tokens.index(lengths.longest)]
    if 0 < first <= 1 - CUT_OFF:
        yield (
            f"{1 - first:.0%} of the measured responses have {lengths.longest:.0f} tokens, which was probably their limit; here it is "
            f"{most:.0f}, and how long they become is not counted; profile with that max_tokens"
        )


def decode_estimate(node: Node, device: Device, shape: ModelShape, lengths: Lengths) -> Decode:
    """Estimate what a decode step of a generator takes, by the law of its engine."""
    assert node.model is not None
    traits = node.model.traits
    law = (traits.estimates or GENERATING).decode_law(shape, device, lengths.prompt_tokens + lengths.mean / 2)
    if traits.weights_dtype is not None:  # a step reads the weights as they are kept
        law = replace(law, step_s=law.step_s * _in_fp8(shape))
    return replace(law, sequence_s=law.sequence_s * traits.kv_itemsize / 2) if traits.kv_itemsize is not None else law


def _cost(node: Node, device: Device, shapes: Shapes, lengths: Lengths, tower_s: float) -> float | NodeCost:
    if node.model is None:
        return NOMINAL["host"].serial_s
    shape: ModelShape = shapes[node.model.path]
    if node.traits.work == "generate":
        return NodeCost(parallel_s=tower_s, decode=decode_estimate(node, device, shape, lengths), measured=Setting(1, 1, node.rows))
    trains = node.traits.work == "train"
    walks = walks_of(node) * (1.0 if trains else FORWARD)
    traits = node.model.traits
    compiled = trains and traits.compiled
    exchange = traits.ranks_per_pass * exchange_s(shape, device, traits, trains=trains)
    return NodeCost(
        parallel_s=tower_s + (epochs_of(node) * _optimizer_s(node.model, shape, device) if trains else 0.0),
        token_s=walks * _token_s(node, traits, shape, lengths, device) + walks_of(node) * exchange,
        pass_s=walks * estimates.launch_s(shape, traits, trains=trains),
        sharded_pass_s=walks * estimates.launch_s(shape, traits, trains=trains, sharded=gathers(node)),
        shards=shards_of(node, shape, device, idle_alone=not compiled),  # `TRAINING` is of ranks that gather, the other of one rank
    )


def _in_fp8(shape: ModelShape) -> float:
    """The bytes of a model whose layers are in fp8, over those in bfloat16."""
    return shape.weight_bytes(2, fp8=True) / shape.weight_bytes(2)


def _token_s(node: Node, traits: ModelTraits, shape: ModelShape, lengths: Lengths, device: Device) -> float:
    """Estimate the GPU's seconds per token forwards and backwards: of compiled layers by kinds of kernels, of others by one share."""
    assert node.model is not None
    trains = node.traits.work == "train"
    compiled, keys = trains and traits.compiled, lengths.sequence_of_a_token / 2
    logit = estimates.FUSED_LOGIT_BYTES if compiled or (trains and traits.fused_head) else estimates.LOGIT_BYTES
    moved, of_products, of_attention = logit.value * shape.vocab, TRAINING, TRAINING
    if compiled:
        moved += estimates.COMPILED_BYTES.value * shape.layers * shape.layer_widths * (1 + FORWARD * (traits.recompute is True))
        of_products, of_attention = estimates.PRODUCTS.value, estimates.ATTENTION.value
        passes, shares = passes_of(node, 1), lengths.mean <= cutting.LONGEST * lengths.prompt_tokens
        if passes is not None and passes.group > 1 and shares:  # one call for keys of the response, another for keys of the prompt
            keys += max(lengths.prompt_tokens, estimates.SHARED_KEYS.value) - lengths.prompt_tokens / 2
    products, attention = operations(traits, shape, keys, adapter_size(node.model, shape), trains=trains)
    return (products / of_products + attention / of_attention) / device.flops + moved / (device.bandwidth * DECODING)


def operations(
    traits: ModelTraits, shape: ModelShape, keys: float, adapter: AdapterSize | None = None, *, trains: bool
) -> tuple[float, float]:
    """Count the operations per token forwards and backwards, in products with weights and in attention to so many keys.

    Frozen weights have no gradient, and recomputing is a second forward pass. A token attends to half of its sequence, and the tokens of a
    long sequence are many (Chowdhery et al. 2022, "PaLM", appendix B).
    """
    adapter = adapter if trains else None
    products = 6 * shape.active_parameters if adapter is None else 4 * shape.active_parameters + 6 * adapter.parameters
    again = recomputed_operations(shape, traits.recompute, traits.tensor_parallel) if trains else 0
    return products + again, 4 * shape.layers * shape.heads * shape.head_dim * keys * (3 + (trains and traits.recompute is True))


def _optimizer_s(model: Model, shape: ModelShape, device: Device) -> float:
    """The seconds of an optimizer step: its traffic of memory, and that of moments in host memory, which come and go."""
    adapter = adapter_size(model, shape)
    learnt = shape.parameters if adapter is None else adapter.parameters
    moved = 2 * MOMENTS[model.traits.optimizer.moments] * learnt if model.traits.host_moments else 0
    return OPTIMIZER_BYTES * learnt / (device.bandwidth * DECODING) + moved / (estimates.MOMENTS_COPYING.value * device.host_link)


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


def _width_assumptions(graph: Graph, settings: Mapping[str, Setting], costs: Costs, devices: str) -> Iterator[str]:
    """Say for each model on engines of an unmeasured width what its seconds assume, with bounds.

    `devices` is the word for them, "cores" or "GPUs".
    """
    for node in (node for node in graph.nodes if node.model is not None):
        cost, setting = costs.cost_of(node.name), settings[node.name]
        if cost.measured is None or cost.measured.width == setting.width or (cost.decode is not None and cost.decode.doubling is not None):
            continue
        kept = DOUBLING if cost.decode is not None else 1.0
        seconds, *bounds = (_mean(costs, cost, setting, share, graph.rows) for share in (kept, NONE, 1.0))
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


def _single_number_caveats(graph: Graph, settings: Mapping[str, Setting], costs: Costs) -> Iterator[str]:
    """Say how far the seconds of a generator may be off if its fit has a single number and it runs with other rows per engine than
    were measured: the number may stand for decode steps, for sequences or for the firing."""
    for node in graph.nodes:
        cost, setting = costs.cost_of(node.name), settings[node.name]
        there, decode = cost.measured, cost.decode
        if there is None or decode is None or costs.source != "measured":
            continue
        if decode.divided and there.rows / there.engines != setting.rows / setting.engines:
            yield (
                f"'{node.name}' was measured with responses of one length, {there.rows} per engine, and its seconds are divided into "
                "decode steps and sequences as the roofline does; profile batches of two sizes"
            )
        if not _single(cost):
            continue
        here = replace(there, rows=setting.rows, engines=setting.engines, devices=setting.devices)
        seconds = _decode_mean(costs, cost, here, graph.rows)
        bounds = [seconds]
        for term in TERMS:
            unit: dict[str, Any] = {term: 1.0}
            one = replace(cost, decode=Decode(**unit, doubling=decode.doubling))
            at = _decode_mean(costs, one, there, there.rows)
            if at:
                bounds.append(_decode_mean(costs, one, here, graph.rows) * _decode_mean(costs, cost, there, there.rows) / at)
        if max(bounds) - min(bounds) > CLOSE_TERMS * seconds:
            yield (
                f"'{node.name}' was measured on {there.rows / there.engines:.4g} responses per engine and is predicted on "
                f"{setting.rows / setting.engines:.4g}, but its firings did not tell decode steps from sequences: {seconds:.3g} s by "
                f"{_terms(decode)[0]} alone, "
                f"{min(bounds):.3g} to {max(bounds):.3g} s if it stands for another; profile batches of two sizes"
            )


def _decode_mean(costs: Costs, cost: NodeCost, setting: Setting, rows: int) -> float:
    """Predict the mean seconds of decoding alone, without spread."""
    bare = NodeCost(decode=cost.decode, measured=cost.measured)
    return replace(costs, nodes={**costs.nodes, "": bare}).mean("", setting, rows)


# Convert measured costs of trainers to the settings of a graph: to other `recompute` and `compiled`, and to other ranks.


def with_settings(graph: Graph, costs: Costs, device: Device | None, shapes: Shapes) -> Costs:
    """Convert the costs of nodes that were measured with other settings than the graph's."""
    nodes = dict(costs.nodes)
    for node in graph.nodes:
        cost, shape = nodes[node.name], shapes.get(node.model.path) if node.model is not None else None
        if shape is None or not isinstance(cost, NodeCost) or cost.measured is None:
            continue
        cost = _with_layers(node, cost, shape, costs.lengths, device)
        if device is not None and cost.token_s:
            cost = _with_sharing(node, cost, shape, device)
        if device is not None and cost.token_s:
            cost = replace(cost, shards=shards_of(node, shape, device))
        nodes[node.name] = cost
    return replace(costs, nodes=nodes)


def _with_layers(node: Node, cost: NodeCost, shape: ModelShape, lengths: Lengths | None, device: Device | None) -> NodeCost:
    """Scale the seconds of an update that was measured with another `recompute` or `compiled`.

    Tokens take longer by the operations that are computed again; where only one of the two is compiled, by the estimates for the `device`,
    if it is known. A pass takes the host longer as `estimates.launch_s` says; where ranks gather shards that was not seen.
    """
    then = _measured_layers(node, cost)
    if then is None or node.model is None or lengths is None:
        return cost
    now = node.model.traits
    if device is None or then.compiled == now.compiled:
        adapter, keys = adapter_size(node.model, shape), lengths.sequence_of_a_token / 2
        tokens = [float(sum(operations(traits, shape, keys, adapter, trains=True))) for traits in (now, then)]
    else:
        tokens = [_token_s(node, traits, shape, lengths, device) for traits in (now, then)]
    launches = [estimates.launch_s(shape, traits) for traits in (now, then)]
    return replace(cost, token_s=cost.token_s * tokens[0] / tokens[1], pass_s=cost.pass_s * launches[0] / launches[1])


def _measured_layers(node: Node, cost: NodeCost) -> ModelTraits | None:
    """The traits that an update was measured with; None if that is not known, or if its layers compute as the model's do."""
    if node.traits.work != "train" or node.model is None or cost.measured is None or cost.measured.passes is None:
        return None
    traits, measured = node.model.traits, cost.measured.passes
    recompute = traits.recompute if measured.recompute is None else measured.recompute
    then = replace(traits, recompute=recompute, compiled=traits.compiled if measured.compiled is None else measured.compiled)
    return None if (then.recompute, then.compiled) == (traits.recompute, traits.compiled) else then


def _with_sharing(node: Node, cost: NodeCost, shape: ModelShape, device: Device) -> NodeCost:
    """Add the exchanges of the ranks that share a pass, and take off the measured ones.

    More ranks shorten a pass on their GPUs but not on the host. A run whose GPU is slower than its host does not show the host's time per
    pass; then the table's time is used.
    """
    measured = _measured_sharing(node, cost)
    if measured is None or node.model is None:
        return cost
    trains, traits = node.traits.work == "train", node.model.traits
    change = epochs_of(node) * sum(
        sign * each.ranks_per_pass * exchange_s(shape, device, each, trains=trains) for sign, each in ((1, traits), (-1, measured))
    )
    pass_s = cost.pass_s
    if not pass_s and traits.ranks_per_pass > measured.ranks_per_pass:
        pass_s = walks_of(node) * (1.0 if trains else FORWARD) * estimates.launch_s(shape, traits, trains=trains)
    return replace(cost, token_s=max(cost.token_s + change, 0.0), pass_s=pass_s)


def _measured_sharing(node: Node, cost: NodeCost) -> ModelTraits | None:
    """The traits that a node was measured with, if its cost follows tokens and its ranks shared passes in another way; else None."""
    if node.model is None or cost.measured is None or not cost.token_s:
        return None
    passes, traits = cost.measured.passes, node.model.traits
    # Padded passes, which are not described, are of no rank that shares them; how they shared experts is not known.
    then = (passes.tensor, passes.context, passes.expert) if passes is not None else (1, 1, traits.expert_parallel)
    if then == (traits.tensor_parallel, traits.context_parallel, traits.expert_parallel):
        return None
    return replace(traits, tensor_parallel=then[0], context_parallel=then[1], expert_parallel=then[2])


def priced_for(graph: Graph, cluster: Cluster, costs: Costs | None, shapes: Shapes) -> Costs:
    """Use the given costs, or estimate them: by the roofline if devices and shapes are known, else placeholders.

    Missing sleep costs of models that time-share devices are estimated too.
    """
    device = device_of(cluster.gpu) if cluster.gpu else None
    if costs is None and device is not None and has_shapes(graph, shapes):
        priced = roofline(graph, device, shapes)
    else:
        priced = with_settings(graph, with_decode_terms(graph, check_costs(graph, costs), device, shapes), device, shapes)
    return with_sleep(graph, priced, cluster, device, shapes)


def assumptions(graph: Graph, settings: Mapping[str, Setting], costs: Costs, devices: str) -> Iterator[str]:
    """Say on which unmeasured numbers the seconds of a plan rest, and how far they may be off; `devices` are "cores" or "GPUs"."""
    yield from _width_assumptions(graph, settings, costs, devices)
    yield from _single_number_caveats(graph, settings, costs)
    yield from _assumed_lengths(graph, costs)
    fitted = [(node, cost) for node in graph.nodes if isinstance(cost := costs.nodes[node.name], NodeCost)]
    for node, cost in fitted:
        measured = _measured_sharing(node, cost)
        if measured is not None:
            yield (
                f"'{node.name}' was measured with tensor_parallel={measured.tensor_parallel}, "
                f"context_parallel={measured.context_parallel}, expert_parallel={measured.expert_parallel}: its exchanges of tokens are "
                "taken from the model's shape and the link between GPUs, and the host's time of a pass from a table"
            )
    for node, cost in fitted:
        if cost.measured is not None and cost.gathering_s(settings[node.name]):
            ranks, seen = settings[node.name].engines, cost.measured.engines
            yield (
                f"'{node.name}' was measured on {seen} {'rank' if seen == 1 else 'ranks'} and is predicted on {ranks}: gathering shards "
                "and reducing gradients are taken from the model's shape, the memory and the link of a GPU"
            )
    for node, cost in fitted:
        then = _measured_layers(node, cost)
        if node.model is not None and then is not None and cost.token_s and cost.computes_otherwise(settings[node.name]):
            now = node.model.traits
            known = {"recompute": (then.recompute, now.recompute), "compiled": (then.compiled, now.compiled)}
            said = ", ".join(f"{name}={was!r}" for name, (was, is_now) in known.items() if was != is_now)
            yield f"'{node.name}' was measured with {said}: its seconds are scaled by estimates for the model's shape"
