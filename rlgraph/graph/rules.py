"""The rules that a graph must meet, one function a rule. Each says where, what was found, the rule and the fix."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import networkx as nx

from rlgraph.columns import COLUMNS
from rlgraph.errors import GraphError, choices, show_value

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Feedback, Graph, Model, Node, Output

# The rules of graphs whose policy computes the log-probs of its engine to the bit, `Policy(exact=True)`.

EXACT_DTYPES = {"float32": "cores", "bfloat16": "GPUs"}  # what a policy may compute in, and where


def check_exact(graph: "Graph") -> None:
    """Refuse what is not proven to be exact: other engines, other folders, dtypes but float32, a part of the vocabulary, depth."""
    followed = {feedback.source.node.model for feedback in graph.feedbacks if feedback.source is not None}
    for node in graph.nodes:
        if node.model is not None and node.model.traits.exact and node.model not in followed:
            raise GraphError(
                f"graph '{graph.name}': the model of node '{node.name}' has exact=True, and no generator follows its weights; close a "
                "feedback edge with them, or leave out exact"
            )
    for feedback in graph.feedbacks:
        source = feedback.source.node.model if feedback.source is not None else None
        if source is None or not source.traits.exact:
            continue
        for node in graph.nodes:
            if node.feedback is feedback and node.model is not None:
                _check_reader(graph, feedback, source, node, node.model)


def exact_models(graph: "Graph") -> "set[Model]":
    """The exact policies of a graph, and the generators that follow them."""
    found = {node.model for node in graph.nodes if node.model is not None and node.model.traits.exact}
    for node in graph.nodes:
        source = node.feedback.source if node.feedback is not None else None
        if node.model is not None and source is not None and source.node.model in found:
            found.add(node.model)
    return found


def _check_reader(graph: "Graph", feedback: "Feedback", source: "Model", node: "Node", model: "Model") -> None:
    where = f"graph '{graph.name}': node '{node.name}' follows feedback '{feedback.name}' of a policy with exact=True"
    sampling = node.traits.sampling
    if feedback.depth > 0:
        raise GraphError(
            f"{where}, at depth={feedback.depth}: responses of older weights have other log-probs; use depth=0, or leave out exact"
        )
    if not model.traits.samples_exactly:
        raise GraphError(f"{where}, but its engine has other kernels than the trainer; use engine='vllm', or leave out exact")
    if model.path != source.path:
        raise GraphError(f"{where} of '{source.path}', and its own model is '{model.path}'; give the same path, or leave out exact")
    if model.traits.dtype != source.traits.dtype:
        raise GraphError(
            f"{where} and dtype='{source.traits.dtype}', and has dtype='{model.traits.dtype}'; use "
            f"rg.Generator(…, dtype='{source.traits.dtype}')"
        )
    if model.traits.tensor_parallel > 1 or model.group > 1:
        raise GraphError(f"{where}, and an engine spans {model.group} GPUs, which add up in another order; use tensor_parallel=1")
    own = [name for name, given in (("weights_dtype", model.traits.weights_dtype), ("drafts", model.traits.drafts)) if given is not None]
    if own:
        raise GraphError(f"{where}, and its engine has {own[0]}=, which computes in another way; leave out {own[0]}, or exact")
    if sampling is not None and not sampling.is_full_distribution:
        raise GraphError(
            f"{where}, and samples with top_p={sampling.top_p}, top_k={sampling.top_k} and temperature={sampling.temperature}: the "
            "trainer's log-probs cover the whole vocabulary; use top_p=1, top_k=0 and a temperature above 0"
        )


# The rules of feedback edges that carry an adapter: each reader merges it into the same base.


def check_adapters(graph: "Graph") -> None:
    """Refuse readers of an adapter that do not generate, whose engine merges none, that read another folder, or that span devices."""
    for feedback in graph.feedbacks:
        source = feedback.source.node.model if feedback.source is not None else None
        if source is None or source.traits.adapter is None:
            continue
        for node in graph.nodes:
            if node.feedback is not feedback or node.model is None:
                continue
            where = f"graph '{graph.name}': node '{node.name}' follows feedback '{feedback.name}', which carries an adapter"
            if node.traits.work != "generate":
                raise GraphError(f"{where}; only a generator merges one: use policy.log_probs(rollout), or leave out adapter=")
            if not node.model.traits.merges_adapters:
                raise GraphError(
                    f"{where}, but its engine is not tested with adapters: use engine='transformers' or 'vllm', or leave out adapter="
                )
            if node.model.path != source.path:
                raise GraphError(
                    f"{where} of '{source.path}', and its own model is '{node.model.path}'; both start from one folder, since only the "
                    "adapter is sent: give the same path"
                )
            if node.model.group > 1:
                raise GraphError(
                    f"{where}, but its engine spans {node.model.group} devices, which share weights that arrive whole: use "
                    "tensor_parallel=1, or leave out adapter="
                )


# The rule of graphs whose engines tell which experts they chose, `Generator(routes=True)`.


def check_route_readers(graph: "Graph") -> None:
    """Refuse routes that nobody reads: they are the largest columns of a rollout."""
    read = {node.source_of("routes") for node in graph.nodes if "routes" in node.reads}
    for node in graph.nodes:
        if node.traits.work == "generate" and "routes" in node.writes and node not in read:
            raise GraphError(
                f"graph '{graph.name}': node '{node.name}' samples with routes=True, and nothing reads the routes; train a policy with "
                "router_replay=True on it, or leave out routes"
            )


# The round of its pool in which a node fires: an update on the rollout's own pool comes one or more rounds later.
#
#     depth=0    rollout 0, update 0, rollout 1, update 1, ...
#     depth=1    rollout 0, rollout 1, update 0, rollout 2, update 1, ...
#
# In the second order a reward on the host works on batch k while rollout k + 1 decodes. Node n fires for step r - lag(n) in round r.
# Every event waits for an earlier round, or for an earlier event of its own round, so no such order deadlocks.


def lags(graph: "Graph") -> "Mapping[Node, int]":
    """Count the rounds by which each node fires later than the rollout of its step; 0 for all if no update can give way.

    An update gives way if it has the devices of its rollout, a depth above 0, and waits for work on other devices. One round
    hides that work. At depth 2 the weights can also move during a rollout, which needs a version one round older. Each depth
    above 2 adds another round, for several such nodes one behind another.
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


def _blocked_nodes(graph: "Graph", rollout: "Node") -> "Iterator[Node]":
    """Yield the nodes of the rollout's pool that wait for work on other devices, if the update that publishes its weights is among them."""
    elsewhere = [node for node in nx.descendants(graph.forward, rollout) if node.pool is not rollout.pool]
    behind = {node for other in elsewhere for node in nx.descendants(graph.forward, other) if node.pool is rollout.pool}
    if rollout.feedback is not None and rollout.feedback.source is not None and rollout.feedback.source.node in behind:
        yield from behind


def _must_be_late(graph: "Graph", node: "Node", late: "set[Node]", most: int) -> bool:
    """Tell whether a node reads from a late one, fires in its worker, works on the same chunks, or needs its weights too soon."""
    feedback = node.feedback
    soon = feedback is not None and (graph.is_separate_evaluation(node) or feedback.depth < most)
    return (
        any(output.node in late for output in node.inputs)
        or any(node.model is not None and node.model is other.model for other in late)
        or any(node.follows is not None and node.follows is other.follows for other in late)
        or (soon and feedback is not None and feedback.source is not None and feedback.source.node in late)
    )


SAMPLED = "rollout_log_probs"  # the engine's, under its own sampling
MAX_SLOTS = 64  # of a channel
MAX_DEPTH = MAX_SLOTS - 2  # prompts are up to two batches further ahead


DEPTH_RULE = "how many weight versions a trained batch may be behind, a whole number of at least 0 (0 is on-policy, 1 is one-step-off)"
BUFFERS_RULE = "1, the generator's one copy of the weights, or 2, so that it receives while it decodes"


def check_pool(name: str, share: float | None, gpus: int | None, cpus: int | None) -> None:
    """Refuse a pool with two of `share`, `gpus` and `cpus`."""
    if gpus is not None and cpus is not None:
        raise GraphError(f"pool '{name}' has both gpus={gpus} and cpus={cpus}; a pool is of one kind: make two pools")
    if share != 1 and (gpus is not None or cpus is not None):
        raise GraphError(f"pool '{name}' has a share and an exact count; give one of them")


def check_feedback(name: str, depth: int, buffers: int, latest: bool) -> None:
    """Refuse a depth beyond the slots of a channel, and settings without effect at depth 0."""
    where = f"feedback '{name}'"
    if depth > MAX_DEPTH:
        raise GraphError(f"{where} has depth={depth}; at most {MAX_DEPTH} are possible, since a channel holds 64 batches")
    if depth == 0 and buffers == 2:
        raise GraphError(f"{where} has buffers=2 at depth=0, where nothing is decoded while weights arrive; use buffers=1 or depth>=1")
    if depth == 0 and latest:
        raise GraphError(f"{where} has latest=True at depth=0, where only one version exists; leave it out, or use depth>=1")


def check_edge_of_columns(feedback: "Feedback", plain: bool) -> None:
    """Refuse settings of weights on an edge of columns; `plain` says that it has none."""
    if feedback.columns and not plain:
        raise GraphError(
            f"feedback '{feedback.name}' carries columns {list(feedback.columns)}: buffers, latest, bucket_bytes and checksum are about "
            "weights and have no effect; leave them out"
        )


def check_edges(name: str, reads: Sequence[str], feedback: "Feedback | None", earlier: "Feedback | None") -> None:
    """Refuse an edge of columns where weights are due and the reverse, and columns that the node reads of its own step too."""
    if feedback is not None and feedback.columns:
        raise GraphError(
            f"node '{name}' loads weights from feedback '{feedback.name}', which carries columns; pass a feedback without columns="
        )
    if earlier is None:
        return
    if not earlier.columns:
        raise GraphError(f"node '{name}' has earlier='{earlier.name}', which carries weights; pass rg.feedback(…, columns='rewards')")
    twice = sorted(set(reads) & set(earlier.columns))
    if twice:
        raise GraphError(
            f"node '{name}' reads {twice} from the current step and from an earlier one; names of columns must differ: rename one of them"
        )


def check_close(feedback: "Feedback", source: "Output | None", given: Any) -> None:
    """Check what `feedback.close` was given; `source` is the same value, or None if it is no output of weights, or of columns."""
    where = f"feedback '{feedback.name}'"
    if feedback.source is not None:
        raise GraphError(f"{where} is closed twice; an edge has one source: make a second feedback for a second update")
    if feedback.columns:
        missing = [column for column in feedback.columns if source is None or column not in source.columns]
        if missing:
            raise GraphError(f"{where} was closed with {describe(given)}; close it with the output of a node that carries {missing}")
        return
    if source is None:
        raise GraphError(f"{where} was closed with {describe(given)}; close it with the weights of an update, as close(step.weights)")
    if source.node.model is not None and source.node.model.role == "critic":
        raise GraphError(
            f"{where} was closed with the weights of '{source.node.name}', a critic; close it with those of the policy's update"
        )


def check_inputs(name: str, inputs: Sequence["Output"], reads: Sequence[str]) -> None:
    """Refuse a column that no input or more than one carries, and an input of which nothing is read."""
    where = f"node '{name}'"
    carried = Counter(column for output in set(inputs) for column in output.columns)
    names = [output.node.name for output in inputs]
    for column in reads:
        if carried[column] == 0:
            raise GraphError(f"{where} reads column '{column}', which none of its inputs {names} carries; {_fix(column, inputs)}")
        if carried[column] > 1:
            both = [output.node.name for output in inputs if column in output.columns]
            raise GraphError(
                f"{where} reads column '{column}', which {both} both carry; pass one of them, or join them in a node of your own"
            )
    for output in inputs:
        if not set(output.columns) & set(reads):
            raise GraphError(
                f"{where} reads nothing of its input '{output.node.name}', which carries {list(output.columns)}; "
                f"it reads {list(reads)}: leave that input out"
            )
    check_whole_distribution(name, inputs, reads)


def check_whole_distribution(name: str, inputs: Sequence["Output"], reads: Sequence[str]) -> None:
    """Refuse a reader of a rollout's log-probs if they are those of some tokens only: a trainer's are always those of all tokens."""
    for output in inputs:
        sampling = output.node.traits.sampling
        if sampling is None or sampling.is_full_distribution or output.prefix + SAMPLED not in {*output.columns} & {*reads}:
            continue
        raise GraphError(
            f"node '{name}' reads '{SAMPLED}' of '{output.node.name}', which samples with top_p={sampling.top_p}, "
            f"top_k={sampling.top_k} and temperature={sampling.temperature}: the engine samples from some tokens, the trainer's log-probs "
            "cover the whole vocabulary; use top_p=1, top_k=0 and a temperature above 0, or pass policy.log_probs(rollout) to an update"
        )


def _fix(column: str, inputs: Sequence["Output"]) -> str:
    upstream = [output.node for output in inputs]
    while upstream:
        node = upstream.pop(0)
        if column in node.writes:
            return f"pass the output of '{node.name}' to it"
        upstream += [output.node for output in node.inputs]
    if column in COLUMNS:
        return f"pass the output of '{COLUMNS[column].written_by}' to it"
    there = dict.fromkeys(name for output in inputs for name in output.columns)
    return f"{choices(column, there)}; or pass the output of a node that writes it"


def check_rows(node: "Node") -> None:
    """Refuse inputs whose rows cannot be repeated to those of the widest, and a node with a number of rows that fits them in no way."""
    alone = len({output.prefix for output in node.inputs}) == 1
    for output in node.inputs:
        widest = max(other.node.rows for other in node.inputs if other.prefix == output.prefix)
        chosen = alone and widest > node.rows > 0 and widest % node.rows == 0  # a node that keeps some rows of each group
        rows = node.rows if alone and not chosen else widest
        if output.node.rows <= 0 or rows % output.node.rows:
            raise GraphError(
                f"node '{node.name}' joins {rows} rows a step with the {output.node.rows} of '{output.node.name}'; "
                "one must be a multiple of the other"
            )


def check_chunks(node: "Node") -> None:
    """Refuse a number of chunks that does not divide the rows of each input."""
    for output in node.inputs:
        if node.chunks > 1 and output.node.rows % node.chunks:
            raise GraphError(
                f"node '{node.name}' has chunks={node.chunks}, which does not divide the {output.node.rows} rows a step of "
                f"'{output.node.name}'; chunks are of equal size and hold whole groups: choose a divisor, or another count of prompts"
            )


def check_unique_names(graph: "Graph") -> None:
    """Plans, channels and reports identify nodes and pools by their names."""
    for name, count in Counter(node.name for node in graph.nodes).items():
        if count > 1:
            raise GraphError(f"graph '{graph.name}' has {count} nodes called '{name}'; give each its own with name=")
    for name, count in Counter(pool.name for pool in graph.pools).items():
        if count > 1:
            raise GraphError(f"graph '{graph.name}' has {count} different pools called '{name}'; use one Pool object, or two names")


def check_closed_edges(graph: "Graph") -> None:
    """An open feedback edge has no update that sends weights."""
    for feedback in (*graph.feedbacks, *graph.earlier):
        if feedback.source is None:
            fix = f"{feedback.name}.close(output)" if feedback.columns else "weights.close(step.weights)"
            raise GraphError(f"graph '{graph.name}' has an open feedback '{feedback.name}'; close it with {fix}")


def check_edge_cycles(graph: "Graph") -> None:
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


def check_edge_readers(graph: "Graph") -> None:
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


def check_column_cycles(graph: "Graph") -> None:
    """Columns of an earlier step come from a node that depends on the one that gets them: neither is then ahead of the other."""
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


def check_prompt_readers(graph: "Graph") -> None:
    """A node that draws prompts by itself takes them from the source, so no other node can read the same ones."""
    takers = {id(n.traits.draws_from): n for n in graph.nodes if n.traits.draws_from is not None}
    for node in graph.nodes:
        drawn = [o.node for o in node.inputs if id(o.node.operation) in takers]
        if node.traits.draws_from is not None and takers[id(node.traits.draws_from)] is not node:
            raise GraphError(
                f"nodes '{node.name}' and '{takers[id(node.traits.draws_from)].name}' draw from one source of prompts, each as many as "
                "it needs, so both would train on the same prompts; declare a source for each"
            )
        if drawn:
            taker = takers[id(drawn[0].operation)].name
            raise GraphError(
                f"node '{node.name}' reads from '{drawn[0].name}', but '{taker}' draws these prompts by itself, as many as it needs: "
                f"the two would read different prompts; pass '{taker}' in place of '{drawn[0].name}'"
            )


def check_useful_depth(graph: "Graph") -> None:
    """A depth above 0 lets a rollout overlap with an update; without that it would only make batches stale."""
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
                "overlap: the next rollout comes before the update only where the update waits for a node on the host, such as a reward, "
                "and no model that it has to wait for generates; use depth=0, or two pools"
            )


def check_continuous_pools(graph: "Graph") -> None:
    """Responses stay in the engine between two firings, so no other model may take their memory."""
    for node in graph.nodes:
        if not node.traits.continuous:
            continue
        others = [n.name for n in graph.nodes if n.pool is node.pool and n.model is not node.model]
        if others:
            raise GraphError(
                f"node '{node.name}' has continuous=True, so responses stay in its engine between two steps, but {others} run in the same "
                f"pool '{node.pool.name if node.pool else ''}' and need its memory: give the generator a pool of its own"
            )


def check_single_update(graph: "Graph") -> None:
    """One step makes one version of the weights: two updates of a model would make two, and the edge carries the first alone."""
    updates: dict[int, Any] = {}
    for node in (node for node in graph.nodes if node.model is not None and node.traits.work == "train"):
        other = updates.setdefault(id(node.model), node)
        if other is not node:
            raise GraphError(
                f"nodes '{other.name}' and '{node.name}' both update one {node.model.role if node.model else 'model'}; a step "
                "has one update of a model: give it epochs= or mini_batches= for several optimizer steps, or make a second model"
            )


def check_single_edge(graph: "Graph") -> None:
    """A model holds the weights of one feedback edge: nodes that follow another, and rollouts that follow none, would use them too."""
    for node in (node for node in graph.nodes if node.model is not None and node.feedback is not None):
        works = {node.traits.work, "generate"}
        others = (n for n in graph.nodes if n.model is node.model and n.feedback is not node.feedback)
        other = next((n for n in others if n.feedback is not None or works == {n.traits.work}), None)
        if other is not None and node.feedback is not None:
            raise GraphError(
                f"graph '{graph.name}': nodes '{node.name}' and '{other.name}' are of one model, and follow feedback "
                f"'{node.feedback.name}' and {repr(other.feedback.name) if other.feedback else 'none'}; a model holds the weights of one "
                f"edge: give each of them a {type(node.model).__name__} of its own, in one pool if they are to share devices"
            )


def check_update_order(graph: "Graph") -> None:
    """Old log-probs and values are computed before the update: the nodes of a model fire in the order of their declaration."""
    for node in graph.nodes:
        trained = next((n for n in graph.nodes if n.model is node.model and n.traits.work == "train" and n.serial < node.serial), None)
        if node.model is not None and trained is not None and {"old_log_probs", "values"} & set(node.writes):
            raise GraphError(
                f"node '{node.name}' is declared after '{trained.name}', so it would see the updated weights; {list(node.writes)} must "
                "come from the weights before the update: declare it before the update"
            )


def check_chunk_readers(graph: "Graph") -> None:
    """Chunks help only if some node works on one while the rest decodes."""
    for rollout in (node for node in graph.nodes if node.stream is node):
        readers = list(graph.forward.successors(rollout))
        if not any(reader.follows is rollout for reader in readers):
            reasons = "; ".join(f"'{reader.name}' {_why_full_batch(reader, rollout)}" for reader in readers)
            raise GraphError(
                f"node '{rollout.name}' has chunks={rollout.chunks}, but no node can work on a chunk while the rest is decoded: {reasons}; "
                "leave chunks out"
            )


def _why_full_batch(reader: "Node", rollout: "Node") -> str:
    if reader.pool is not None and reader.pool is rollout.pool:
        return f"runs in its pool '{rollout.pool.name if rollout.pool else ''}', so only after it"
    if not reader.traits.by_group:
        return "takes the whole batch (a reward or node of your own works on chunks with by_group=True)"
    return "also reads a column of the whole batch, or of another rollout's chunks"


def check_chunk_sizes(graph: "Graph") -> None:
    """All chunks of the open batches fit into the slots of a channel."""
    open_batches = 1 + max((feedback.depth for feedback in graph.feedbacks), default=0)
    for node in graph.nodes:
        if node.chunks > 1 and open_batches * node.chunks > MAX_SLOTS:
            raise GraphError(
                f"node '{node.name}' has chunks={node.chunks}, and {open_batches} batches may be open: {open_batches * node.chunks} "
                f"chunks, but a channel has {MAX_SLOTS} slots; lower chunks or the depth"
            )


def check_evaluation_delay(graph: "Graph") -> None:
    """An evaluation with a generator of its own may not keep other nodes of its pool waiting."""
    for node in (node for node in graph.nodes if graph.is_separate_evaluation(node)):
        others = [other.name for other in graph.nodes if other.pool is node.pool and other.due is None]
        if others:
            raise GraphError(
                f"node '{node.name}' evaluates on a separate generator in pool '{node.pool.name if node.pool else ''}', where {others} "
                "would wait for it; give it a separate pool, or evaluate on the rollout's generator, which is free between rollouts"
            )


GRAPH_RULES: tuple[Callable[["Graph"], None], ...] = (
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
    check_chunk_sizes,
    check_evaluation_delay,
    check_adapters,
    check_exact,
    check_route_readers,
)


def describe(value: Any) -> str:
    """Describe a wrong argument in a message: an output by its node, anything else with its type."""
    text = show_value(value)
    return text if text.startswith(("a ", "an ", "the ")) else f"{type(value).__name__} {text}"
