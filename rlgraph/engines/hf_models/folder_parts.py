"""The tensors of a model's folder as boxes of a model's parameters, which transformers may fuse: the names that leave a trainer.

Loaders of engines, exports and other programs know a model by the names of its folder, where each expert has matrices of its own. In
memory transformers keeps all experts of a layer in one parameter. A part is a view, so nothing is copied to give it its own name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from rlgraph.channels.weights.shards import WeightShard, whole

Numbers: TypeAlias = tuple[int, ...]
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class FolderPart:
    """A tensor of a folder, `name` with its `shape`, and the box of a parameter that it is: `spans` are begin and end in each dim.

    A part that is `one_of_many` lies at one index of the parameter's first dim, and its own tensor has no such dim.
    """

    name: str
    shape: Numbers
    spans: tuple[Span, ...]
    one_of_many: bool = False

    def within(self, parameter: torch.Tensor) -> torch.Tensor:
        """View the part of a whole parameter."""
        box = parameter[tuple(slice(*span) for span in self.spans)]
        return box.squeeze(0) if self.one_of_many else box


PartsByName: TypeAlias = Mapping[str, tuple[FolderPart, ...]]  # by parameter


def whole_part(name: str, shape: Numbers) -> FolderPart:
    """The tensor of a folder that is a whole parameter."""
    return FolderPart(name, shape, tuple((0, size) for size in shape))


def fused_parts(operations: Iterable[Any], sources: Mapping[str, list[str]], shapes: Mapping[str, Numbers]) -> tuple[FolderPart, ...]:
    """Find the parts of a parameter that transformers makes of `sources`, the tensors by pattern and in their order.

    It knows experts that are stacked, and then concatenated, as gate and up are. For other operations there are no parts.
    """
    kinds = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
    if kinds not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]) or (len(kinds) == 1) != (len(sources) == 1):
        return ()
    found = []
    begin = 0
    for names in sources.values():
        rows = shapes[names[0]][0]
        for index, name in enumerate(names):
            spans = ((index, index + 1), (begin, begin + rows), *((0, size) for size in shapes[name][1:]))
            found.append((index, FolderPart(name, shapes[name], spans, one_of_many=True)))
        begin += rows
    return tuple(part for _, part in sorted(found, key=lambda indexed: indexed[0]))


def folder_shapes(shapes: Mapping[str, Numbers], parts: PartsByName) -> dict[str, Numbers]:
    """Find the tensors of a folder, and their shapes, that parameters of these shapes are.

    >>> folder_shapes({"norm": (4,)}, {"norm": (whole_part("model.norm", (4,)),)})
    {'model.norm': (4,)}
    """
    parameters = whole({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    return {shard.name: shard.global_shape for shard in folder_shards(parameters, parts)}


def folder_shards(shards: Iterable[WeightShard], parts: PartsByName) -> Iterator[WeightShard]:
    """Cut shards of parameters into shards of the folder's tensors; a parameter without parts keeps its name.

    >>> parts = {"experts": tuple(FolderPart(f"experts.{i}", (2, 4), ((i, i + 1), (0, 2), (0, 4)), True) for i in range(3))}
    >>> shard = WeightShard("experts", (3, 2, 4), (1, 0, 0), torch.zeros(2, 2, 4))
    >>> [(part.name, str(part)) for part in folder_shards([shard], parts)]
    [('experts.1', '[0:2, 0:4]'), ('experts.2', '[0:2, 0:4]')]
    """
    for shard in shards:
        named = parts.get(shard.name, ())
        if len(named) == 1 and not named[0].one_of_many:
            yield replace(shard, name=named[0].name)
        elif not named:
            yield shard
        else:
            yield from _cut(shard, named)


def _cut(shard: WeightShard, parts: Iterable[FolderPart]) -> Iterator[WeightShard]:
    held = shard.spans
    for part in parts:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part.spans, held, strict=True)]
        if any(begin >= end for begin, end in both):
            continue
        tensor = shard.tensor[tuple(slice(a - begin, b - begin) for (a, b), (begin, _) in zip(both, held, strict=True))]
        offsets = tuple(a - begin for (a, _), (begin, _) in zip(both, part.spans, strict=True))
        if part.one_of_many:
            tensor, offsets = tensor.squeeze(0), offsets[1:]
        yield WeightShard(part.name, part.shape, offsets, tensor, shard.replica)
