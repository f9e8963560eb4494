"""Estimates of an engine before anything starts: bytes on its devices and its host, and seconds of a decode step.

An engine brings `Estimates` of its own with its spec; the defaults hold for engines that work as most do, and for models without a spec.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from rlgraph import settings
from rlgraph.costs import host_times
from rlgraph.costs.functions import Decode
from rlgraph.costs.model_shapes import ModelShape
from rlgraph.graph.operation import Work

FILE = 2  # bytes of a number in a model's files
MASTER, OPTIMIZER, GRADIENT = 4, 8, 4  # bytes a parameter: float32 weights and gradients, AdamW's two moments
MOMENTS = {"32bit": OPTIMIZER, "16bit": 4, "8bit": 2 * (1 + 4 / 256)}  # of two moments; those of 8 bits have a float32 scale for each block
PIECE_BYTES = 1 << 24  # of a file in memory at once while a sharded model is read: large enough that copying it hides opening it
LOGITS_AT_ONCE = 1 << 28  # of a GPU's fused head: 1767 rows of a vocabulary of 151936
SCORED_AT_ONCE, SCORE_COPIES = 1 << 27, 5  # logits that are scored at once, and how many float32 copies of them that takes
SEQUENCES = 256  # that an engine decodes at once, at most
# The shares of a device's peaks that well-tuned engines reach; assumptions, which a profile replaces.
PREFILL, DECODING = 0.5, 0.6


@dataclass(frozen=True)
class Device:
    """Peak bfloat16 operations and bytes of memory traffic a second, bytes of memory, and bytes a second to and from the
    host, and to and from the other GPUs of the host, one way, as the vendor gives them."""

    flops: float
    bandwidth: float
    memory_bytes: int
    host_link: float
    peer_link: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model of a graph as it is to run: `workers` engines or ranks, each on `width` devices.

    `itemsize` is the bytes of a number that passes compute with, `rows` the responses of a step over all workers. Prompt and response
    together have `longest` tokens at most and `usual` on average. `copies` of the weights lie on the devices of an engine that generates.
    `micro_batch_tokens` bounds the tokens of a pass; with `recompute` a layer keeps its input alone, and with `fused_head` no pass has the
    logits of all its tokens (None: it has none). With `one_moment` the optimizer keeps one moment of each matrix of a layer; `moments`
    says how many bits a number of them has, with `host_moments` they are on the host. `tensor` workers share the matrices of a layer, and
    with `context` others a pass. Only the `adapter` numbers of a model that trains an adapter have gradients and moments; the model itself
    has `frozen_bytes`, and if its matrices are `remade`, one of them is there in the dtype of passes at a time. An engine that merges
    adapters keeps the `merged` numbers of the matrices that they change, and its further copies have `version_bytes` (None: whole weights).
    An engine `in_fp8` has its layers in fp8; versions on their way are not. Its keys and values have `kv_itemsize` bytes a number (None:
    as passes). With `packed` each rank has all matrices a second time, as its kernels want them.
    """

    shape: ModelShape
    itemsize: int
    workers: int
    width: float
    rows: int
    longest: float
    usual: float
    copies: int = 1
    trained: bool = False
    micro_batch_tokens: int = 0
    recompute: bool = False
    fused_head: bool | None = None
    one_moment: bool = False
    moments: str = "32bit"
    host_moments: bool = False
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    adapter: int | None = None
    frozen_bytes: int = 0
    remade: bool = False
    merged: int = 0
    version_bytes: int | None = None
    packed: bool = False
    in_fp8: bool = False
    kv_itemsize: int | None = None

    @property
    def sharing(self) -> int:
        """The workers that compute one pass together."""
        return self.tensor * self.context * self.pipeline


@dataclass(frozen=True)
class Need:
    """Bytes of one model on one device: what stays, and what is there only while its own nodes run. It needs at least `least`."""

    stays: Mapping[str, int]
    runs: Mapping[str, int]
    least: int

    def while_it_runs(self, part: str) -> "Need":
        """Make the need of a model whose `part` does not stay, but is there while its nodes run."""
        size = self.stays.get(part, 0)
        stays = {what: held for what, held in self.stays.items() if what != part}
        return Need(stays, {part: size, **self.runs}, self.least + size) if size else self


def paged(work: Workload) -> Need:
    """Estimate the memory of an engine that generates: weights, and pages of keys and values, of which those of one sequence must fit."""
    width = max(work.width, 1.0)
    # An engine over several GPUs has its second buffer on the first of them, and that one must fit.
    own = work.shape.weight_bytes(work.itemsize, fp8=work.in_fp8)
    version = work.shape.parameters * work.itemsize if work.version_bytes is None else work.version_bytes
    weights = int(own / width + (work.copies - 1) * version)
    sequences = min(-(-work.rows // work.workers), SEQUENCES)
    per_token = work.shape.kv_bytes_per_token(work.kv_itemsize or work.itemsize) / width
    cache = int(max(sequences * work.usual, work.longest) * per_token)
    base = {"base of merged adapters": work.merged * work.itemsize} if work.merged else {}
    # The base stays on the device while the engine sleeps: bringing 8B back takes seconds.
    return Need(base, {"engine's weights": weights, "keys and values": cache}, weights + int(work.longest * per_token))


def fully_sharded(work: Workload) -> Need:
    """Estimate the memory of a rank that holds a shard of float32 weights, gradients and moments, and gathers a layer at a time."""
    return _ranks(work, MASTER).while_it_runs("gradients")  # an optimizer step frees them


def model_parallel(work: Workload) -> Need:
    """Estimate the memory of a rank with its share of one model of its group: weights in the dtype of passes and gradients are those of
    the group's share, float32 weights and moments those of the parameters that this rank owns, whole ones. Of a pipeline the first stage
    keeps a pass of each stage, of its own layers: together as much as a pass of all layers."""
    shape, stage = work.shape, work.workers // work.pipeline
    own = shape.own_parameters(work.tensor, work.pipeline, work.expert)
    owned = max(shape.own_parameters(stage, work.pipeline, stage), shape.vocab * shape.hidden // work.tensor)  # an embedding has one owner
    masters = 0 if work.itemsize == MASTER else MASTER * owned
    stays = {"weights": work.itemsize * own + masters}
    if work.trained:
        stays |= {"optimizer": OPTIMIZER * owned, "gradients": GRADIENT * own}
    runs = {what: size for what, size in _ranks(work, MASTER).runs.items() if what != "gathered layers"}
    return Need(stays, runs, sum(runs.values()))


def whole(work: Workload) -> Need:
    """Estimate the memory of a model that keeps its weights in the dtype it computes in."""
    return _ranks(work, work.itemsize)


def replicated(work: Workload) -> Need:
    """Estimate the memory of a model that each of its ranks holds whole, in the dtype it computes in."""
    need = _ranks(work, work.itemsize)
    return Need({"weights": work.shape.parameters * work.itemsize}, need.runs, need.least)


def _ranks(work: Workload, weights: int) -> Need:
    shape = work.shape
    per_parameter: dict[str, float] = {"weights": weights}
    if work.trained:
        per_parameter |= {"optimizer": MOMENTS[work.moments], "gradients": GRADIENT}
    if work.host_moments:
        del per_parameter["optimizer"]
    stays = {what: int(size * shape.parameters) // work.workers for what, size in per_parameter.items()}
    if work.adapter is not None:
        stays = {what: int(size * work.adapter) // work.workers for what, size in per_parameter.items()}
        stays["weights"] += work.frozen_bytes // work.workers
    if work.trained and work.one_moment and shape.experts <= 1:
        stays["optimizer"] -= OPTIMIZER // 2 * shape.layers * shape.layer_parameters // work.workers
    if work.packed:
        stays["packed weights"] = work.itemsize * shape.parameters
    groups = max(work.workers // work.sharing, 1)
    tokens = min(work.micro_batch_tokens, int(-(-work.rows // groups) * work.longest) // work.context)  # of a rank
    logits = 0 if work.fused_head is None else _logits(work, tokens)
    runs = {"activations": _activations(work, tokens, logits), "gathered layers": _gathered(work, weights)}
    if work.fused_head is not None:
        runs["logits"] = logits
    return Need(stays, runs, sum(runs.values()))


def _gathered(work: Workload, weights: int) -> int:
    """Estimate the memory of weights that are cast to the dtype of passes: of two units, with a rank's own experts, and the vocabulary, or
    of all that is trained where no rank shares them, which are then cast once a pass."""
    shape, alone = work.shape, work.workers == work.tensor
    if alone and work.adapter is not None:  # frozen weights are used as they lie
        return (work.adapter + (shape.hidden * max(shape.intermediate, shape.heads * shape.head_dim) if work.remade else 0)) * work.itemsize
    if alone and weights != work.itemsize:
        return shape.parameters * work.itemsize // work.tensor
    return (2 * shape.own_layer(work.expert) + shape.vocab * shape.hidden) * work.itemsize // work.tensor


def _activations(work: Workload, tokens: int, logits: int) -> int:
    """Estimate the memory of what passes keep for the backward pass: all of each layer, or its input and then all of one layer, while the
    logits are there no more. Without training it is one layer's input."""
    of_input = tokens * work.shape.hidden * work.itemsize // work.tensor
    of_layer = tokens * kept_by_layer(work.shape) * work.itemsize // work.tensor
    if not work.trained:
        return of_input
    return work.shape.layers * of_input + max(0, of_layer - logits) if work.recompute else work.shape.layers * of_layer


def kept_by_layer(shape: ModelShape) -> int:
    """Count the numbers that a layer keeps of a token for the backward pass, with fused norms and FlashAttention.

    Input and output of both norms; queries and keys before and after the rotation (a norm of heads keeps them before), values, and the
    output of attention; of a gated MLP the gate, its activation, what it multiplies, and the product. An adapter keeps the same inputs.

    >>> kept_by_layer(ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10))
    132
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    copies = shape.experts_used if shape.experts > 1 else 0  # of a token, one for each of its experts
    return (4 + copies) * shape.hidden + 3 * (queries + keys) + 4 * shape.intermediate * shape.experts_used


def _logits(work: Workload, tokens: int) -> int:
    """Estimate the memory of the logits of a pass: whole ones with their gradient, or some rows and the head's gradient in float32."""
    words = work.shape.vocab // work.tensor
    numbers = tokens * words
    scoring = SCORE_COPIES * 4 * min(numbers, SCORED_AT_ONCE)
    if not work.trained:
        return min(numbers, LOGITS_AT_ONCE) * work.itemsize + scoring
    if work.fused_head and numbers > LOGITS_AT_ONCE:
        head = words * work.shape.hidden if work.adapter is None else 0  # its gradient in float32, and what some rows add to it
        return 2 * LOGITS_AT_ONCE * work.itemsize + scoring + (4 + work.itemsize) * head
    return 2 * numbers * work.itemsize + scoring


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

    A token takes 2 operations a parameter; a decode step reads the weights once, and the keys and values of each sequence (Pope et al.,
    2022, section 2).
    """
    return Decode(
        step_s=2 * shape.active_parameters / (device.bandwidth * DECODING),
        sequence_s=shape.kv_bytes_per_token() * context / (device.bandwidth * DECODING),
        prefill_s=2 * shape.active_parameters / (device.flops * PREFILL),
        host_step_s=host_times.DECODE_STEP_S.value,
        host_sequence_s=host_times.DECODE_SEQUENCE_S.value,
        host_sharing=host_times.SHARING.value,
    )


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The memory and the decode time of an engine. The defaults are those of an engine that generates and sleeps as vLLM does.

    `sleep_bytes(parameters, itemsize)` of a model go to host memory while its engine sleeps, `loading_bytes(parameters, itemsize)` are
    in a worker's memory while it loads, before its ranks share them; an engine that `reads_shards` loads only its own rank's share of
    them: one of all ranks, or `in_each_group` one of those that compute a pass together. `memory_estimate(workload)` is the need of one
    device, `decode_law(shape, device, context)` what a decode step takes there. An engine with `shares` takes such a share of a GPU's
    memory while it is awake, whatever it needs: where it is alone, and in a pool that others share (None: what it needs).
    """

    sleep_bytes: Callable[[int, int], int] = compute_weights
    loading_bytes: Callable[[int, int], int] = compute_weights
    reads_shards: bool = False
    in_each_group: bool = False
    memory_estimate: Callable[[Workload], Need] = paged
    shares: tuple[float, float] | None = None
    decode_law: Callable[[ModelShape, Device, float], Decode] = decode_law

    def __post_init__(self) -> None:
        settings.check(self)


GENERATING = Estimates()
TRAINING = Estimates(sleep_bytes=moments, memory_estimate=whole)
SCORING = Estimates(sleep_bytes=stays_awake, memory_estimate=replicated)


def default_estimates(works: Collection[Work]) -> Estimates:
    """Choose the estimates of a model without a spec by the works of its nodes."""
    return GENERATING if "generate" in works else TRAINING if "train" in works else SCORING
