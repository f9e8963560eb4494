"""The state of a trained model on disk, in shards: every rank writes its own rows and reads those it has now, however many ranks there are.

torch.distributed.checkpoint does the work, but for its messages between ranks, which are pickles: ours are plain values. Nothing that
is read back can run code either.
"""

import enum
import functools
import os
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.engines.fsdp.optimizers import CODES, NAMES, HostMomentsAdamW, SixteenBitAdamW, first_moments
from rlgraph.engines.fsdp.sharding import RankFailed, all_gather_results, as_dtensor
from rlgraph.engines.registry import SavedShard
from rlgraph.errors import CheckpointError

# The pieces of a state that each rank writes, as plain values to send to other ranks, and back as torch.distributed.checkpoint's.

KINDS = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8
DTYPES = {str(kind).removeprefix("torch."): kind for kind in KINDS}
FILE = r"__\d+_\d+\.distcp"
Numbers = tuple[int, ...]


class Index(msgspec.Struct, frozen=True, array_like=True):
    """The name of a piece: its tensor, its offset and its place in the plan."""

    name: str
    offset: Numbers | None
    place: int | None

    def restore(self) -> MetadataIndex:
        return MetadataIndex(self.name, self.offset, self.place)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a tensor that a rank holds."""

    index: Index
    kind: str
    offset: Numbers
    size: Numbers
    dtype: str
    whole: Numbers

    def restore(self) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.size))
        data = TensorWriteData(chunk, TensorProperties(DTYPES[self.dtype]), torch.Size(self.whole))
        return WriteItem(self.index.restore(), WriteItemType[self.kind], tensor_data=data)


class PiecePlace(msgspec.Struct, frozen=True, array_like=True):
    """The file and offset at which a rank has written a piece."""

    index: Index
    size: int
    file: str
    at: int
    length: int

    def restore(self) -> WriteResult:
        if not re.fullmatch(FILE, self.file):
            raise ValueError(f"a rank says that it wrote '{self.file}', which is not the name of a shard")
        return WriteResult(self.index.restore(), self.size, _StorageInfo(self.file, self.at, self.length))


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
    items = [piece.restore() for piece in found]
    return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})


def places(results: Sequence[WriteResult]) -> list[PiecePlace]:
    """List the files and offsets of a rank's written pieces."""
    stored = [(result, result.storage_data) for result in results]
    return [PiecePlace(_index(r.index), r.size_in_bytes, data.relative_path, data.offset, data.length) for r, data in stored]


def _index(index: MetadataIndex) -> Index:
    return Index(index.fqn, None if index.offset is None else tuple(index.offset), index.index)


State = Mapping[str, torch.Tensor]  # DTensors where the ranks have rows of their own, else the same tensor on each
WEIGHTS = "weights."  # begins their names in a state
BLOCKS = "If it has the same setting, blocks of moments lie in two ranks: go on with as many ranks as wrote it"
CONTENTS = "torch.distributed.checkpoint.metadata"
ALLOWED = {  # what a table of contents is made of; a pickle that asks for anything else is refused
    *((CONTENTS, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    *((CONTENTS, name) for name in ("ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    *(("torch", name) for name in DTYPES),
    ("torch.serialization", "_get_layout"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}


def training_state(parameters: Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Collect the live weights and moments by name. Moments that the optimizer would make at its first step are made now."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(optimizer, (HostMomentsAdamW, SixteenBitAdamW)):
        optimizer.make_state()
    for name, parameter in parameters:
        held = optimizer.state[parameter]
        if not held:
            held.update(first_moments(optimizer, parameter))
        found[f"{WEIGHTS}{name}"] = as_dtensor(parameter.detach(), parameter)
        for moment, value in held.items():  # of the parameter's shape, but for the count of steps and 8-bit codes, which ranks do not `cut`
            found[moment_key(name, moment)] = as_dtensor(value, parameter) if value.shape == parameter.shape else value
    return found


def moment_key(name: str, moment: str) -> str:
    """The name in a state of what the optimizer holds of a parameter, such as "exp_avg"."""
    return f"moments.{name}.{moment}"


class StateCopy:
    """A copy of a state in host memory, which is reused: the run goes on while the copy is written."""

    def __init__(self) -> None:
        self.copy: dict[str, torch.Tensor] = {}

    def take(self, state: State) -> Mapping[str, torch.Tensor]:
        """Copy the state; blocks until it is copied."""
        for name, tensor in state.items():
            if name not in self.copy:
                self.copy[name] = _host_like(tensor)
            _local(self.copy[name]).copy_(_local(tensor.detach()))
        return self.copy


class Saver:
    """Saves the state of one rank of a model, repeatedly; it keeps the host memory of the copy and the process group of the ranks.

    This is `save` of a train engine whose state is a mapping of tensors, as `save = lambda: saver.save(self.state(), folder, deadline_s)`.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._staging = StateCopy()
        self._group: Any = None

    def save(self, state: State, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        """Copy the state, and return the function that writes the copy; see `TrainEngine.save`. Every rank calls it."""
        if self._group is None:
            self._group = writing_group(self._world, timedelta(seconds=deadline_s))
        copy = self._staging.take(state)
        return lambda: write(folder, copy, self._rank, self._group)


def write(folder: Path, state: State, rank: int, group: Any) -> list[Path]:
    """Write this rank's shards, synced to disk, and return its files. `group` is None for a world of one.

    Raises CheckpointError if the folder cannot be written.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    planner = DefaultSavePlanner()

    def own_pieces() -> list[Piece]:
        planner.set_up_planner(dict(state), writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        return pieces(writer.prepare_local_plan(planner.create_local_plan()))

    def own_places() -> list[PiecePlace]:
        done = writer.write_data(planner.finish_plan(plans[rank]), planner)
        done.wait()
        return places(done.value())

    def complete() -> None:
        if rank == 0:
            writer.finish(contents, [[place.restore() for place in found] for found in written])

    try:
        found = all_gather_results(group, own_pieces, list[Piece], _reason)
        plans, contents = planner.create_global_plan([plan(pieces) for pieces in found])  # the same on every rank
        plans = writer.prepare_global_plan(plans)
        written = all_gather_results(group, own_places, list[PiecePlace], _reason)
        all_gather_results(group, complete, type(None), _reason)
    except RankFailed as error:
        raise CheckpointError(f"folder '{folder}': {error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"folder '{folder}': {_reason(error)}") from error
    files = sorted(folder.glob(f"__{rank}_*"))
    return [*files, folder / ".metadata"] if rank == 0 else files


def read(folder: Path, state: State) -> None:
    """Load a written state into the live tensors of `state`, whatever the number of ranks that wrote it.

    Raises CheckpointError if a tensor is missing or has another shape.
    """
    reader = _Reader(folder)
    known = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        if name not in known:
            raise CheckpointError(f"folder '{folder}' holds no '{name}'; {_other(name, known)}")
        entry = known[name]
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else ()
        if size != tuple(tensor.shape):
            raise CheckpointError(
                f"folder '{folder}': '{name}' has shape {size}, the model's is {tuple(tensor.shape)}; it is another model"
            )
    try:
        with _silence_warning():
            load(dict(state), storage_reader=reader, no_dist=True)  # a rank finds by itself what it reads
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(f"folder '{folder}': {_reason(error)}") from error


def _other(name: str, known: Collection[str]) -> str:
    """Describe a checkpoint that has no tensor of this name."""
    place, _, moment = name.rpartition(".")
    names = {"exp_avg": "32bit", NAMES[0]: "16bit", CODES[0]: "8bit"}
    theirs = next((bits for other, bits in names.items() if f"{place}.{other}" in known), None)
    if moment in names and theirs is not None:
        fix = f"leave out moments='{names[moment]}'" if theirs == "32bit" else f"write rg.AdamW(moments='{theirs}')"
        blocks = f" {BLOCKS}" if "8bit" in (names[moment], theirs) else ""
        return f"its moments are of {theirs.removesuffix('bit')} bits: {fix}.{blocks}"
    return "it is a checkpoint of another model or optimizer"


def weights_of(folder: Path) -> Iterator[SavedShard]:
    """Find the weights of a written state, in the boxes in which the ranks wrote them; each is read by itself.

    Raises CheckpointError for a folder that holds no such state.
    """
    reader = _Reader(folder)
    try:
        contents = reader.read_metadata()
    except (OSError, pickle.UnpicklingError, AssertionError) as error:
        raise CheckpointError(f"folder '{folder}': {_reason(error)}") from error
    reader.set_up_storage_reader(contents, is_coordinator=False)
    for name, held in contents.state_dict_metadata.items():
        if name.startswith(WEIGHTS) and isinstance(held, TensorStorageMetadata):
            for number, chunk in enumerate(held.chunks):
                place = MetadataIndex(name, chunk.offsets, number)
                empty = torch.empty(chunk.sizes, dtype=held.properties.dtype, device="meta")
                box = WeightShard(name.removeprefix(WEIGHTS), tuple(held.size), tuple(chunk.offsets), empty)
                yield SavedShard(box, functools.partial(_read_piece, reader, contents, place, empty))


def _read_piece(reader: FileSystemReader, contents: Metadata, place: MetadataIndex, empty: torch.Tensor) -> torch.Tensor:
    """Read one piece of a tensor, as it was written."""
    into = torch.empty_like(empty, device="cpu")
    at = torch.Size([0] * into.dim())
    planner = DefaultLoadPlanner()
    planner.set_up_planner({place.fqn: into}, contents, is_coordinator=False)
    item = ReadItem(LoadItemType.TENSOR, MetadataIndex(place.fqn), at, place, at, into.size())
    reader.read_data(LoadPlan([item]), planner).wait()
    return into


def writing_group(world: int, timeout: Any) -> Any:
    """Make a group for writing beside the run, whose collectives do not mix with those of training; every rank calls it."""
    return dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None


class _Reader(FileSystemReader):
    """Reads the table of contents, and unpickles only the classes that it consists of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(os.path.join(self.path, ".metadata"), "rb") as file:
            metadata = _Contents(file).load()
        assert isinstance(metadata, Metadata)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Contents(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise CheckpointError(f"the table of contents of a checkpoint asks for '{module}.{name}', which none that rlgraph wrote does")


def _member(kind: Any, name: Any) -> Any:
    """Find the member of an enumeration, which Python before 3.11.4 pickles by getattr."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise CheckpointError(f"the table of contents of a checkpoint asks for '{name}' of {kind}, which none that rlgraph wrote does")
    return kind[name]


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device="cpu")
    # On the mesh that it came from, but in memory of the host, which `from_local` would leave for the mesh's own device.
    return DTensor(torch.empty_like(tensor.to_local(), device="cpu"), tensor._spec, requires_grad=False)


@contextmanager
def _silence_warning() -> Iterator[None]:
    """Silence torch's warning that a rank reads alone, without the others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reason(error: BaseException) -> str:
    """Name the first cause in a few words. Each rank may have one, and the operating system's error may be the cause of another."""
    failures = error.failures if isinstance(error, CheckpointException) else None
    first = next(iter(failures.values())) if failures else error
    found: BaseException = first[0] if isinstance(first, tuple) else first
    behind: BaseException | None = found
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    found = behind or found
    return f"{type(found).__name__}: {str(found).splitlines()[0] if str(found) else ''}"
