"""Ranks that share a pass: the sizes that they divide, and the seconds in which they exchange tokens in each layer."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd

from rlgraph.costs import host_times
from rlgraph.costs.costs import FORWARD, Costs, epochs_of, walks_of
from rlgraph.costs.estimates import Device
from rlgraph.costs.functions import NodeCost
from rlgraph.costs.model_shapes import ModelShape, Shapes
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Graph, Node
from rlgraph.graph.operation import ModelTraits

LINKED = 0.7  # share of the link between GPUs that collectives reach; an assumption, which a profile replaces
ITEMSIZE = 2  # bytes of a number on the way
# Seconds of a collective without a byte: 6 µs on two H100s when a CUDA graph launches it, by nccl-tests, and about as much twice for the
# events by which the stream of products and that of NCCL wait for each other; an assumption, which a profile replaces.
CALL_S = 20e-6
SHARED, EXCHANGED, DISPATCHED = 4, 4, 3  # collectives a layer: gathers and sums; queries, keys, values, results; counts, there and back


def undivided(heads: int, kv_heads: int, vocab: int | None, intermediate: int, *, tensor: int, context: int) -> tuple[str, int, str] | None:
    """Find a size that ranks do not divide: its name in config.json, the size, and the settings; None where they divide all.

    A vocabulary of None is one that they need not divide.

    >>> undivided(32, 8, 151936, 12288, tensor=2, context=2), undivided(14, 2, 151936, 4864, tensor=4, context=1)
    (None, ('num_attention_heads', 14, 'tensor_parallel=4'))
    """
    both = {"tensor_parallel": tensor, "context_parallel": context}
    rules = [
        ("num_attention_heads", heads, both),
        *((name, size, {"tensor_parallel": tensor}) for name, size in _cut_by_tensor(kv_heads, vocab, intermediate).items()),
    ]
    for name, size, ranks in rules:
        product = 1
        for count in ranks.values():
            product *= count
        if size % product:
            return name, size, " × ".join(f"{setting}={count}" for setting, count in ranks.items() if count > 1)
    return None


def ring_ranks(heads: int, *, tensor: int, context: int) -> int:
    """Count the ranks of the ring in which `context` ranks pass keys round: what is left of them where heads run out.

    The others exchange tokens for heads: as many as divide the heads of a rank.

    >>> ring_ranks(32, tensor=2, context=4), ring_ranks(14, tensor=1, context=4), ring_ranks(9, tensor=1, context=2)
    (1, 2, 2)
    """
    return context if heads % tensor else context // gcd(heads // tensor, context)


def ring_of(traits: ModelTraits, shape: ModelShape | None) -> int:
    """Count the ranks of the ring of a model; 1 without one, or where its shape is not known."""
    if shape is None or not traits.any_heads:
        return 1
    return ring_ranks(shape.heads, tensor=traits.tensor_parallel, context=traits.context_parallel)


def _cut_by_tensor(kv_heads: int, vocab: int | None, intermediate: int) -> Mapping[str, int]:
    return {"num_key_value_heads": kv_heads, **({} if vocab is None else {"vocab_size": vocab}), "intermediate_size": intermediate}


def check_shared(graph: Graph, shapes: Shapes) -> None:
    """Raise PlanError for a model of known shape that its ranks do not divide."""
    for model in dict.fromkeys(node.model for node in graph.nodes if node.model is not None):
        shape, traits = shapes.get(model.path), model.traits
        if shape is None or traits.together == 1:
            continue
        _check_experts(f"graph '{graph.name}': model '{model.path}'", shape.experts, traits.expert_parallel)
        inner = shape.intermediate if shape.experts == 1 else traits.tensor_parallel  # experts are not cut
        sizes = shape.heads, shape.kv_heads, None if traits.any_vocabulary else shape.vocab, inner
        tensor, context = traits.tensor_parallel, traits.context_parallel
        ring = ring_of(traits, shape)
        found = undivided(*sizes, tensor=tensor, context=context // ring)
        if found is not None:
            name, size, settings = found
            raise PlanError(
                f"graph '{graph.name}': model '{model.path}' has {name}={size}, which {settings} does not divide; every rank has as many: "
                f"choose a divisor of {size}"
            )


def _check_experts(model: str, experts: int, ranks: int) -> None:
    if experts == 1 < ranks:
        raise PlanError(f"{model} has no experts, which expert_parallel={ranks} shares; leave it out")
    if experts % ranks:
        raise PlanError(
            f"{model} has {experts} experts, which expert_parallel={ranks} does not divide; every rank has as many: choose a divisor of "
            f"{experts}"
        )


def exchange_s(shape: ModelShape, device: Device, traits: ModelTraits, *, trains: bool) -> float:
    """Estimate the seconds in which a rank exchanges tokens with those of its pass, for each token of the pass.

    Ranks that share matrices gather and scatter the tokens twice a layer (Korthikanti et al., 2022, section 4.2.2), ranks that share a row
    exchange queries, keys, values and results (Jacobs et al., 2023), and ranks that share experts send them tokens and take them back. The
    backward pass does all again, and so does recomputing. In a ring keys and values are passed on (Liu et al., 2023), and in the backward
    pass their gradients too, in float32 and once more, home. Of a pipeline a rank does so for its own layers. No exchange overlaps with
    products, and each waits for its call (`CALL_S`), of which a short pass has as many as a long one.
    """
    tensor, context = traits.tensor_parallel, traits.context_parallel
    ring = ring_ranks(shape.heads, tensor=tensor, context=context)
    neighbours = context // ring
    gathered = 4 * shape.hidden * (tensor - 1) / tensor / context
    key_heads = max(shape.kv_heads / tensor, neighbours)
    exchanged = 2 * (shape.heads / tensor + key_heads) * shape.head_dim * (neighbours - 1) / neighbours / context
    block = 2 * key_heads * shape.head_dim / context  # keys and values that a rank passes on at a hop
    exchanged += block * (ring - 1)
    home = block * ring * (4 / ITEMSIZE) if trains and ring > 1 else 0.0
    expert, layers = traits.expert_parallel, shape.layers / traits.pipeline_parallel
    dispatched = 2 * shape.hidden * shape.experts_used * (expert - 1) / expert / (tensor * context)
    walks = 2 + bool(traits.recompute) if trains else 1
    calls = SHARED * (tensor > 1) + EXCHANGED * (neighbours > 1) + (ring - 1) + DISPATCHED * (expert > 1)
    waits = 0.0 if traits.micro_batch_tokens is None else calls * CALL_S / (traits.micro_batch_tokens * context)  # of full passes
    sent = walks * (gathered + exchanged + dispatched) + home
    return layers * (sent * ITEMSIZE / (device.peer_link * LINKED) + walks * waits)


def with_sharing(graph: Graph, costs: Costs, device: Device | None, shapes: Shapes) -> Costs:
    """Take measured costs of trainers to other numbers of ranks that share a pass: exchanges are added, those measured are taken off.

    More ranks make a pass shorter on their GPUs, and not on the host. So where a run showed no least time of a pass, since its GPU took
    longer, the host's of the table is taken.
    """
    nodes = dict(costs.nodes)
    for node, cost, measured in _elsewhere(graph, costs):
        shape = shapes.get(node.model.path) if node.model is not None else None
        if device is None or shape is None or node.model is None:
            continue
        trains, traits = node.traits.work == "train", node.model.traits
        change = epochs_of(node) * sum(
            sign * each.sharing * exchange_s(shape, device, each, trains=trains) for sign, each in ((1, traits), (-1, measured))
        )
        pass_s = cost.pass_s
        if not pass_s and traits.sharing > measured.sharing:
            walks = walks_of(node) * (1.0 if trains else FORWARD)
            pass_s = walks * host_times.launch_s(shape, traits, trains=trains)
        nodes[node.name] = replace(cost, token_s=max(cost.token_s + change, 0.0), pass_s=pass_s)
    return replace(costs, nodes=nodes)


def assumed_sharing(graph: Graph, costs: Costs) -> tuple[str, ...]:
    """Name the nodes that were measured with other numbers of ranks that share a pass."""
    return tuple(
        f"'{node.name}' was measured with tensor_parallel={measured.tensor_parallel}, context_parallel={measured.context_parallel}, "
        f"expert_parallel={measured.expert_parallel}: its exchanges of tokens are taken from the model's shape and the link between GPUs, "
        "and the host's time of a pass from a table"
        for node, _, measured in _elsewhere(graph, costs)
    )


def _elsewhere(graph: Graph, costs: Costs) -> Iterator[tuple[Node, NodeCost, ModelTraits]]:
    """Find the nodes whose cost follows tokens and was measured with ranks that share a pass in another way, and that way."""
    for node in graph.nodes:
        cost = costs.nodes.get(node.name)
        if node.model is None or not isinstance(cost, NodeCost) or cost.measured is None or not cost.token_s:
            continue
        passes = cost.measured.passes
        traits = node.model.traits
        # Padded passes, which are not described, are of no rank that shares them; how they shared experts is not known.
        found = (passes.tensor, passes.context, passes.expert) if passes is not None else (1, 1, traits.expert_parallel)
        if found != (traits.tensor_parallel, traits.context_parallel, traits.expert_parallel):
            tensor, context, expert = found
            yield node, cost, replace(traits, tensor_parallel=tensor, context_parallel=context, expert_parallel=expert)
