"""Estimates before anything starts: bytes and decode seconds of an engine, exchanges of ranks that share a pass, host times of a device."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import gcd

from rlgraph import settings
from rlgraph.errors import PlanError
from rlgraph.graph.graph import Graph
from rlgraph.graph.traits import ModelTraits, Work
from rlgraph.plan.cost_functions import Decode
from rlgraph.plan.model_shapes import (
    GRADIENT,
    MASTER,
    MOMENTS,
    OPTIMIZER,
    ModelShape,
    Need,
    Shapes,
    Workload,
    scoring_memory,
    update,
    update_in_place,
)

# What a device's roofline leaves out, measured on H200s: the host's time for each decode step and pass, what logits take, and the share
# of the peak that compiled layers reach.
#
# `benchmarks/prediction/a_priori.py --fit` derives the numbers from the results named here, and prints the errors on the results that
# were held out.


@dataclass(frozen=True)
class HostTime:
    """One number of the table, and the results in `benchmarks/results/` that it was fitted to."""

    value: float
    source: str


# What a decode step adds to reading the memory: its launch, its norms, and for each sequence its logits and its log-prob.
DECODED = "decode_steps_*_h200.json: SmolLM2, 0.6B, 1.7B and 4B"
DECODE_STEP_S, DECODE_SEQUENCE_S = HostTime(0.71e-3, DECODED), HostTime(1.12e-6, DECODED)
# Factor on both for each doubling of the engines that share a GPU, on which they take turns.
SHARING = HostTime(2.72, "generation_engines_h200.json: SmolLM2, four engines a GPU")
# The host's time to launch a pass forward and backward, for each layer; more if ranks gather and scatter the layer's shards.
PASS_LAYER_S = HostTime(7.75e-3, "prediction_h200.json: costs, pass_s of 1.7B and 4B over their layers")
SHARDED_PASS_LAYER_S = HostTime(15e-3, "prediction_h200.json: costs, sharded_pass_s of 1.7B and 4B over their layers")
# The host's time of a layer with experts over that of a dense one, by the operations it launches: about 1,300 in a layer and pass that
# computes again (43,026 in four passes of 8 layers, ep 2), and about 650.
EXPERTS_LAYER = HostTime(2.0, "operations in profiles of 30B-A3B-8 and 4B by parallel.py --profile; fitted to no seconds")
# The same of a layer that is compiled: about 250 (18,160 in two passes of 36 layers, dp 2), and about 650.
COMPILED_LAYER = HostTime(0.39, "operations in profiles of 8B, compiled, and 4B by parallel.py --profile; fitted to no seconds")
# Of an update with compiled layers on one rank: the share of a GPU's peak that products with weights reach, and that FlashAttention 2
# reaches, as PyTorch carries it. The bytes of memory traffic of other kernels: for each number of a token in a layer (`layer_widths`), and
# for each logit, which are also those of a fused head. A call for a prompt that responses share lasts as one of so many keys, at least.
PROFILED = "update_profile_h200.json: kernels of 0.6B and 1.7B"
PRODUCTS, ATTENTION = HostTime(0.766, PROFILED), HostTime(0.205, "training_flash2_h200.json: updates of 1.7B and 4B, less the others")
COMPILED_BYTES, FUSED_LOGIT_BYTES, SHARED_KEYS = HostTime(31.1, PROFILED), HostTime(12.0, PROFILED), HostTime(864.0, PROFILED)
# Bytes of memory traffic for each logit of a token that is trained, where neither layers are compiled nor the head is fused: float32
# softmax, its gradient, temperature, entropy.
LOGIT_BYTES = HostTime(220.0, "prediction_h200.json: costs, token_s of 1.7B and 4B; peer_job_h200.json: one_step_off")
# Bytes a second between a GPU and pinned memory of its host, over the link's: 15 to 43 GB/s of 63.
COPYING = HostTime(0.425, "prediction_h200.json: costs, sleep of 1.7B and 4B")
# The same of moments on the host at an optimizer step, over the link's one way: those of one parameter leave while others come.
MOMENTS_COPYING = HostTime(0.882, "small_gpu_h200.json: moments, 4B")
# Bytes of memory traffic for each number of a matrix that an adapter is merged into: its base, the product in float32, the engine's own.
MERGED_BYTES = HostTime(54.6, "small_gpu_h200.json: lora_publish, 8B")


def launch_s(shape: ModelShape, traits: ModelTraits, *, trains: bool = True, sharded: bool = False) -> float:
    """Estimate the host's time to launch a pass forward and backward. Layers that compute again are launched forward a second time.

    In a sharded pass that time was not seen: the host gathers the layer's shards meanwhile. Compiled layers whose matrices are shared are
    launched in as many parts as others.

    >>> sizes = {"hidden": 2560, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 9728, "vocab": 151936}
    >>> [round(launch_s(ModelShape(layers=36, **sizes), ModelTraits(**way)), 3) for way in ({}, {"recompute": True}, {"compiled": True})]
    [0.279, 0.372, 0.109]
    """
    layers = shape.layers * (EXPERTS_LAYER.value if shape.experts > 1 else 1)
    if trains and traits.compiled and traits.tensor_parallel == 1:
        layers *= COMPILED_LAYER.value
    if sharded:
        return layers * SHARDED_PASS_LAYER_S.value
    return layers * PASS_LAYER_S.value * (4 / 3 if trains and traits.recompute else 1)


# Estimates of an engine before anything starts: bytes on its devices and its host, and seconds of a decode step.
#
# An engine brings `Estimates` of its own with its spec; the defaults hold for engines that work as most do, and for models without a spec.

FILE = 2  # bytes of a number in a model's files
PIECE_BYTES = 1 << 24  # of a file in memory at once while a sharded model is read: large enough that copying it hides opening it
SEQUENCES = 256  # that an engine decodes at once, at most
# The shares of a device's peaks that well-tuned engines reach; assumptions, which a profile replaces.
PREFILL, DECODING = 0.5, 0.6


@dataclass(frozen=True)
class Device:
    """Peak bfloat16 operations and bytes of memory traffic a second, bytes of memory, and bytes per second to and from the
    host, and to and from the other GPUs of the host, one way, as the vendor gives them."""

    flops: float
    bandwidth: float
    memory_bytes: int
    host_link: float
    peer_link: float


def paged_memory(work: Workload) -> Need:
    """Estimate the memory of an engine that generates: weights, and pages of keys and values, of which those of one sequence must fit."""
    width = max(work.width, 1.0)
    # An engine over several GPUs has its second buffer on the first of them, and that one must fit. No arriving version is in fp8.
    own = work.shape.weight_bytes(work.itemsize, fp8=work.traits.weights_dtype is not None)
    version = work.shape.parameters * work.itemsize if work.version_bytes is None else work.version_bytes
    weights = int(own / width + (work.copies - 1) * version)
    sequences = min(-(-work.rows // work.workers), SEQUENCES)
    per_token = work.shape.kv_bytes_per_token(work.traits.kv_itemsize or work.itemsize) / width
    cache = int(max(sequences * work.usual, work.longest) * per_token)
    base = {"base of merged adapters": work.merged * work.itemsize} if work.merged else {}
    # The base stays on the device while the engine sleeps: bringing 8B back takes seconds.
    return Need(base, {"engine's weights": weights, "keys and values": cache}, weights + int(work.longest * per_token))


def fully_sharded_memory(work: Workload) -> Need:
    """Estimate the memory of a rank that holds a shard of float32 weights, gradients and moments, and gathers a layer at a time."""
    return _ranks(work, MASTER).while_it_runs("gradients")  # an optimizer step frees them


def model_parallel(work: Workload) -> Need:
    """Estimate the memory of a rank with its share of one model of its group: weights in the dtype of passes and gradients are those of
    the group's share, float32 weights and moments those of the parameters that this rank owns, whole ones. Of a pipeline the first stage
    keeps a pass of each stage, of its own layers: together as much as a pass of all layers."""
    shape, tensor, pipeline = work.shape, work.traits.tensor_parallel, work.traits.pipeline_parallel
    own, stage = shape.own_parameters(tensor, pipeline, work.traits.expert_parallel), work.workers // pipeline
    owned = max(shape.own_parameters(stage, pipeline, stage), shape.vocab * shape.hidden // tensor)  # an embedding has one owner
    masters = 0 if work.itemsize == MASTER else MASTER * owned
    stays = {"weights": work.itemsize * own + masters}
    if work.trained:
        stays |= {"optimizer": OPTIMIZER * owned, "gradients": GRADIENT * own}
    instants = update_in_place(work) if work.trained else scoring_memory(work, cast=False, gathers=False)
    return Need.of(stays, instants)


def whole_memory(work: Workload) -> Need:
    """Estimate the memory of a model that keeps its weights in the dtype it computes in."""
    return _ranks(work, work.itemsize)


def replicated_memory(work: Workload) -> Need:
    """Estimate the memory of a model that each of its ranks holds whole, in the dtype it computes in."""
    need = _ranks(work, work.itemsize)
    return Need({"weights": work.shape.parameters * work.itemsize}, need.runs, need.least, need.instants)


def _ranks(work: Workload, weights: int) -> Need:
    shape = work.shape
    per_parameter: dict[str, float] = {"weights": weights}
    if work.trained:
        per_parameter |= {"optimizer": MOMENTS[work.traits.optimizer.moments], "gradients": GRADIENT}
    if work.trained and work.traits.host_moments:
        del per_parameter["optimizer"]
    stays = {what: int(size * shape.parameters) // work.workers for what, size in per_parameter.items()}
    if work.adapter is not None:
        stays = {what: int(size * work.adapter) // work.workers for what, size in per_parameter.items()}
        stays["weights"] += work.frozen_bytes // work.workers
    if work.trained and work.traits.one_moment and shape.experts <= 1:
        stays["optimizer"] -= OPTIMIZER // 2 * shape.layers * shape.layer_parameters // work.workers
    if work.packed:
        stays["packed weights"] = work.itemsize * shape.parameters
    if not work.trained:
        return Need.of(stays, scoring_memory(work, cast=weights != work.itemsize))
    return Need.of(stays, update(work, cast=weights != work.itemsize))


def compute_weights(parameters: int, itemsize: int) -> int:
    """Count the bytes of weights in the dtype that passes compute in."""
    return parameters * itemsize


def master_weights(parameters: int, itemsize: int) -> int:
    """Count the bytes of float32 weights."""
    return parameters * MASTER


def moments(parameters: int, itemsize: int) -> int:
    """Count the bytes of AdamW's two moments."""
    return parameters * OPTIMIZER


def stays_awake(parameters: int, itemsize: int) -> int:
    """Count no bytes: the engine keeps its device memory while others work."""
    return 0


def decode_law(shape: ModelShape, device: Device, context: float) -> Decode:
    """Estimate the seconds of a decode step by the device's roofline and the host times of a table, each sequence `context` tokens long.

    A token takes 2 operations per parameter; a decode step reads the weights once, and the keys and values of each sequence (Pope et al.,
    2022, section 2).
    """
    return Decode(
        step_s=2 * shape.active_parameters / (device.bandwidth * DECODING),
        sequence_s=shape.kv_bytes_per_token() * context / (device.bandwidth * DECODING),
        prefill_s=2 * shape.active_parameters / (device.flops * PREFILL),
        host_step_s=DECODE_STEP_S.value,
        host_sequence_s=DECODE_SEQUENCE_S.value,
        host_sharing=SHARING.value,
    )


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The memory and the decode time of an engine. The defaults are those of an engine that generates and sleeps as vLLM does.

    `sleep_bytes(parameters, itemsize)` of a model go to host memory while its engine sleeps, `loading_bytes(parameters, itemsize)` are
    in a worker's memory while it loads, before its ranks share them; an engine that `reads_shards` loads only its own rank's share of
    them: one of all ranks, or `in_each_group` one of those that compute a pass together. `memory_estimate(workload)` is the need of one
    device, `decode_law(shape, device, context)` what a decode step takes there. An engine with `shares` takes such a share of a GPU's
    memory while it is awake, whatever it needs: where it is alone, and in a pool that others share (None: what it needs). Ranks of one that
    `gathers_shards` do so for each layer in each pass, and reduce gradients to shards. On host cores it attends with heads of the sizes
    `host_heads` (empty: any).
    """

    sleep_bytes: Callable[[int, int], int] = compute_weights
    loading_bytes: Callable[[int, int], int] = compute_weights
    reads_shards: bool = False
    in_each_group: bool = False
    gathers_shards: bool = False
    host_heads: tuple[settings.Count, ...] = ()
    memory_estimate: Callable[[Workload], Need] = paged_memory
    shares: tuple[float, float] | None = None
    decode_law: Callable[[ModelShape, Device, float], Decode] = decode_law

    def __post_init__(self) -> None:
        settings.check(self)


GENERATING = Estimates()
TRAINING = Estimates(sleep_bytes=moments, memory_estimate=whole_memory, gathers_shards=True)
SCORING = Estimates(sleep_bytes=stays_awake, memory_estimate=replicated_memory)


def default_estimates(works: Collection[Work]) -> Estimates:
    """Choose the estimates of a model without a spec by the works of its nodes."""
    return GENERATING if "generate" in works else TRAINING if "train" in works else SCORING


# Ranks that share a pass: the sizes that they divide, and the seconds in which they exchange tokens in each layer.

LINKED = 0.7  # share of the link between GPUs that collectives reach; an assumption, which a profile replaces
ITEMSIZE = 2  # bytes of a number on the way
# Seconds of a collective without a byte: 6 µs on two H100s when a CUDA graph launches it, by nccl-tests, and about as much twice for the
# events by which the stream of products and that of NCCL wait for each other; an assumption, which a profile replaces.
CALL_S = 20e-6
SHARED, EXCHANGED, DISPATCHED = 4, 4, 3  # collectives a layer: gathers and sums; queries, keys, values, results; counts, there and back


def find_undivided_size(
    heads: int, kv_heads: int, vocab: int | None, intermediate: int, *, tensor: int, context: int
) -> tuple[str, int, str] | None:
    """Find a size that ranks do not divide: its name in config.json, the size, and the settings; None where they divide all.

    A vocabulary of None is one that they need not divide.

    >>> find_undivided_size(32, 8, 151936, 12288, tensor=2, context=2), find_undivided_size(14, 2, 151936, 4864, tensor=4, context=1)
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
    for model in graph.models:
        shape, traits = shapes.get(model.path), model.traits
        if shape is None or traits.worker_multiple == 1:
            continue
        _check_experts(f"graph '{graph.name}': model '{model.path}'", shape.experts, traits.expert_parallel)
        inner = shape.intermediate if shape.experts == 1 else traits.tensor_parallel  # experts are not cut
        sizes = shape.heads, shape.kv_heads, None if traits.any_vocabulary else shape.vocab, inner
        tensor, context = traits.tensor_parallel, traits.context_parallel
        ring = ring_of(traits, shape)
        found = find_undivided_size(*sizes, tensor=tensor, context=context // ring)
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
