"""Estimates of an engine before anything starts: bytes on its devices and its host, and seconds of a decode step.

An engine brings `Estimates` of its own with its spec; the defaults hold for engines that work as most do, and for models without a spec.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from rlgraph import settings
from rlgraph.costs import host_times
from rlgraph.costs.functions import Decode
from rlgraph.costs.model_shapes import ModelShape
from rlgraph.costs.update_memory import GRADIENT, MASTER, MOMENTS, OPTIMIZER, scoring, update, update_in_place
from rlgraph.costs.workload import Need, Workload
from rlgraph.graph.operation import Work

FILE = 2  # bytes of a number in a model's files
PIECE_BYTES = 1 << 24  # of a file in memory at once while a sharded model is read: large enough that copying it hides opening it
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
    instants = update_in_place(work) if work.trained else scoring(work, cast=False, gathers=False)
    return Need.of(stays, instants)


def whole(work: Workload) -> Need:
    """Estimate the memory of a model that keeps its weights in the dtype it computes in."""
    return _ranks(work, work.itemsize)


def replicated(work: Workload) -> Need:
    """Estimate the memory of a model that each of its ranks holds whole, in the dtype it computes in."""
    need = _ranks(work, work.itemsize)
    return Need({"weights": work.shape.parameters * work.itemsize}, need.runs, need.least, need.instants)


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
    if not work.trained:
        return Need.of(stays, scoring(work, cast=weights != work.itemsize))
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
    memory_estimate: Callable[[Workload], Need] = paged
    shares: tuple[float, float] | None = None
    decode_law: Callable[[ModelShape, Device, float], Decode] = decode_law

    def __post_init__(self) -> None:
        settings.check(self)


GENERATING = Estimates()
TRAINING = Estimates(sleep_bytes=moments, memory_estimate=whole, gathers_shards=True)
SCORING = Estimates(sleep_bytes=stays_awake, memory_estimate=replicated)


def default_estimates(works: Collection[Work]) -> Estimates:
    """Choose the estimates of a model without a spec by the works of its nodes."""
    return GENERATING if "generate" in works else TRAINING if "train" in works else SCORING
