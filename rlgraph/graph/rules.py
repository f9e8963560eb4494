"""The rules that a graph must meet, one function per rule. Each error says where, what was found, the rule and the fix."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import networkx as nx

from rlgraph.errors import GraphError
from rlgraph.graph.nodes import MAX_SLOTS, Feedback, Model, Node, UncheckedGraph

# The rules of graphs whose policy computes log-probs bit-identical to its engine's, `Policy(exact=True)`.

EXACT_DTYPES = {"float32": "cores", "bfloat16": "GPUs"}  # the dtypes that a policy may compute in, and on which devices


def check_exact(graph: UncheckedGraph) -> None:
    """Refuse settings that are not proven exact: other engines, folders or dtypes, sampling from a part of the vocabulary, depth."""
    followed = {feedback.source.node.model for feedback in graph.feedbacks if feedback.source is not None}
    for node in graph.nodes:
        if node.model is not None and node.model.traits.exact and node.model not in followed:
            raise GraphError(
                f"graph '{graph.name}': the model of node '{node.name}' has exact=True, and no generator follows its weights; close a "
                "feedback edge with them, or leave out exact"
            )
    for feedback, source, node, model in _followers(graph):
        if source.traits.exact:
            _check_reader(graph, feedback, source, node, model)


def _followers(graph: UncheckedGraph) -> Iterator[tuple[Feedback, Model, Node, Model]]:
    """List each feedback edge with the model that writes it, a node that follows it, and the node's model."""
    for feedback in graph.feedbacks:
        source = feedback.source.node.model if feedback.source is not None else None
        for node in graph.nodes:
            if source is not None and node.feedback is feedback and node.model is not None:
                yield feedback, source, node, node.model


def exact_models(graph: UncheckedGraph) -> set[Model]:
    """The exact policies of a graph, and the generators that follow them."""
    found = {node.model for node in graph.nodes if node.model is not None and node.model.traits.exact}
    for node in graph.nodes:
        source = node.feedback.source if node.feedback is not None else None
        if node.model is not None and source is not None and source.node.model in found:
            found.add(node.model)
    return found


def _check_reader(graph: UncheckedGraph, feedback: Feedback, source: Model, node: Node, model: Model) -> None:
    where = f"graph '{graph.name}': node '{node.name}' follows feedback '{feedback.name}' of a policy with exact=True"
    sampling = node.traits.sampling
    if feedback.depth > 0:
        raise GraphError(
            f"{where}, at depth={feedback.depth}: responses from older weights have different log-probs; use depth=0, or leave out exact"
        )
    if not model.traits.samples_exactly:
        raise GraphError(f"{where}, but its engine uses different kernels than the trainer; use engine='vllm', or leave out exact")
    if model.path != source.path:
        raise GraphError(f"{where} of '{source.path}', and its own model is '{model.path}'; pass the same path, or leave out exact")
    if model.traits.dtype != source.traits.dtype:
        raise GraphError(
            f"{where} and dtype='{source.traits.dtype}', and has dtype='{model.traits.dtype}'; use "
            f"rg.Generator(…, dtype='{source.traits.dtype}')"
        )
    if model.traits.tensor_parallel > 1 or model.group > 1:
        raise GraphError(f"{where}, and an engine spans {model.group} GPUs, which sum in a different order; use tensor_parallel=1")
    own = [name for name, given in (("weights_dtype", model.traits.weights_dtype), ("drafts", model.traits.drafts)) if given is not None]
    if own:
        raise GraphError(f"{where}, and its engine has {own[0]}=, which computes differently; leave out {own[0]}, or exact")
    if sampling is not None and not sampling.is_full_distribution:
        raise GraphError(
            f"{where}, and samples with {sampling.distribution}: the trainer's log-probs cover the whole vocabulary; "
            "use top_p=1, top_k=0, min_p=0 and a temperature above 0"
        )


# The rules of feedback edges that carry an adapter: each reader merges it into the same base.


def check_adapters(graph: UncheckedGraph) -> None:
    """Refuse readers of an adapter that do not generate, cannot merge adapters, read another folder, or span devices."""
    for feedback, source, node, model in _followers(graph):
        if source.traits.adapter is None:
            continue
        where = f"graph '{graph.name}': node '{node.name}' follows feedback '{feedback.name}', which carries an adapter"
        if node.traits.work != "generate":
            raise GraphError(f"{where}; only a generator merges one: use policy.log_probs(rollout), or leave out adapter=")
        if not model.traits.merges_adapters:
            raise GraphError(
                f"{where}, but its engine is not tested with adapters: use engine='transformers' or 'vllm', or leave out adapter="
            )
        if model.path != source.path:
            raise GraphError(
                f"{where} of '{source.path}', and its own model is '{model.path}'; both must start from one folder, since only "
                "the adapter is sent: pass the same path"
            )
        if model.group > 1:
            raise GraphError(
                f"{where}, but its engine spans {model.group} devices, while adapters arrive unsharded: use "
                "tensor_parallel=1, or leave out adapter="
            )


# The rule of graphs whose engines report the experts that they chose, `Generator(routes=True)`.


def check_route_readers(graph: UncheckedGraph) -> None:
    """Refuse routes that nobody reads: they are the largest columns of a rollout."""
    read = {node.source_of("routes") for node in graph.nodes if "routes" in node.reads}
    for node in graph.nodes:
        if node.traits.work == "generate" and "routes" in node.writes and node not in read:
            raise GraphError(
                f"graph '{graph.name}': node '{node.name}' samples with routes=True, and nothing reads the routes; train a policy with "
                "router_replay=True on it, or leave out routes"
            )


def check_image_readers(graph: UncheckedGraph) -> None:
    """Refuse a generator with `images` that nobody shows an image: its engine would load the part that reads them for nothing."""
    shown = {node.model for node in graph.nodes if "images" in node.writes}
    for node in graph.nodes:
        if node.model is not None and node.model.traits.images is not None and node.model not in shown:
            raise GraphError(
                f"graph '{graph.name}': the generator of node '{node.name}' has images={node.model.traits.images}, and no prompt of its "
                "rollouts and evaluations has an image; put an item with an image first in the data, or leave out images"
            )


def check_vision_readers(graph: UncheckedGraph) -> None:
    """Refuse readers of a tower that is trained which are no generators with images."""
    for feedback, source, node, model in _followers(graph):
        if source.traits.train_vision and model.traits.images is None:
            raise GraphError(
                f"graph '{graph.name}': node '{node.name}' follows feedback '{feedback.name}', which carries the tower; "
                "only a generator with images= has one: use policy.log_probs(rollout), or leave out train_vision"
            )


# The round of its pool in which a node fires: an update on the rollout's own pool comes one or more rounds later.
#
#     depth=0    rollout 0, update 0, rollout 1, update 1, ...
#     depth=1    rollout 0, rollout 1, update 0, rollout 2, update 1, ...
#
# In the second order a reward on the host works on batch k while rollout k + 1 decodes. Node n fires for step r - lag(n) in round r.
# Every event waits for an earlier round, or for an earlier event of its own round, so no such order deadlocks.


def lags(graph: UncheckedGraph) -> Mapping[Node, int]:
    """Count the rounds by which each node fires later than the rollout of its step; 0 for all if no update can be postponed.

    An update is postponed if it shares devices with its rollout, has a depth above 0, and waits for work on other devices. One round hides
    that work. At depth 2 the weights can also move during a rollout, which then uses a version one round older. Each depth above 2 adds
    another round, for chains of such nodes.
    """
    late: set[Node] = set()
    driven = [node for node in graph.nodes if node.feedback is not None and node.feedback.depth > 0 and node.due is None]
    for rollout in driven:
        late.update(_blocked_nodes(graph, rollout))
    most = max(1, min((node.feedback.depth for node in driven if node.feedback is not None), default=1) - 1)
    size = -1
    while late and size != len(late):
        size = len(late)
        late.update(node for node in graph.nodes if _must_be_late(graph, node, late, most))
    return {node: most if node in late and late.isdisjoint(driven) else 0 for node in graph.nodes}


def _blocked_nodes(graph: UncheckedGraph, rollout: Node) -> Iterator[Node]:
    """Yield the nodes of the rollout's pool that wait for work on other devices, if the update that publishes its weights is among them."""
    elsewhere = [node for node in nx.descendants(graph.forward, rollout) if node.pool is not rollout.pool]
    behind = {node for other in elsewhere for node in nx.descendants(graph.forward, other) if node.pool is rollout.pool}
    if rollout.feedback is not None and rollout.feedback.source is not None and rollout.feedback.source.node in behind:
        yield from behind


def _must_be_late(graph: UncheckedGraph, node: Node, late: set[Node], most: int) -> bool:
    """Whether a node is late too: it reads from a late node, fires in its worker, works on its chunks, or needs its weights too soon."""
    feedback = node.feedback
    soon = feedback is not None and (graph.is_separate_evaluation(node) or feedback.depth < most)
    return (
        any(output.node in late for output in node.inputs)
        or any(node.model is not None and node.model is other.model for other in late)
        or any(node.follows is not None and node.follows is other.follows for other in late)
        or (soon and feedback is not None and feedback.source is not None and feedback.source.node in late)
    )


def check_unique_names(graph: UncheckedGraph) -> None:
    """Plans, channels and reports identify nodes and pools by their names."""
    for name, count in Counter(node.name for node in graph.nodes).items():
        if count > 1:
            raise GraphError(f"graph '{graph.name}' has {count} nodes called '{name}'; use different names, with name=")
    for name, count in Counter(pool.name for pool in graph.pools).items():
        if count > 1:
            raise GraphError(f"graph '{graph.name}' has {count} different pools called '{name}'; use one Pool object, or two names")


def check_closed_edges(graph: UncheckedGraph) -> None:
    """An open feedback edge has no update that sends weights."""
    for feedback in (*graph.feedbacks, *graph.earlier):
        if feedback.source is None:
            fix = f"{feedback.name}.close(output)" if feedback.columns else "weights.close(step.weights)"
            raise GraphError(f"graph '{graph.name}' has an open feedback '{feedback.name}'; close it with {fix}")


def check_edge_cycles(graph: UncheckedGraph) -> None:
    """Weights go to rollouts on whose responses they are trained."""
    for feedback in graph.feedbacks:
        assert feedback.source is not None
        trained = feedback.source.node
        for reader in (node for node in graph.nodes if node.feedback is feedback and node.due is None):
            if not nx.has_path(graph.forward, reader, trained):
                raise GraphError(
                    f"feedback '{feedback.name}' closes no cycle: '{trained.name}' does not depend on '{reader.name}', "
                    "which uses its weights; pass the rollout to the update"
                )


def check_edge_readers(graph: UncheckedGraph) -> None:
    """An edge that no node reads leaves the generator at its first weights for ever."""
    read = {*graph.feedbacks, *graph.earlier}
    for node in graph.nodes:
        edge = next((edge for edge in node.closes if edge not in read), None)
        if edge is not None:
            fix = "earlier=" if edge.columns else f"generator.rollout(prompts, {edge.name})"
            raise GraphError(
                f"graph '{graph.name}': feedback '{edge.name}' is closed with '{node.name}', but no node of the graph reads it; pass it to "
                f"a node, e.g. {fix}, or do not close it"
            )


def check_column_cycles(graph: UncheckedGraph) -> None:
    """Columns of an earlier step come from a node that depends on their reader, so neither runs ahead of the other."""
    for node in graph.nodes:
        source = node.earlier.source if node.earlier is not None else None
        if source is not None and not nx.has_path(graph.forward, node, source.node):
            raise GraphError(
                f"feedback '{node.earlier.name if node.earlier else ''}' closes no cycle: '{source.node.name}' does not depend on "
                f"'{node.name}', which gets its columns; pass them as an input instead"
            )
        drawing = [other.name for other in graph.forward.successors(node) if other.traits.looks_ahead or other.traits.draws_from]
        if source is not None and drawing:
            raise GraphError(
                f"node '{node.name}' depends on columns of an earlier step, but {drawing} draws its prompts ahead of the steps: use a "
                "rollout without continuous= and refill="
            )


def check_prompt_readers(graph: UncheckedGraph) -> None:
    """A node that draws prompts by itself consumes them, so no other node can read the same prompts."""
    takers = {id(n.traits.draws_from): n for n in graph.nodes if n.traits.draws_from is not None}
    for node in graph.nodes:
        drawn = [o.node for o in node.inputs if id(o.node.operation) in takers]
        if node.traits.draws_from is not None and takers[id(node.traits.draws_from)] is not node:
            raise GraphError(
                f"nodes '{node.name}' and '{takers[id(node.traits.draws_from)].name}' draw from one source of prompts, each as many as "
                "it needs, so both would train on the same prompts; declare a separate source for each"
            )
        if drawn:
            taker = takers[id(drawn[0].operation)].name
            raise GraphError(
                f"node '{node.name}' reads from '{drawn[0].name}', but '{taker}' draws these prompts by itself, as many as it needs: "
                f"the two would read different prompts; pass '{taker}' in place of '{drawn[0].name}'"
            )


def check_useful_depth(graph: UncheckedGraph) -> None:
    """A depth above 0 lets a rollout overlap with an update; without overlap it would only make batches stale."""
    pools = {node.pool.name for node in graph.nodes if node.pool is not None and node.due is None}
    for feedback in graph.feedbacks:
        if feedback.depth > 0 and all(node.due is not None for node in graph.nodes if node.feedback is feedback):
            raise GraphError(
                f"feedback '{feedback.name}' has depth={feedback.depth}, but only evaluations read it, and an evaluation uses the weights "
                "of its step: set depth=0"
            )
        if feedback.depth > 0 and len(pools) == 1 and not any(lags(graph).values()):
            raise GraphError(
                f"feedback '{feedback.name}' has depth={feedback.depth}, but every model is in pool '{next(iter(pools))}' and nothing can "
                "overlap: the next rollout comes before the update only if the update waits for a node on the host, e.g. a reward, and "
                "for no other generator; use depth=0, or two pools"
            )


def check_continuous_pools(graph: UncheckedGraph) -> None:
    """Responses stay in the engine between two firings, so no other model may use their memory."""
    for node in graph.nodes:
        if not node.traits.continuous:
            continue
        others = [n.name for n in graph.nodes if n.pool is node.pool and n.model is not node.model]
        if others:
            raise GraphError(
                f"node '{node.name}' has continuous=True, so responses stay in its engine between two steps, but {others} run in the same "
                f"pool '{node.pool.name if node.pool else ''}' and need its memory: give the generator a separate pool"
            )


def check_single_update(graph: UncheckedGraph) -> None:
    """One step makes one version of the weights: two updates of a model would make two, and the edge carries only the first."""
    updates: dict[int, Any] = {}
    for node in (node for node in graph.nodes if node.model is not None and node.traits.work == "train"):
        other = updates.setdefault(id(node.model), node)
        if other is not node:
            raise GraphError(
                f"nodes '{other.name}' and '{node.name}' both update one {node.model.role if node.model else 'model'}; a step "
                "has one update of a model: set epochs= or mini_batches= for several optimizer steps, or make a second model"
            )


def check_single_edge(graph: UncheckedGraph) -> None:
    """A model holds the weights of one feedback edge: its other nodes would use them too, whether they follow another edge or none."""
    for node in (node for node in graph.nodes if node.model is not None and node.feedback is not None):
        works = {node.traits.work, "generate"}
        others = (n for n in graph.nodes if n.model is node.model and n.feedback is not node.feedback)
        other = next((n for n in others if n.feedback is not None or works == {n.traits.work}), None)
        if other is not None and node.feedback is not None:
            raise GraphError(
                f"graph '{graph.name}': nodes '{node.name}' and '{other.name}' belong to one model, and follow feedback "
                f"'{node.feedback.name}' and {repr(other.feedback.name) if other.feedback else 'none'}; a model holds the weights of one "
                f"edge: give each node its own {type(node.model).__name__}, in one pool if they should share devices"
            )


def check_update_order(graph: UncheckedGraph) -> None:
    """Old log-probs and values are computed before the update: the nodes of a model fire in the order of their declaration."""
    for node in graph.nodes:
        trained = next((n for n in graph.nodes if n.model is node.model and n.traits.work == "train" and n.serial < node.serial), None)
        if node.model is not None and trained is not None and {"old_log_probs", "values"} & set(node.writes):
            raise GraphError(
                f"node '{node.name}' is declared after '{trained.name}', so it would see the updated weights; {list(node.writes)} must "
                "come from the weights before the update: declare it before the update"
            )


def check_chunk_readers(graph: UncheckedGraph) -> None:
    """Chunks help only if some node works on one while the rest decodes."""
    for rollout in (node for node in graph.nodes if node.stream is node):
        readers = list(graph.forward.successors(rollout))
        if not any(reader.follows is rollout for reader in readers):
            reasons = "; ".join(f"'{reader.name}' {why_full_batch(reader, rollout)}" for reader in readers)
            raise GraphError(
                f"node '{rollout.name}' has chunks={rollout.chunks}, but no node can work on a chunk while the rest is decoded: {reasons}; "
                "leave chunks out"
            )


def why_full_batch(reader: Node, rollout: Node) -> str:
    """Say why a node does not work on the chunks of a rollout."""
    if reader.pool is not None and reader.pool is rollout.pool:
        return f"runs in its pool '{rollout.pool.name if rollout.pool else ''}', so only after it"
    if reader.traits.whole:
        return reader.traits.whole
    if not reader.traits.by_group:
        return "takes the whole batch (your own reward or node works on chunks with by_group=True)"
    return "also reads a column of the whole batch, or of another rollout's chunks"


def check_row_order(graph: UncheckedGraph) -> None:
    """Rows of a rollout with an order of its own are joined only with rows in that order."""
    orders: dict[Node, frozenset[Node]] = {}  # the rollouts in whose order the rows of a node are
    for node in nx.topological_sort(graph.forward):
        by_prefix: dict[str, list[Node]] = {}
        for output in node.inputs:
            by_prefix.setdefault(output.prefix, []).append(output.node)
        for joined in by_prefix.values():
            for a, b in pairwise(joined):
                if orders[a] != orders[b]:
                    first, other = (a, b) if orders[a] else (b, a)
                    rollout = min(orders[first], key=lambda found: found.serial).name
                    raise GraphError(
                        f"node '{node.name}' joins rows of '{first.name}', in the order in which groups of '{rollout}' finish, with "
                        f"rows of '{other.name}' in another order; '{rollout}' carries the columns of its prompts: read them from there, "
                        "or leave out order='finish'"
                    )
        own = frozenset({node}) if node.traits.reorders else frozenset[Node]()
        orders[node] = own or frozenset().union(*(orders[output.node] for output in node.inputs))


def check_streamed_pools(graph: UncheckedGraph) -> None:
    """A model that learns from chunks as they arrive takes no turns with another model on the same devices."""
    for update in (node for node in graph.nodes if node.traits.work == "train" and node.follows is not None):
        others = [n.name for n in graph.nodes if n.pool is update.pool and n.follows is update.follows and n.model is not update.model]
        if others:
            raise GraphError(
                f"node '{update.name}' has streamed=True, and in its pool '{update.pool.name if update.pool else ''}' {others} of another "
                "model would take turns with it at each chunk; give that model a pool of its own, or leave out streamed"
            )


def check_chunk_sizes(graph: UncheckedGraph) -> None:
    """All chunks of the open batches fit into the slots of a channel."""
    open_batches = 1 + max((feedback.depth for feedback in graph.feedbacks), default=0)
    for node in graph.nodes:
        if node.chunks > 1 and open_batches * node.chunks > MAX_SLOTS:
            raise GraphError(
                f"node '{node.name}' has chunks={node.chunks}, and {open_batches} batches may be open: {open_batches * node.chunks} "
                f"chunks, but a channel has {MAX_SLOTS} slots; lower chunks or the depth"
            )


def check_evaluation_delay(graph: UncheckedGraph) -> None:
    """An evaluation with a separate generator may not keep other nodes of its pool waiting."""
    for node in (node for node in graph.nodes if graph.is_separate_evaluation(node)):
        others = [other.name for other in graph.nodes if other.pool is node.pool and other.due is None]
        if others:
            raise GraphError(
                f"node '{node.name}' evaluates on a separate generator in pool '{node.pool.name if node.pool else ''}', where {others} "
                "would wait for it; give it a separate pool, or evaluate on the rollout's generator, which is free between rollouts"
            )


GRAPH_RULES: tuple[Callable[[UncheckedGraph], None], ...] = (
    check_unique_names,
    check_closed_edges,
    check_edge_readers,
    check_edge_cycles,
    check_column_cycles,
    check_prompt_readers,
    check_useful_depth,
    check_continuous_pools,
    check_single_update,
    check_single_edge,
    check_update_order,
    check_chunk_readers,
    check_row_order,
    check_streamed_pools,
    check_chunk_sizes,
    check_evaluation_delay,
    check_adapters,
    check_exact,
    check_route_readers,
    check_image_readers,
    check_vision_readers,
)
