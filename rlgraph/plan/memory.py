"""Estimate the peak memory of each device and of the host from model shapes, and refuse a plan that cannot fit."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from rlgraph.channels.api import transport_of
from rlgraph.errors import PlanError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Feedback, Model, Node
from rlgraph.plan.channels import slot_bytes, staged_versions, weights_transport
from rlgraph.plan.cluster import Cluster, itemsize_of, precision_of
from rlgraph.plan.cost_functions import Setting, SleepCost, group_of
from rlgraph.plan.costs import Costs
from rlgraph.plan.estimates import PIECE_BYTES, default_estimates
from rlgraph.plan.events import Sleeps, evaluations, readers, sleep_costs
from rlgraph.plan.lengths import Lengths
from rlgraph.plan.model_shapes import (
    GRADIENT,
    MASTER,
    MOMENTS,
    STEP,
    ModelShape,
    Need,
    Shapes,
    Tower,
    Workload,
    adapter_size,
    frozen_bytes,
    generators_tower,
    tokens_of,
    tower_of,
    trained_tower,
)
from rlgraph.plan.placement import homes_of, model_names
from rlgraph.plan.plan import PlannedMemory, PlannedWorker
from rlgraph.settings import RECOMPUTE, Recompute
from rlgraph.values.pool import Pool

# The frozen bases that trainers of adapters share: one copy per host for all models of one folder that train there on cores.


@dataclass(frozen=True)
class PlannedBase:
    """The base of the model folder `path` in `dtype`, which is in memory once for all workers of `models` on a host."""

    path: str
    dtype: str
    host: int
    models: tuple[str, ...]

    @property
    def part(self) -> str:
        """Its name among the parts of the host's memory.

        >>> PlannedBase("tiny", "float32", 0, ("policy", "critic")).part
        'base of policy, critic'
        """
        return f"base of {', '.join(self.models)}"


def shared_bases(graph: Graph, cluster: Cluster, workers: Sequence[PlannedWorker]) -> tuple[PlannedBase, ...]:
    """Find the bases that at least two models of a host share.

    These train adapters of one folder in one dtype, each in one process on cores, with a trainer that `shares_base`. A base of 4 bits is
    never shared.
    """
    models = {node.name: node.model for node in graph.nodes}
    found: dict[tuple[str, str, int], list[str]] = {}
    for worker in workers:
        model = models.get(worker.nodes[0])
        if model is None or worker.model is None or worker.gpus or worker.world > 1:
            continue
        adapter, precision = model.traits.adapter, precision_of(model, cluster)
        if model.traits.shares_base and adapter is not None and adapter.base is None and precision is not None:
            found.setdefault((model.path, precision.dtype, worker.host), []).append(worker.model)
    return tuple(PlannedBase(*key, tuple(names)) for key, names in found.items() if len(names) > 1)


def base_bytes(model: Model, cluster: Cluster, shapes: Shapes) -> int:
    """Count the bytes of the base of a model that trains an adapter; 0 if its shape is unknown."""
    shape = shapes.get(model.path)
    size = adapter_size(model, shape)
    return 0 if shape is None or size is None else frozen_bytes(model, shape, size, itemsize_of(model, cluster))


# Memory while models load: a trainer's ranks read their own shards; other engines each read a full model, first into host memory.

Parts = dict[str, int]  # bytes by what they are


def loading_peaks(graph: Graph, cluster: Cluster, workers: Sequence[PlannedWorker], shapes: Shapes) -> Iterator[PlannedMemory]:
    """Estimate the peak of each pool's GPUs and of the fullest host while all workers load their models at once.

    Pools and hosts with a model of unknown shape are left out, since their sum would be too small.
    """
    models = {node.name: node.model for node in graph.nodes if node.model is not None}
    ranks = Counter(worker.model for worker in workers)
    on_hosts: dict[int, Parts] = {}
    on_gpus: dict[str, dict[int, Parts]] = {}
    unknown = set[str | int]()
    shared = {(name, base.host): base for base in shared_bases(graph, cluster, workers) for name in base.models}
    for worker in workers:
        model = models.get(worker.nodes[0]) if worker.model is not None else None
        if model is None or worker.model is None:
            continue
        if model.path not in shapes:
            unknown |= {worker.host, model.pool.name}
            continue
        works = {node.traits.work for node in graph.nodes if node.model is model}
        estimates, shape = model.traits.estimates or default_estimates(works), shapes[model.path]
        adapter = adapter_size(model, shape)
        if adapter is None:
            size = estimates.loading_bytes(shape.parameters + generators_tower(graph, model), itemsize_of(model, cluster))
        else:
            size = frozen_bytes(model, shape, adapter, itemsize_of(model, cluster)) + adapter.bytes
        whole, host = {f"whole weights of {worker.model}": size}, {f"whole weights of {worker.model}": size}
        if estimates.reads_shards:
            piece = {f"pieces of files of {worker.model}": PIECE_BYTES}
            share = -(-size // ranks[worker.model])
            if estimates.in_each_group:
                traits = model.traits
                own = shape.own_parameters(traits.tensor_parallel, traits.pipeline_parallel, traits.expert_parallel)
                share = size * own // shape.parameters
            whole = {f"weights of {worker.model}": share} | piece
            if base := shared.get((worker.model, worker.host)):
                frozen = base_bytes(model, cluster, shapes)
                whole[f"weights of {worker.model}"] -= frozen
                on_hosts.setdefault(worker.host, {})[base.part] = frozen
            host = piece if worker.gpus else whole
        elif "generate" in works and worker.gpus:  # a GPU engine maps its file
            host = {}
        for gpu in worker.gpus:  # an engine over several GPUs holds a shard on each
            held = on_gpus.setdefault(model.pool.name, {}).setdefault(gpu, {})
            _add(held, {what: part // len(worker.gpus) for what, part in whole.items()})
        if host:
            _add(on_hosts.setdefault(worker.host, {}), host)
    for pool, gpus in on_gpus.items():
        if pool not in unknown:
            yield _fullest(pool, gpus.values(), cluster.gpu_memory_bytes)
    if hosts := [parts for host, parts in on_hosts.items() if host not in unknown]:
        yield _fullest(None, hosts, cluster.host_memory_bytes)


def _add(held: Parts, more: Parts) -> None:
    for what, size in more.items():
        held[what] = held.get(what, 0) + size


def _fullest(pool: str | None, each: Iterable[Parts], limit: int | None) -> PlannedMemory:
    parts = max(each, key=lambda held: sum(held.values()))
    total = sum(parts.values())
    return PlannedMemory(pool, tuple(parts.items()), total, total, limit, loading=True)


PROMPT_TOKENS = 512.0  # assumed if neither a context nor lengths are known
GIB = 1 << 30
SLOTS_LEAST = 64 << 20  # share of all slots: less is lost in each process's own memory
IMAGES = "activations of images"
REST = "rest of the engine's share"
EVEN = 16  # divides the sides of matrices in fp8; vLLM pads other matrices


def needs(
    graph: Graph,
    cluster: Cluster,
    workers: Sequence[PlannedWorker],
    settings: Mapping[str, Setting],
    shapes: Shapes,
    costs: Costs,
    recompute: Recompute = False,
) -> tuple[PlannedMemory, ...]:
    """Estimate the peak of each pool's devices, and of the host, as far as the shapes of the models are known.

    Trainers that support it are assumed to use at least this `recompute`.
    """
    lengths = costs.lengths
    found, host = [], dict[str, int]()
    moving = [_transfer_memory(graph, feedback, workers, shapes, cluster) for feedback in graph.feedbacks]
    sleeps = sleep_costs(graph, workers, settings, costs.sleep)
    by_name, bases = model_names(graph), shared_bases(graph, cluster, workers)
    shared = {by_name[name]: base_bytes(by_name[name], cluster, shapes) for base in bases for name in base.models}
    for pool in (pool for pool in graph.pools if pool.cpus is None):
        models = [model for model in graph.models if model.pool is pool]
        if not models or any(model.path not in shapes for model in models):
            continue
        each = {model: _need(graph, model, shapes[model.path], settings, lengths, cluster, recompute) for model in models}
        names = {model: next(node.name for node in graph.nodes if node.model is model) for model in models}
        if cluster.gpus:
            for model, name in names.items():
                each[model] = _with(_in_turns(each[model], sleeps.get(name)), _on_the_way(moving, model, settings[name]))
                each[model] = _with_share(each[model], model, cluster.gpu_memory_bytes, shared=name in sleeps)
            found.append(_on_gpu(pool, [*each.values()], cluster.gpu_memory_bytes))
            continue
        for model, need in each.items():
            ranks, of_others = settings[names[model]].engines, shared.get(model, 0)
            for what, size in [*need.stays.items(), *need.runs.items()]:
                host[what] = host.get(what, 0) + (size - (of_others if what == "weights" else 0)) * ranks
    if offloaded := _host_moments(graph, workers, shapes):
        host["optimizer"] = host.get("optimizer", 0) + offloaded
    if asleep := _asleep(graph, cluster, settings, sleeps):
        host["asleep"] = asleep
    held = [base for base in bases if any(by_name[name].pool.cpus is None for name in base.models)]
    host |= {base.part: base_bytes(by_name[base.models[0]], cluster, shapes) for base in held if base.path in shapes}
    staged = sum(weights.bytes for weights in moving if transport_of(weights.transport).writer_keeps == "host")
    if staged:  # on the trainer's host, and once on each other host with readers
        host["weights in staging"] = staged
    if (slots := slot_bytes(graph, workers)) >= SLOTS_LEAST:
        host["slots of batches"] = slots
    if host:
        spare = sum(
            host.get(what, 0) for what in ("keys and values", "activations", "gradients of layers", "logits")
        )  # a host allocates pages when they are touched
        total = sum(host.values())
        found.append(PlannedMemory(None, tuple(host.items()), total, total - spare, cluster.host_memory_bytes))
    later = {need.pool: need.least_bytes for need in found}
    return (*found, *(need for need in loading_peaks(graph, cluster, workers, shapes) if need.peak_bytes > later.get(need.pool, 0)))


def _host_moments(graph: Graph, workers: Sequence[PlannedWorker], shapes: Shapes) -> int:
    """Estimate the moments that ranks keep on the fullest host."""
    models = {node.name: node.model for node in graph.nodes if node.model is not None and node.traits.work == "train"}
    held: dict[int, int] = {}
    for worker in workers:
        model = next((models[name] for name in worker.nodes if name in models), None)
        if model is not None and model.traits.host_moments and model.path in shapes:
            ranks = sum(other.model == worker.model for other in workers)
            size = adapter_size(model, shapes[model.path])
            trained = shapes[model.path].parameters if size is None else size.parameters
            held[worker.host] = held.get(worker.host, 0) + int(MOMENTS[model.traits.optimizer.moments] * trained) // ranks
    return max(held.values(), default=0)


def _asleep(graph: Graph, cluster: Cluster, settings: Mapping[str, Setting], sleeps: Sleeps) -> int:
    """Estimate the host memory of sleeping engines and moments if models time-share GPUs: pinned memory is never freed."""
    sleeping = {node.model: node.name for node in graph.nodes if node.name in sleeps}
    total = sum((sleeps[name].bytes or 0) * settings[name].devices for name in sleeping.values())
    devices = {node.pool: settings[node.name].devices for node in graph.nodes if node.pool is not None and node.pool.cpus is None}
    return total // max(1, -(-sum(devices.values()) // cluster.gpus_per_node))  # hosts have as much each


def _in_turns(need: Need, sleep: SleepCost | None) -> Need:
    """Count moments as on the GPU only while their own trainer runs, if they move to the host while another model uses it."""
    return need if sleep is None or not sleep.bytes else need.while_it_runs("optimizer")


def _with(need: Need, more: Mapping[str, int]) -> Need:
    return replace(need, stays={**need.stays, **more})


def _with_share(need: Need, model: Model, limit: int | None, *, shared: bool) -> Need:
    """Add the memory that an awake engine reserves beyond its need: its full share of a GPU, with the versions that it receives."""
    usual = model.traits.estimates.shares if model.traits.estimates is not None else None
    share = model.traits.memory or (usual[shared] if usual is not None else 0.0)
    runs_in = int(share * (limit or 0)) - sum(need.stays.values())
    rest = runs_in - sum(need.runs.values())
    return replace(need, runs={**need.runs, REST: rest}, least=max(need.least, runs_in)) if rest > 0 else need


def _on_gpu(pool: Pool, each: Sequence[Need], limit: int | None) -> PlannedMemory:
    """Add the resident memory of all models that time-share a pool to the most that one of them needs while it runs."""
    parts: dict[str, int] = {}
    for need in each:
        for what, size in need.stays.items():
            parts[what] = parts.get(what, 0) + size
    largest = max(each, key=lambda need: sum(need.runs.values()))
    instants = tuple((instant, tuple(there.items())) for instant, there in largest.instants.items())
    for what, size in largest.runs.items():
        parts[what] = parts.get(what, 0) + size
    stays = sum(size for need in each for size in need.stays.values())
    least = stays + max(need.least for need in each)
    return PlannedMemory(pool.name, tuple(parts.items()), sum(parts.values()), least, limit, instants=instants)


def _need(
    graph: Graph,
    model: Model,
    shape: ModelShape,
    settings: Mapping[str, Setting],
    lengths: Lengths | None,
    cluster: Cluster,
    recompute: Recompute,
) -> Need:
    nodes = [node for node in graph.nodes if node.model is model]
    works = {node.traits.work for node in nodes}
    setting = settings[nodes[0].name]
    generates = "generate" in works
    longest = _longest_of(model, lengths) if generates or model.traits.max_context else _longest(graph, lengths)
    work = Workload(
        shape=shape,
        itemsize=itemsize_of(model, cluster),
        workers=setting.engines,
        width=setting.width if cluster.gpus else 1.0,  # cores of a process share its memory
        rows=setting.rows if generates else max(node.rows for node in nodes),
        longest=longest,
        usual=min(lengths.mean + lengths.prompt_tokens, longest) if lengths else longest,
        copies=max((f.buffers for n in nodes if (f := n.feedback) is not None), default=1),
        trained="train" in works,
        traits=replace(model.traits, recompute=max(model.traits.recompute, recompute if "train" in works else False, key=RECOMPUTE.index)),
        packed=model.traits.exact and not cluster.gpus,
    )
    own, followed = adapter_size(model, shape), [adapter_size(_source(n), shape) for n in nodes]
    if own is not None:
        frozen = frozen_bytes(model, shape, own, work.itemsize)
        work = replace(work, adapter=own.parameters, frozen_bytes=frozen, remade=frozen < shape.parameters * work.itemsize)
    largest = max((size for size in followed if size is not None), key=lambda size: size.matrices, default=None)
    if largest is not None:  # on a host the base is mapped from its files
        work = replace(work, merged=largest.matrices if cluster.gpus else 0, version_bytes=largest.bytes)
    need = (model.traits.estimates or default_estimates(works)).memory_estimate(work)
    tower = max(filter(None, map(tower_of, nodes)), key=attrgetter("kept"), default=None)
    if tower is None:
        return need
    size = tower.parameters * work.itemsize
    if work.trained and work.traits.train_vision:  # a shard as of the other weights; features are not kept
        each = MASTER + GRADIENT + MOMENTS[work.traits.optimizer.moments] if work.adapter is None else work.itemsize
        need = _with(need, {"image tower": int(each * tower.parameters) // work.workers})
        return _with_activations(need, work, tower, min(map(group_of, nodes)))
    if not generates:  # it is whole on each rank, and stays while others use the device
        return _with(need, {"image tower": size, "features of images": tower.kept * work.itemsize})
    more = work.copies - 1 if any(source.traits.train_vision for source in map(_source, nodes) if source is not None) else 0
    size = int(size / max(work.width, 1.0)) + more * size  # as of the other weights
    return replace(need, runs={**need.runs, "image tower": size}, least=need.least + size)


def _with_activations(need: Need, work: Workload, tower: Tower, group: int) -> Need:
    """Add what a pass of a rank keeps of the images of its prompts, which `group` of its rows share, until its backward pass ends."""
    rows = min(tokens_of(work) / work.usual, work.rows / work.workers)
    size = int(math.ceil(rows / group) * tower.activations(work.traits.recompute) * work.itemsize)
    return Need.of(need.stays, {at: there if at == STEP else {**there, IMAGES: size} for at, there in need.instants.items()})


def _source(node: Node) -> Model | None:
    """The model whose weights a node follows."""
    source = node.feedback.source if node.feedback is not None else None
    return None if source is None else source.node.model


def _longest(graph: Graph, lengths: Lengths | None) -> float:
    """Bound the tokens of a prompt and its response together, by the limits of the generators."""
    models = [node.model for node in graph.nodes if node.traits.work == "generate" and node.model is not None]
    return max((_longest_of(model, lengths) for model in models), default=float(1 << 20))


def _longest_of(model: Model, lengths: Lengths | None) -> float:
    bound, sampling = model.traits.max_context, model.traits.sampling
    responses = sampling.max_tokens if sampling is not None else 1024
    return float(bound) if bound else responses + (lengths.prompt_tokens if lengths else PROMPT_TOKENS)


@dataclass(frozen=True)
class _Moving:
    """Weights on a feedback edge: all versions that are staged at once."""

    source: Model | None
    readers: tuple[Model | None, ...]
    transport: str
    bytes: int


def _transfer_memory(graph: Graph, feedback: Feedback, workers: Sequence[PlannedWorker], shapes: Shapes, cluster: Cluster) -> _Moving:
    on_gpus = cluster.gpus > 0
    assert feedback.source is not None
    writer, reading = feedback.source.node, readers(graph, feedback) or evaluations(graph, feedback)
    itemsize = itemsize_of(reading[0].model, cluster)
    parameters = shapes[writer.model.path].parameters if writer.model is not None and writer.model.path in shapes else 0
    parameters += trained_tower(graph, writer.model)
    adapter = adapter_size(writer.model, shapes.get(writer.model.path)) if writer.model is not None else None
    version = parameters * itemsize if adapter is None else adapter.bytes
    size = staged_versions(feedback, on_gpus=on_gpus) * version
    return _Moving(
        writer.model, tuple(n.model for n in reading), weights_transport(homes_of(workers), writer, reading, on_gpus=on_gpus), size
    )


def _on_the_way(moving: Sequence[_Moving], model: Model, setting: Setting) -> dict[str, int]:
    """Estimate the memory of weights that move from GPU to GPU: each training rank stages its shard, and NCCL writes whole versions into
    memory of the reading GPU, which is the first GPU of an engine."""
    staged = sum(w.bytes for w in moving if w.source is model and transport_of(w.transport).writer_keeps == "gpu") // setting.engines
    carried = sum(w.bytes for w in moving if model in w.readers and transport_of(w.transport).reader_keeps == "gpu")
    parts = {"weights in staging": staged, "weights carried by NCCL": carried}
    return {what: size for what, size in parts.items() if size}


def needs_that_fit(
    graph: Graph,
    cluster: Cluster,
    workers: Sequence[PlannedWorker],
    settings: Mapping[str, Setting],
    shapes: Shapes,
    costs: Costs,
) -> tuple[PlannedMemory, ...]:
    """Estimate memory as `needs` does. Raises PlanError if it does not fit; the error names the least `recompute` that is enough."""

    def needs_with(recompute: Recompute = False) -> tuple[PlannedMemory, ...]:
        return needs(graph, cluster, workers, settings, shapes, costs, recompute)

    memory = needs_with()
    if not all(map(_fits, memory)):
        trained = [node.model for node in graph.nodes if node.traits.work == "train" and node.model is not None]
        most = max((RECOMPUTE.index(model.traits.recompute) for model in trained), default=len(RECOMPUTE))
        enough = next((more for more in RECOMPUTE[most + 1 :] if all(map(_fits, needs_with(more)))), None)
        check_memory(graph.name, memory, None if enough is None else f"set recompute={enough!r}, with which it fits")
    return memory


def _fits(need: PlannedMemory) -> bool:
    return need.limit is None or need.least_bytes <= need.limit


def check_memory(graph: str, memory: Sequence[PlannedMemory], fix: str | None = None) -> None:
    """Raise PlanError for a device that cannot hold the least memory that a plan needs; the error names the largest items and a `fix`, by
    default the fix of the largest item."""
    for need in memory:
        if need.limit is not None and need.least_bytes > need.limit:
            largest = sorted(need.parts, key=lambda part: -part[1])[:3]
            parts = ", ".join(f"{what} {size / GIB:.1f} GiB" for what, size in largest)
            usual = FIXES["whole weights" if need.loading else largest[0][0] if largest[0][0] in FIXES else "weights"]
            raise PlanError(
                f"graph '{graph}' needs at least {need.least_bytes / GIB:.1f} GiB on {need.place}, which has {need.limit / GIB:.1f} GiB: "
                f"{parts}; {fix or usual}"
            )


FIXES = {
    "whole weights": "an engine reads its whole model, and a trainer's rank its share in float32: use more ranks of a trainer, fewer "
    "other engines on a host, separate pools, or a smaller model",
    "weights": "give that pool more devices, or use a smaller model",
    "engine's weights": "raise tensor_parallel, use buffers=1, or a smaller model",
    "optimizer": 'set offload="moments" or rg.AdamW(moments="16bit"), give that pool more devices, or use a smaller model',
    "activations": "lower micro_batch_tokens, raise tensor_parallel, or set recompute='selective' or True",
    IMAGES: "lower micro_batch_tokens, set recompute=True, leave out train_vision, or use smaller images",
    "gradients of layers": "raise tensor_parallel, train an adapter, or use a smaller model",
    "logits": "set fused_head=True, lower micro_batch_tokens, or raise tensor_parallel",
    "keys and values": "lower max_context or max_tokens",
    REST: "set a smaller memory= for the engine, its share of a GPU",
    "asleep": "give models that time-share GPUs separate pools, train an adapter, or set rg.AdamW(moments='8bit')",
    "slots of batches": "lower count, group_size, max_tokens or depth",
    "weights in staging": "lower depth, or use a smaller model",
    "weights carried by NCCL": "place trainer and generator on the same host, lower depth, or use a smaller model",
}


def check_drafts(graph: Graph) -> None:
    """Raise PlanError for an engine with drafts that spans GPUs."""
    for model in graph.models:
        if model.traits.drafts and model.group > 1:
            raise PlanError(
                f"graph '{graph.name}': Generator('{model.path}', drafts={model.traits.drafts}, tensor_parallel={model.group}): an engine "
                "with drafts runs on one GPU; leave one of them out"
            )


def check_fp8(graph: Graph, shapes: Shapes) -> None:
    """Raise PlanError for an engine with fp8 weights that spans GPUs or computes in float32, and for a model that cannot have such weights:
    a mixture of experts, or matrices that 16 does not divide."""
    for model in (model for model in graph.models if model.traits.weights_dtype):
        traits, shape = model.traits, shapes.get(model.path)
        here = f"graph '{graph.name}': Generator('{model.path}', weights_dtype='{traits.weights_dtype}'"
        other = f"tensor_parallel={model.group}" if model.group > 1 else "dtype='float32'" if traits.dtype == "float32" else None
        if other:
            raise PlanError(
                f"{here}, {other}): an engine with fp8 weights runs on one GPU and computes in bfloat16; leave out one of the two"
            )
        if shape is None:
            continue
        heads = {"num_attention_heads": shape.heads * shape.head_dim, "num_key_value_heads": shape.kv_heads * shape.head_dim}
        sides = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate} | {f"{n} x head_dim": s for n, s in heads.items()}
        uneven = next((f"{name} = {size}" for name, size in sides.items() if size % EVEN), None)
        why = "is a mixture of experts" if shape.experts > 1 else f"has {uneven}, which is not a multiple of {EVEN}" if uneven else None
        if why:
            raise PlanError(f"{here}): the model {why}; leave it out")


def check_moments_stay(graph: Graph) -> None:
    """Raise PlanError for `offload="never"` on a GPU that no other model uses."""
    for model in graph.models:
        if model.traits.moments_stay and not any(other.pool is model.pool for other in graph.models if other is not model):
            raise PlanError(
                f"graph '{graph.name}': {type(model).__name__}('{model.path}', offload='never'): no other model uses the pool "
                f"'{model.pool.name}', so the moments stay on its GPUs anyway; leave it out"
            )


def check_gpu_settings(graph: Graph, cluster: Cluster, shapes: Shapes) -> None:
    """Raise PlanError for a model without a GPU that has a share of a GPU's memory, moments offloaded to the host, engine arguments for
    GPUs, or head sizes that its engine does not support on host cores."""
    for node in graph.nodes:
        if node.model is None or (cluster.gpus and node.model.pool.cpus is None):
            continue
        where, traits = f"graph '{graph.name}': the model of node '{node.name}' has", node.model.traits
        if traits.host_moments:
            raise PlanError(f"{where} offload='moments', which frees memory of a GPU, but it trains on the host; leave it out")
        if traits.moments_stay:
            raise PlanError(f"{where} offload='never', for moments that leave a GPU to others, but it trains on the host; leave it out")
        if traits.memory is not None:
            raise PlanError(f"{where} memory={traits.memory}, a share of a GPU's, but this cluster has no GPU; leave it out")
        shape, heads = shapes.get(node.model.path), traits.estimates.host_heads if traits.estimates is not None else ()
        if shape is not None and heads and shape.head_dim not in heads:
            raise PlanError(
                f"{where} head_dim={shape.head_dim}; on host cores its engine has kernels for {', '.join(map(str, heads))}: use "
                "engine='transformers', or a GPU"
            )
        if traits.weights_dtype is not None:
            raise PlanError(f"{where} weights_dtype='{traits.weights_dtype}', for kernels of a GPU, but it runs on the host; leave it out")
        if traits.drafts is not None:
            raise PlanError(f"{where} drafts, for vLLM's runner of a GPU, but it runs on the host; leave them out there")
        for argument, reason in traits.gpu_only.items():
            raise PlanError(f"{where} engine_args with '{argument}', but it runs on the host: {reason}; leave it out")
