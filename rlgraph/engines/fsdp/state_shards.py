"""The pieces of a state that each rank writes, as plain values to send to other ranks, and back as torch.distributed.checkpoint's."""

import re
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

KINDS = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8
DTYPES = {str(kind).removeprefix("torch."): kind for kind in KINDS}
FILE = r"__\d+_\d+\.distcp"
Numbers = tuple[int, ...]


class Index(msgspec.Struct, frozen=True, array_like=True):
    """The name of a piece: its tensor, its offset and its place in the plan."""

    name: str
    offset: Numbers | None
    place: int | None

    def restored(self) -> MetadataIndex:
        return MetadataIndex(self.name, self.offset, self.place)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a tensor that a rank holds."""

    index: Index
    kind: str
    offset: Numbers
    size: Numbers
    dtype: str
    whole: Numbers

    def restored(self) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.size))
        data = TensorWriteData(chunk, TensorProperties(DTYPES[self.dtype]), torch.Size(self.whole))
        return WriteItem(self.index.restored(), WriteItemType[self.kind], tensor_data=data)


class PiecePlace(msgspec.Struct, frozen=True, array_like=True):
    """The file and offset at which a rank has written a piece."""

    index: Index
    size: int
    file: str
    at: int
    length: int

    def restored(self) -> WriteResult:
        if not re.fullmatch(FILE, self.file):
            raise ValueError(f"a rank says that it wrote '{self.file}', which is no name of a shard")
        return WriteResult(self.index.restored(), self.size, _StorageInfo(self.file, self.at, self.length))


def pieces(plan: SavePlan) -> list[Piece]:
    """List the pieces of a state that a rank's plan writes."""
    found = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, f"'{item.index.fqn}' is no tensor"
        offset, size = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        dtype = str(data.properties.dtype).removeprefix("torch.")
        found.append(Piece(_index(item.index), item.type.name, offset, size, dtype, tuple(data.size)))
    return found


def plan(found: Iterable[Piece]) -> SavePlan:
    """Build the plan of a rank with these pieces."""
    items = [piece.restored() for piece in found]
    return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})


def places(results: Sequence[WriteResult]) -> list[PiecePlace]:
    """List the files and offsets of a rank's written pieces."""
    stored = [(result, result.storage_data) for result in results]
    return [PiecePlace(_index(r.index), r.size_in_bytes, data.relative_path, data.offset, data.length) for r, data in stored]


def _index(index: MetadataIndex) -> Index:
    return Index(index.fqn, None if index.offset is None else tuple(index.offset), index.index)
