"""Describe, check and assemble shards of weights: boxes of Hugging Face parameters, however a trainer shards them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import msgspec
import torch

from rlgraph.errors import ChannelError

Numbers: TypeAlias = tuple[int, ...]
Owned: TypeAlias = "tuple[int | None, WeightShard]"  # with its rank; None for a rank that checks its own shards


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A box of a parameter that one rank of a trainer holds: `tensor` begins at `offsets` in the parameter, whose shape is `global_shape`.

    A rank yields the boxes that it holds: one of a parameter, several, or none. The boxes of all ranks must hold every element of a
    parameter once. If several ranks hold the same box, `replica` numbers the copies; only replica 0 is sent.

    Rank 1 of 2 holds the last two columns of a projection, and a norm that rank 0 holds too:

    >>> projection = WeightShard("o_proj.weight", (3, 4), (0, 2), torch.zeros(3, 2))
    >>> norm = WeightShard("norm.weight", (4,), (0,), torch.ones(4), replica=1)
    >>> str(projection), norm.is_whole
    ('[0:3, 2:4]', True)
    """

    name: str
    global_shape: Numbers
    offsets: Numbers
    tensor: torch.Tensor
    replica: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the box covers the whole parameter."""
        return tuple(self.tensor.shape) == tuple(self.global_shape)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of the box in every dim."""
        return [(offset, offset + length) for offset, length in zip(self.offsets, self.tensor.shape, strict=True)]

    def view_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """View the part of the whole parameter that the box covers."""
        for dim, (offset, length) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            if length != parameter.shape[dim]:
                parameter = parameter.narrow(dim, offset, length)
        return parameter

    def __str__(self) -> str:
        return f"[{', '.join(f'{begin}:{end}' for begin, end in self.spans)}]"


def unsharded_weights(weights: Mapping[str, torch.Tensor]) -> Iterator[WeightShard]:
    """Yield every parameter as one shard, for a trainer of one rank.

    >>> [str(shard) for shard in unsharded_weights({"w": torch.zeros(2, 3)})]
    ['[0:2, 0:3]']
    """
    for name, tensor in weights.items():
        yield WeightShard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


@dataclass(frozen=True)
class Parameter:
    """A whole parameter and its boxes, each with the rank that holds it."""

    shape: Numbers
    dtype: torch.dtype
    boxes: list[Owned]


def parameters(ranks: Sequence[Sequence[WeightShard]]) -> dict[str, Parameter]:
    """Group the shards of all ranks into whole parameters, in an order that preserves the order of each rank.

    Raises ChannelError for boxes that leave a hole, overlap, leave their parameter, or differ in its shape or dtype.
    """
    boxes = _by_name(dict(enumerate(ranks)))
    for name, found in boxes.items():
        _check(name, found)
        size, held = prod(found[0][1].global_shape), sum(shard.tensor.numel() for _, shard in found)
        if held != size:
            some = ", ".join(_owner_of(*box) for box in found[:3])
            raise ChannelError(
                f"{_title_of(name, found)}: its boxes hold {held} of {size} elements ({some}{', …' if len(found) > 3 else ''}); every "
                "element of a parameter is held by one rank: let `weight_shards` yield the missing elements, with replica=0 on one rank"
            )
    return {name: Parameter(tuple(found[0][1].global_shape), found[0][1].tensor.dtype, found) for name, found in boxes.items()}


def check_own(shards: Sequence[WeightShard]) -> None:
    """Check the shards of one rank without the other ranks. Raises ChannelError as `parameters` does."""
    for name, found in _by_name({None: shards}).items():
        _check(name, found)


@dataclass(frozen=True, slots=True)
class _Placement:
    """The place in a whole parameter of shard `number` of a rank."""

    rank: int
    number: int
    shape: Numbers
    strides: Numbers
    offset: int


class Assembly:
    """Assembles the shards of all ranks into whole parameters. One serves all versions of the same sharding; it holds no tensor.

    Raises ChannelError as `parameters` does.

    >>> halves = [WeightShard("w", (2, 2), (rank, 0), torch.full((1, 2), float(rank))) for rank in (0, 1)]
    >>> Assembly([[halves[0]], [halves[1]]]).assemble([[halves[0].tensor], [halves[1].tensor]])
    {'w': tensor([[0., 0.],
            [1., 1.]])}
    """

    def __init__(self, ranks: Sequence[Sequence[WeightShard]]) -> None:
        self.shards = [[replace(shard, tensor=torch.empty_like(shard.tensor, device="meta")) for shard in shards] for shards in ranks]
        at = {id(shard): (rank, number) for rank, shards in enumerate(self.shards) for number, shard in enumerate(shards)}
        self._parameters: list[tuple[str, Numbers, list[_Placement]]] = []
        for name, parameter in parameters(self.shards).items():
            whole = torch.empty(parameter.shape, device="meta")
            boxes = [(shard.view_of(whole), *at[id(shard)]) for _, shard in parameter.boxes]
            filled = [box for box in boxes if box[0].numel()] or boxes[:1]
            places = [
                _Placement(rank, number, tuple(view.shape), view.stride(), int(view.storage_offset())) for view, rank, number in filled
            ]
            self._parameters.append((name, tuple(parameter.shape), places))

    def assemble(self, ranks: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Copy the tensors of the shards, by rank, into whole parameters in new memory; a parameter with a single box is not copied."""
        whole: dict[str, torch.Tensor] = {}
        to: list[torch.Tensor] = []
        of: list[torch.Tensor] = []
        for name, shape, boxes in self._parameters:
            sent = [ranks[box.rank][box.number] for box in boxes]
            if boxes[0].shape == shape:
                whole[name] = sent[0]
                continue
            parameter = whole[name] = sent[0].new_empty(shape)
            to += [parameter.as_strided(box.shape, box.strides, box.offset) for box in boxes]  # twice as fast as a `narrow` per dim
            of += sent
        copy_all(to, of)
        return whole


def copy_all(to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others, in one call for contiguous targets and one for the others: a view with gaps slows its whole call."""
    for contiguous in (True, False):
        pairs = [(a, b) for a, b in zip(to, of, strict=True) if a.is_contiguous() == contiguous]
        if pairs:
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs], non_blocking=True)


class _ShardEntry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The description of a shard, sent with its tensor."""

    name: str
    global_shape: Numbers
    offsets: Numbers


_decoder = msgspec.msgpack.Decoder(list[_ShardEntry])


def encode_shards(shards: Iterable[WeightShard]) -> bytes:
    """Encode the names, shapes and offsets of shards."""
    return msgspec.msgpack.encode([_ShardEntry(shard.name, tuple(shard.global_shape), tuple(shard.offsets)) for shard in shards])


def shards_of(description: bytes, tensors: Sequence[torch.Tensor]) -> list[WeightShard]:
    """Decode shards that `encode_shards` encoded, with their tensors. Raises ChannelError if the two do not fit."""
    try:
        entries = _decoder.decode(description)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ChannelError(f"the description of a trainer rank's weights cannot be read ({error})") from error
    if len(entries) != len(tensors):
        raise ChannelError(f"a trainer rank describes {len(entries)} shards of its weights and sends {len(tensors)}")
    return [WeightShard(one.name, one.global_shape, one.offsets, tensor) for one, tensor in zip(entries, tensors, strict=True)]


def _by_name(ranks: Mapping[int, Sequence[WeightShard]] | Mapping[None, Sequence[WeightShard]]) -> dict[str, list[Owned]]:
    """Group the shards by parameter. A name that only a later rank has comes after the name that precedes it in this rank,
    or at the end."""
    found: dict[str, list[Owned]] = {}
    following: dict[str | None, str | None] = {None: None}  # a chain of names, from None
    end: str | None = None
    for rank, shards in ranks.items():
        last = end
        for shard in shards:
            if shard.name not in found:
                following[shard.name], following[last] = following[last], shard.name
                end = shard.name if last == end else end
            found.setdefault(shard.name, []).append((rank, shard))
            last = shard.name
    ordered, name = {}, following[None]
    while name is not None:
        ordered[name], name = found[name], following[name]
    return ordered


def _check(name: str, found: list[Owned]) -> None:
    """Check the boxes of a parameter for all faults except holes."""
    first_rank, first = found[0]
    for rank, shard in found:
        dims = {len(shard.global_shape), len(shard.offsets), shard.tensor.dim()}
        if len(dims) > 1 or any(not 0 <= begin <= end <= most for (begin, end), most in zip(shard.spans, shard.global_shape, strict=True)):
            raise ChannelError(
                f"weights: '{name}': {_who(rank)} has a box of shape {list(shard.tensor.shape)} at offsets {list(shard.offsets)}, "
                f"which exceeds the parameter's shape {list(shard.global_shape)}; a box lies within it in every dim: fix `weight_shards`"
            )
        if tuple(shard.global_shape) != tuple(first.global_shape) or shard.tensor.dtype != first.tensor.dtype:
            raise ChannelError(
                f"weights: '{name}' is {list(first.global_shape)} of {first.tensor.dtype} on {_who(first_rank)} and "
                f"{list(shard.global_shape)} of {shard.tensor.dtype} on {_who(rank)}; every rank must yield the full shape of "
                "the Hugging Face parameter and the same dtype: fix `weight_shards`"
            )
    two = _overlap([(rank, shard) for rank, shard in found if shard.tensor.numel()])
    if two is not None:
        raise ChannelError(
            f"{_title_of(name, found)}: {_owner_of(*two[0])} overlaps {_owner_of(*two[1])}; every element is sent once: "
            "a shard that several ranks share has replica=0 on one rank, and other numbers on the others"
        )


def _overlap(boxes: list[Owned]) -> tuple[Owned, Owned] | None:
    """Find two boxes that share an element, with a sweep along the dim with the most cuts, so that few pairs are compared."""
    if len(boxes) < 2:
        return None
    spans = [shard.spans or [(0, 1)] for _, shard in boxes]
    dim = max(range(len(spans[0])), key=lambda d: len({span[d][0] for span in spans}))
    under: list[int] = []  # boxes that overlap the position of the sweep
    for at in sorted(range(len(boxes)), key=lambda i: spans[i][dim]):
        under = [other for other in under if spans[other][dim][1] > spans[at][dim][0]]
        for other in under:
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(spans[at], spans[other], strict=True)):
                return boxes[other], boxes[at]
        under.append(at)
    return None


def _title_of(name: str, found: list[Owned]) -> str:
    return f"weights: '{name}' {list(found[0][1].global_shape)}"


def _owner_of(rank: int | None, shard: WeightShard) -> str:
    return f"{shard} of {_who(rank)}"


def _who(rank: int | None) -> str:
    return "this trainer rank" if rank is None else f"trainer rank {rank}"
