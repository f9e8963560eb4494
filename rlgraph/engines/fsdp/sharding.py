"""The ranks of a model and the shards of it that each holds: how they meet, load, gather and exchange."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.engines.api import Place
from rlgraph.engines.forward.head import Head
from rlgraph.engines.lora import LoraLinear, SharedBase
from rlgraph.errors import GraphError
from rlgraph.plan.model_shapes import UNIT_PARAMETERS

# The whole parameters that ranks cut among them: a pass computes with plain tensors, and at rest a tensor is a box of its whole.
#
# Tensor parallel parameters that are DTensors in a pass cost the host a dispatch in Python for each parameter, layer and direction. So a
# rank's part is a plain parameter, which FSDP2 shards as it would on a rank alone, and the parameter carries what it is a part of. Boxes,
# checkpoints, gathered matrices and the norm of gradients ask for it here.

Numbers: TypeAlias = tuple[int, ...]
NAME = "rlgraph_whole"  # of the attribute of a parameter


@torch.no_grad()
def cut_parameter(parameter: torch.nn.Parameter, mesh: DeviceMesh, dim: int | None) -> torch.nn.Parameter:
    """Take this rank's part of a parameter that the ranks of "tp" cut along `dim`, and those of "fsdp" will shard by rows.

    All ranks of "tp" hold it alike where `dim` is None. Nothing is sent.
    """
    ranks, rank = mesh["tp"].size(), mesh["tp"].get_local_rank()
    # A copy: a view would keep the whole in memory.
    own = parameter.detach() if dim is None else parameter.detach().chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
    of_tp: Placement = Replicate() if dim is None else Shard(dim)
    of_fsdp: Placement = _StridedShard(0, split_factor=ranks) if dim == 0 else Shard(0)  # rows of this rank's rows
    meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
    part = torch.nn.Parameter(own, parameter.requires_grad)
    # On the parameter, since FSDP shards plain tensors only; `remember_modules` sets it on the parameters that FSDP puts in their places.
    setattr(part, NAME, DTensorSpec(mesh, (of_fsdp, of_tp), tensor_meta=meta))
    return part


def spec_of(value: torch.Tensor) -> DTensorSpec | None:
    """What a tensor is a shard of; None for a tensor that is whole."""
    cut_by: DTensorSpec | None = getattr(value, NAME, None)  # a mark of ours on a tensor of torch
    return cut_by or (value._spec if isinstance(value, DTensor) else None)


def is_part(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a part that `cut_parameter` made."""
    return hasattr(parameter, NAME)


def whole_shape(parameter: torch.Tensor) -> Numbers:
    """The shape of the whole that a parameter is a shard of."""
    spec = spec_of(parameter)
    return tuple(parameter.shape if spec is None else spec.shape)


def as_dtensor(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """View a tensor that is sharded as a parameter, such as a moment, as a DTensor of the whole; an uncut one is a DTensor already."""
    if not is_part(parameter):
        return value
    own = value._local_tensor if isinstance(value, DTensor) else value
    return DTensor(own.detach(), getattr(parameter, NAME), requires_grad=False)


@contextmanager
def remember_modules(model: torch.nn.Module) -> Iterator[None]:
    """Let the parameters that something puts in place of a model's parts know what they are parts of."""
    places = [
        (module, name, getattr(parameter, NAME))
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if is_part(parameter)
    ]
    yield
    for module, name, spec in places:
        setattr(module.get_parameter(name), NAME, spec)


# Shards of a model over the ranks of a process group: FSDP2, and the tensors that a rank holds of it.


def init_distributed(rank: int, world: int) -> bool:
    """Make sure that a process group exists. Return whether this call made it, which it does for a world of one.

    Raises GraphError if the group has another rank or size, or if there is none for several ranks.
    """
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (rank, world):
            raise GraphError(f"FsdpEngine(rank={rank}, world={world}): the process group has rank {found[0]} of {found[1]}; pass the same")
        return False
    if world > 1:
        raise GraphError(f"FsdpEngine(world={world}): call torch.distributed.init_process_group on every rank first")
    dist.init_process_group(backends(), store=HashStore(), rank=0, world_size=1)
    return True


def backends() -> str:
    """The backends of collectives: gloo for tensors in host memory and, on a machine with GPUs, NCCL for theirs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def shard(whole: torch.nn.Module, layers: Any, mesh: DeviceMesh, dtype: torch.dtype, embedding: Any = None) -> list[Any]:
    """Shard the layers in units, and the rest as one unit; passes compute in `dtype`. Returns the first module of each unit.

    A large `embedding` with a matrix of its own, and not the head's, is a unit too: else it would be gathered around the whole pass, and
    its gradient and the head's summed at once, which takes 12 GB of 32B.
    """
    alone = mesh.size() == 1  # then gathered weights are a cast and not a transfer: once a pass is enough
    frozen = {parameter for parameter in whole.parameters() if not parameter.requires_grad} if alone else set()  # used as they are
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units: list[list[Any]] = [*layer_groups(layers), *([[embedding]] if not alone and _is_separate(whole, embedding) else []), [whole]]
    with remember_modules(whole):
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=not alone, ignored_params=frozen)
    firsts = [unit[0] for unit in units]
    if not alone:  # losses are normalised by the totals of all ranks, so that gradients are summed and not averaged
        for first in firsts:
            first.set_gradient_divide_factor(1.0)
            first.set_force_sum_reduction_for_comms(True)
    return firsts


def _is_separate(whole: torch.nn.Module, embedding: Any) -> bool:
    if embedding is None:
        return False
    weight = embedding.weight
    uses = sum(parameter is weight for _, parameter in whole.named_parameters(remove_duplicate=False))
    return uses == 1 and weight.requires_grad and weight.numel() >= UNIT_PARAMETERS and not isinstance(weight, DTensor)


def set_reshard(units: Iterable[Any], more: bool, *, casts: bool = True) -> None:
    """Before a pass of a rank alone: if `more` passes follow, units add up gradients where they are, and keep `casts` of weights for them.

    The sums have the same bits. Without it a pass casts all weights, and copies all gradients twice before they are added.
    """
    for unit in units:
        unit.set_requires_gradient_sync(not more, recurse=False)
        if casts:
            unit.set_reshard_after_backward(not more, recurse=False)


def layer_groups(layers: Iterable[torch.nn.Module]) -> list[list[torch.nn.Module]]:
    """Group the layers, in order: a group ends where it has `UNIT_PARAMETERS`."""
    units: list[list[torch.nn.Module]] = []
    size = UNIT_PARAMETERS
    for layer in layers:
        if size >= UNIT_PARAMETERS:
            units.append([])
            size = 0
        units[-1].append(layer)
        size += sum(parameter.numel() for parameter in layer.parameters())
    return units


def by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Group parameters by the ranks that share them: an operation of torch on several DTensors takes those of one mesh."""
    found: dict[DeviceMesh | None, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(found.values())


def full(value: torch.Tensor, parameter: torch.Tensor | None = None) -> torch.Tensor:
    """Gather the whole of a sharded tensor; a `parameter` says what it is sharded as, where ranks cut it."""
    found = value if parameter is None else as_dtensor(value, parameter)
    return found.full_tensor() if isinstance(found, DTensor) else found


def locate_box(value: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Compute the offsets of this rank's box of a tensor, and its number among equal boxes of several ranks.

    A DTensor may be sharded along any dims of any mesh; of a part that `whole.cut` made it is the box of the whole. Raises GraphError for
    a partial tensor, whose ranks hold summands.
    """
    spec = spec_of(value)
    if spec is None:
        return (0,) * value.dim(), replica(value)
    if any(placement.is_partial() for placement in spec.placements):
        raise GraphError(
            f"a tensor with placements {spec.placements} is a partial sum over ranks, not a shard: reduce it before publishing"
        )
    _, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(offsets), replica(value)


def replica(value: torch.Tensor) -> int:
    """Number this rank among those that hold the same box of a tensor."""
    spec, found = spec_of(value), 0
    if spec is None:
        return dist.get_rank() if dist.is_initialized() else 0
    for dim, placement in enumerate(spec.placements):
        if placement.is_replicate():
            found = found * spec.mesh.size(dim) + spec.mesh.get_local_rank(dim)
    return found


def storage_of(value: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this rank's shard: the same object until the shard gets other memory."""
    return value._local_tensor if isinstance(value, DTensor) else value


def own_box(name: str, parameter: torch.Tensor) -> WeightShard:
    """This rank's box of a parameter, live."""
    offsets, number = locate_box(parameter)
    return WeightShard(name, whole_shape(parameter), offsets, local(parameter.detach()), number)


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, without a copy."""
    return value.to_local() if isinstance(value, DTensor) else value


# The ranks of a model: which share its matrices (tensor), which a row of tokens (context), and which have batches of their own (data).


class Ranks:
    """The place of one rank of `world`. Neighbours share matrices, then rows of tokens: of 8 with `tensor` and `context` 2, ranks 0 and 1
    share matrices, ranks 0 and 2 a row, and ranks 0 to 3 compute what 4 to 7 do for other sequences. Of those that share a row `ring` pass
    keys round (`ring_group`); neighbours among them exchange tokens for heads (`heads_group`).

    `sharded` is the mesh over which FSDP shards parameters: all ranks that share no matrices. `matrices` is the mesh of these ("fsdp") and
    of the ranks that share matrices ("tp"). Groups and meshes are None for a size of 1.
    In a mixture each of `expert` neighbours holds other experts: of 4 ranks with `expert` 2, ranks 0 and 1 hold all experts together, and
    ranks 0 and 2 the same ones. `experts` is their mesh, of ranks that hold the same experts ("fsdp") and of those that hold all ("ep").
    Raises GraphError if the number of ranks is not a multiple of `tensor` × `context`, or of `expert`.
    """

    def __init__(self, device: str, rank: int, world: int, *, tensor: int = 1, context: int = 1, ring: int = 1, expert: int = 1) -> None:
        if world % expert or expert > 1 < tensor * context:
            raise GraphError(
                f"FsdpEngine(world={world}, tensor_parallel={tensor}, context_parallel={context}, expert_parallel={expert}): experts are "
                f"shared in groups of {expert} ranks, each with its own micro-batches; use a multiple, and leave out the other settings"
            )
        if world % (tensor * context):
            raise GraphError(
                f"FsdpEngine(world={world}, tensor_parallel={tensor}, context_parallel={context}): ranks form groups of "
                f"{tensor * context}; use a multiple"
            )
        self.ring = ring
        self.tensor, self.context, self.data = tensor, context, world // (tensor * context)
        self.data_rank, self.context_rank = rank // (tensor * context), rank // tensor % context
        numbers = torch.arange(world)
        self.matrices: DeviceMesh | None = None
        if tensor > 1:
            self.matrices = DeviceMesh(device, numbers.view(-1, tensor), mesh_dim_names=("fsdp", "tp"))
            self.sharded = self.matrices["fsdp"]
        else:
            self.sharded = DeviceMesh(device, numbers)
        self.experts: DeviceMesh | None = None
        if expert > 1:
            self.experts = DeviceMesh(device, numbers.view(-1, expert), mesh_dim_names=("fsdp", "ep"))
        self.context_group: Any = None
        self.data_group: Any = self.sharded.get_group()
        if context > 1:
            shape = (self.data, context, tensor)
            mesh = DeviceMesh(device, numbers.view(shape), mesh_dim_names=("dp", "cp", "tp"))
            self.context_group, self.data_group = mesh["cp"].get_group(), mesh["dp"].get_group()
        self.ring_group: Any = None
        self.heads_group: Any = None
        if ring > 1:
            places = numbers.view(self.data, ring, context // ring, tensor)
            mesh = DeviceMesh(device, places, mesh_dim_names=("dp", "ring", "heads", "tp"))
            self.ring_group = mesh["ring"].get_group()
            self.heads_group = mesh["heads"].get_group() if ring < context else None

    @property
    def ranks_of_a_pass(self) -> int:
        """The number of ranks that compute one pass together."""
        return self.tensor * self.context


# Load a sharded model: each rank reads its own boxes of the weights, and never holds more than these and a piece of a file.


def load_shards(head: Head, device: torch.device, shared_base: SharedBase | None = None) -> None:
    """Make the parameters of a sharded head, which are on the meta device, in memory of `device`, and fill them from its folder.

    Frozen ones are those of a `shared_base`, where the folder has them as they are.
    """
    with torch.no_grad(), remember_modules(head):
        made = {} if shared_base is None else _find_shared(head, shared_base)  # tied parameters stay one
        for place, module in head.named_modules():
            own = dict(module.named_parameters(recurse=False))
            for name, parameter in own.items():
                if parameter not in made:
                    made[parameter] = _read(head, f"{place}.{name}", parameter, device)
                module.register_parameter(name, made[parameter])
            for name, buffer in module.named_buffers(recurse=False):
                real = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                head.fill(f"{place}.{name}", (0,) * buffer.dim(), real)
                module.register_buffer(name, real, persistent=name not in module._non_persistent_buffers_set)
            if isinstance(module, LoraLinear) and module.finish_loading():
                del made[own["weight"]]  # else the matrices of all layers would be in memory until the last is read
        head.folder = None
        head.to(device)  # lets FSDP2 find the new tensors, as after any change of them


def _find_shared(head: Head, base: SharedBase) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Find for each whole and frozen parameter the one that other models hold as well."""
    names: dict[str, tuple[str, torch.nn.Parameter]] = {}  # by the name in the folder
    for name, parameter in head.named_parameters():
        source = head.source(name)
        if source is not None and not parameter.requires_grad and not isinstance(parameter, DTensor):
            names[source] = name, parameter
    wanted = {source: (tuple(parameter.shape), parameter.dtype) for source, (_, parameter) in names.items()}
    found = base.take(wanted, lambda source, out: _fill(head, names[source][0], out))
    return {parameter: torch.nn.Parameter(found[source], requires_grad=False) for source, (_, parameter) in names.items()}


def _fill(head: Head, name: str, out: torch.Tensor) -> None:
    head.fill(name, (0,) * out.dim(), out)


def _read(head: Head, name: str, parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    out = torch.empty_like(local(parameter.detach()), device=device)
    head.fill(name, locate_box(parameter)[0], out)
    if isinstance(parameter, DTensor):
        return torch.nn.Parameter(DTensor(out, parameter._spec, requires_grad=False), parameter.requires_grad)
    return torch.nn.Parameter(out, parameter.requires_grad)


# The rendezvous of the ranks of one model: a file on one host, a socket between hosts.

TCP = "tcp://"


def meet(at: str, rank: int, world: int, listen_fd: int = -1) -> None:
    """Join the process group of a model's ranks; blocks until all are there.

    `at` is `file://` and a path, or `tcp://address:port`. There rank 0 listens already, and `listen_fd` is the descriptor of its socket,
    which this call takes over. So no other process can take the port, and rank 0 listens at that address only.
    """
    if not at.startswith(TCP):
        dist.init_process_group(backends(), init_method=at, rank=rank, world_size=world)
        return
    host, _, port = at.removeprefix(TCP).rpartition(":")
    store = TCPStore(
        host.strip("[]"),
        int(port),
        world,
        is_master=rank == 0,
        timeout=default_pg_timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd if rank == 0 else None,
    )
    dist.init_process_group(backends(), store=store, rank=rank, world_size=world)


def meet_at(place: Place) -> None:
    """Join the process group of a model's ranks at its place, if it has several."""
    if place.world > 1:
        meet(place.rendezvous, place.rank, place.world, place.listen_fd)


def add_up(tensor: torch.Tensor) -> None:
    """Sum a tensor of the host over the ranks that have met, in place."""
    dist.all_reduce(tensor)


# Messages between the ranks of a model: bytes, which each rank decodes as the type it expects. Nothing from a peer is unpickled.

T = TypeVar("T")


class RankFailed(Exception):
    """The work of a rank failed; the message is its reason."""


def gather_bytes(mine: bytes, world: int, device: torch.device, group: Any = None) -> list[bytes]:
    """Gather the bytes of all ranks, in their order; every rank of the group calls it."""
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    rows = [torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(rows, torch.nn.functional.pad(own, (0, len(rows[0]) - len(own))), group=group)
    return [bytes(row[: int(size)].cpu().numpy()) for row, size in zip(rows, sizes, strict=True)]


def sum_metrics(metrics: list[dict[str, float]], world: int, device: torch.device, group: Any = None) -> dict[str, float]:
    """Sum the metrics of all micro-batches of all ranks of a group, in the order of the ranks: the same bits on every rank."""
    found = [metrics]
    if world > 1:
        own = msgspec.msgpack.encode([[*micro_batch.items()] for micro_batch in metrics])
        ranks = (msgspec.msgpack.decode(rank, type=list[list[tuple[str, float]]]) for rank in gather_bytes(own, world, device, group))
        found = [[dict(micro_batch) for micro_batch in rank] for rank in ranks]
    total: dict[str, float] = {}
    for micro_batch in (micro_batch for rank in found for micro_batch in rank):
        for name, value in micro_batch.items():
            total[name] = total.get(name, 0.0) + value
    return total


def all_gather_results(group: Any, work: Callable[[], T], kind: type[T], reason: Callable[[Exception], str]) -> list[T]:
    """Do a rank's work, and gather what each rank's gave, a value of a type that msgspec knows. A `group` of None is a world of one.

    Raises RankFailed on every rank, with the first reason, where the work of one failed with an OSError, a ValueError or a RuntimeError.
    """
    if group is None:
        return [work()]
    failed, mine = "", b""
    try:
        mine = msgspec.msgpack.encode(work())
    except (OSError, ValueError, RuntimeError) as error:
        failed = reason(error)
    told = gather_bytes(msgspec.msgpack.encode((failed, mine)), dist.get_world_size(group), torch.device("cpu"), group)
    answers = [msgspec.msgpack.decode(answer, type=tuple[str, bytes]) for answer in told]
    failures = [text for text, _ in answers if text]
    if failures:
        raise RankFailed(failures[0])
    return [msgspec.msgpack.decode(answer, type=kind) for _, answer in answers]
