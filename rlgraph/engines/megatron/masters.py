"""The float32 weights and moments of Megatron's parameters: pieces by name, boxes of a rank, and ZeRO's owners."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rlgraph.channels.weights.shards import copy_all
from rlgraph.engines.fsdp.optimizers import TINY
from rlgraph.engines.megatron.modules import MegatronRanks

# Each parameter's float32 weights and moments on one of the ranks that compute with it for other tokens (ZeRO-1, arXiv 1910.02054).
#
# An owner has whole parameters of a rank, so each stays some boxes of the Hugging Face model. Gradients are added up at their owner, which
# takes the step and sends the others the values: as many bytes as to reduce-scatter and to gather. The gradients of an owner's parameters
# lie behind each other, and so do their values: each takes one call for an owner, however many parameters it has.


def owners(sizes: Mapping[str, int], count: int, first: Collection[str] = ()) -> dict[str, int]:
    """Give each parameter one of `count` owners, which have about equally much; the parameters of `first` go to owner 0.

    >>> owners({"embedding": 6, "up": 4, "down": 4, "norm": 1}, 2)
    {'embedding': 0, 'up': 1, 'down': 1, 'norm': 0}
    """
    loads, found = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (name not in first, -sizes[name])):
        found[name] = 0 if name in first else loads.index(min(loads))
        loads[found[name]] += sizes[name]
    return found


ALIGNED = 64  # numbers between which parameters begin: kernels of products want 16 bytes, and lines of a cache have 128


class Owned:
    """Parameters of the ranks of `group`, in the order of their owners, moved to one memory where there are several owners.

    `tensor_group` are the neighbours that share matrices, whose parameters of the same name have the same owner.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], group: Any, tensor_group: Any, first: Collection[str]) -> None:
        self._group, self._count, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        sizes = {name: one.numel() for name, one in parameters.items()}
        if self._count > 1 and sizes and dist.get_world_size(tensor_group) > 1:  # their words may be fewer
            most = torch.tensor(list(sizes.values()), device=next(iter(parameters.values())).device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=tensor_group)
            sizes = dict(zip(sizes, most.tolist(), strict=True))
        self._owner = owners(sizes, self._count, first)
        self.parameters = {name: parameters[name] for name in sorted(parameters, key=lambda name: self._owner[name])}
        self.names = {name for name, owner in self._owner.items() if owner == self._rank}
        self.elements = sum(one.numel() for one in parameters.values())
        self._parts = self._merge_storage() if self._count > 1 and parameters else []

    def _merge_storage(self) -> list[torch.Tensor]:
        """Move the parameters to one memory, behind each other, and give the part of each owner."""
        sizes = [-(-one.numel() // ALIGNED) * ALIGNED for one in self.parameters.values()]
        kind = next(iter(self.parameters.values()))
        memory = torch.zeros(sum(sizes), dtype=kind.dtype, device=kind.device)
        parts = [0] * self._count
        for (name, one), size, place in zip(self.parameters.items(), sizes, memory.split(sizes), strict=True):
            parts[self._owner[name]] += size
            one.data = place[: one.numel()].view(one.shape).copy_(one.detach())
        return list(memory.split(parts))

    def add_up(self, gradients: torch.Tensor) -> None:
        """Add up the gradients of all ranks, which lie behind each other as the parameters do, each at its owner; the others' are lost."""
        if self._count > 1:
            sizes = [0] * self._count
            for name, one in self.parameters.items():
                sizes[self._owner[name]] += one.numel()
            parts = gradients.split(sizes)
            sent = [dist.reduce(part, group=self._group, group_dst=to, async_op=True) for to, part in enumerate(parts) if len(part)]
            for work in sent:
                work.wait()

    def publish(self) -> None:
        """Give all ranks the values of the owners."""
        sent = [dist.broadcast(part, group=self._group, group_src=of, async_op=True) for of, part in enumerate(self._parts) if len(part)]
        for work in sent:
            work.wait()


# Megatron-Core's parameters as boxes of Hugging Face parameters: the one table by which weights are loaded, published and saved.
#
# A rank's queries, keys and values lie behind each other in one matrix (`attention`), and gate and up of an MLP in another. A piece is a
# view of such a parameter, one range of its memory, so it is read and written in place.

Piece: TypeAlias = tuple[str, tuple[int, ...], torch.Tensor]  # the Hugging Face parameter, offsets in it, and a view that is this box of it

NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
ROUTER = "mlp.router.weight"
EXPERTS = {"mlp.experts.gate_up": "mlp.experts.gate_up_proj", "mlp.experts.down": "mlp.experts.down_proj"}
BY_COLUMNS = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight", "mlp.linear_fc2.weight": "mlp.down_proj.weight"}
SCORE = "score.weight"


@dataclass(frozen=True)
class PieceTable:
    """The pieces of the parameters of one rank. `config` is Megatron-Core's. In the Hugging Face model the backbone's names begin with
    `prefix`, and `tied` embeddings are its head too; this rank's words begin at `first_word`."""

    config: Any
    ranks: MegatronRanks
    prefix: str
    tied: bool
    first_word: int = 0

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """Yield the pieces of a parameter, or of a tensor of its shape such as a moment."""
        if name in ("embedding.weight", "output.weight"):
            embeds = self.tied or name == "embedding.weight"
            yield f"{self.prefix}embed_tokens.weight" if embeds else "lm_head.weight", (self.first_word, 0), tensor
        elif name == "decoder.final_layernorm.weight":
            yield f"{self.prefix}norm.weight", (0,), tensor
        elif name == SCORE:
            yield name, (0, 0), tensor
        else:
            yield from self._of_layer(name, tensor)

    def _of_layer(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        number, _, rest = name.removeprefix("decoder.layers.").partition(".")
        layer = f"{self.prefix}layers.{int(number) + self.ranks.stage * self.config.num_layers // self.ranks.pipeline}."
        if rest in NORMS:
            yield layer + NORMS[rest], (0,), tensor
        elif rest == ROUTER:
            yield f"{layer}mlp.gate.weight", (0, 0), tensor
        elif rest in EXPERTS:
            yield layer + EXPERTS[rest], (self.ranks.expert_rank * tensor.shape[0], 0, 0), tensor
        elif rest in BY_COLUMNS:
            yield layer + BY_COLUMNS[rest], (0, self.ranks.tensor_rank * tensor.shape[1]), tensor
        elif rest == "mlp.linear_fc1.weight":
            for part, box in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{layer}mlp.{part}.weight", (self.ranks.tensor_rank * box.shape[0], 0), box
        elif rest.startswith("self_attention.linear_qkv."):
            yield from self._of_heads(f"{layer}self_attn.", rest.rpartition(".")[2], tensor)
        else:
            raise KeyError(f"Megatron-Core has a parameter '{name}', which the table of pieces lacks")

    def _of_heads(self, attention: str, kind: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """Yield the rows of this rank's queries, of its keys and of its values, of a weight or of a bias."""
        heads, groups = self.config.num_attention_heads, self.config.num_query_groups
        sizes = [count // self.ranks.tensor * self.config.kv_channels for count in (heads, groups, groups)]
        for part, rows in zip("qkv", tensor.split(sizes), strict=True):
            yield f"{attention}{part}_proj.{kind}", (self.ranks.tensor_rank * rows.shape[0], *(0,) * (tensor.dim() - 1)), rows

    def replica(self, name: str) -> int:
        """Number this rank, an owner of a parameter, among the owners of the same boxes; the first is 0."""
        whole = name == SCORE or has_partial_gradient(name)  # on each rank, where matrices are cut
        again = self.tied and name == "output.weight"  # the last stage has the embeddings once more
        return whole * self.ranks.tensor_rank + again * self.ranks.world


def is_expert(name: str) -> bool:
    """Whether a parameter is of experts."""
    return name.endswith(tuple(EXPERTS))


def has_partial_gradient(name: str) -> bool:
    """Whether each rank of those that share matrices holds all of a parameter, and the gradient of its own tokens or heads."""
    return name.endswith(("layernorm.weight", ROUTER))


# The float32 weights of a rank and their gradients, which lie behind each other in one memory: ranks add them up in one call.


class Masters:
    """Float32 weights of the parameters that this rank owns: the parameters that passes compute with, or where these are of another dtype,
    copies. Of the ranks that compute with the same parameters for other tokens each owns some; see `zero`.

    Gradients of all micro-batches add up in float32.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], table: PieceTable) -> None:
        ranks, self._table = table.ranks, table
        tied = ("embedding.weight", "output.weight") if table.tied else ()  # the same owner in the first and the last stage
        common = {name: one for name, one in parameters.items() if not is_expert(name)}
        experts = {name: one for name, one in parameters.items() if is_expert(name)}
        self._common = Owned(common, ranks.data_group, ranks.tensor_group, tied)
        self._experts = Owned(experts, ranks.expert_data_group, ranks.tensor_group, ())
        self._parameters = self._common.parameters | self._experts.parameters
        own = {name: one for name, one in self._parameters.items() if name in self._common.names | self._experts.names}
        self.weights = {name: one if one.dtype == torch.float32 else _copy(one) for name, one in own.items()}
        self._all: torch.Tensor | None = None
        self._gradients: dict[str, torch.Tensor] = {}  # of what this rank owns

    def begin(self) -> None:
        """Set all gradients to 0; their memory is made at the first call."""
        if self._all is None:
            sizes = [one.numel() for one in self._parameters.values()]
            self._all = torch.zeros(sum(sizes), device=next(iter(self._parameters.values())).device)
            for (name, parameter), part in zip(self._parameters.items(), self._all.split(sizes), strict=True):
                gradient = part.view(parameter.shape)
                if parameter.dtype == torch.float32:
                    parameter.grad = gradient
                else:
                    parameter.register_post_accumulate_grad_hook(_into(gradient))
                if name in self.weights:
                    self.weights[name].grad = self._gradients[name] = gradient
        self._all.zero_()

    def add_up(self, divisor: int = 1) -> None:
        """Add up the gradients of the ranks that computed with other tokens, other heads, or the same embeddings elsewhere, and divide."""
        ranks, table = self._table.ranks, self._table
        assert self._all is not None
        self._common.add_up(self._all[: self._common.elements])
        self._experts.add_up(self._all[self._common.elements :])
        if ranks.tensor > 1:
            _reduce_gradients([g for name, g in self._gradients.items() if has_partial_gradient(name)], ranks.tensor_group)
        if table.tied and ranks.pipeline > 1 and ranks.tied_group is not None:
            name = "embedding.weight" if ranks.is_first else "output.weight"
            if name in self._gradients:
                dist.all_reduce(self._gradients[name], group=ranks.tied_group)
        if divisor != 1:
            self._all.div_(divisor)

    def clip(self, most: float) -> float:
        """Scale the gradients down to a norm of `most` over all ranks, and return the norm before; what several ranks hold counts once."""
        assert self._all is not None
        once = [g for name, g in self._gradients.items() if self._table.replica(name) == 0]
        total = torch.stack(torch._foreach_norm(once)).square().sum() if once else self._all.new_zeros(())
        if self._table.ranks.world > 1:
            dist.all_reduce(total)
        norm = total.sqrt()
        self._all.mul_((most / (norm + TINY)).clamp(max=1.0))
        return float(norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the weights to the parameters that passes compute with, on all ranks."""
        copied = [name for name, weight in self.weights.items() if self._parameters[name] is not weight]
        copy_all([self._parameters[name] for name in copied], [self.weights[name] for name in copied])
        self._common.publish()
        self._experts.publish()


def _copy(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().float())


def _into(gradient: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient.add_(parameter.grad)
        parameter.grad = None

    return add


def _reduce_gradients(gradients: Iterable[torch.Tensor], group: Any) -> None:
    """Add up some gradients over a group in one call."""
    own = list(gradients)
    if own:
        flat = torch.cat([gradient.flatten() for gradient in own])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(own, flat.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(part.view(gradient.shape))


# A tensor of which a rank holds some boxes: what Megatron-Core keeps in one parameter may be boxes of several, such as q, k and v.
#
# torch.distributed.checkpoint writes and reads it box by box, so that a checkpoint is the same whichever trainer wrote it.

Box = tuple[tuple[int, ...], torch.Tensor]  # its offsets in the whole tensor, and its part of it


class BoxedTensor(torch.Tensor):
    """A tensor of `shape`, of which this rank holds `boxes`. It can be copied to another of the same boxes, and to the host.

    >>> rows = BoxedTensor((4, 2), [((2, 0), torch.ones(2, 2))])
    >>> rows.shape, torch.empty_like(rows, device="cpu").copy_(rows).boxes[0][1].sum()
    (torch.Size([4, 2]), tensor(4.))
    """

    boxes: list[Box]

    @staticmethod
    def __new__(cls, shape: Sequence[int], boxes: Sequence[Box]) -> "BoxedTensor":
        first = boxes[0][1]
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=first.dtype, device=first.device)
        made.boxes = list(boxes)
        return made

    def __repr__(self) -> str:  # type: ignore[override] # nothing here gives contents
        return f"BoxedTensor({list(self.shape)}, boxes at {[list(offsets) for offsets, _ in self.boxes]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # an attribute in torch's stubs
        if func is torch.ops.aten.detach.default:
            return _each(args[0], torch.Tensor.detach)
        if func is torch.ops.aten.empty_like.default:
            return _each(args[0], lambda box: torch.empty(box.shape, dtype=box.dtype, device=(kwargs or {}).get("device", box.device)))
        if func is torch.ops.aten.copy_.default:
            for (_, to), (_, of) in zip(args[0].boxes, args[1].boxes, strict=True):
                to.copy_(of)
            return args[0]
        raise NotImplementedError(f"{func} of a BoxedTensor")

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(box for offsets, box in self.boxes if index.offset is None or torch.Size(offsets) == index.offset)


def _each(tensor: BoxedTensor, work: Callable[[torch.Tensor], torch.Tensor]) -> BoxedTensor:
    return BoxedTensor(tensor.shape, [(offsets, work(box)) for offsets, box in tensor.boxes])
