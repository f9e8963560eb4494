"""The weights of a model folder, read box by box under the names of the model's parameters, also if transformers fuses them."""

import copy
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from rlgraph.channels.weights.shards import WeightShard, unsharded_weights
from rlgraph.engines.hf.model_files import header_places, header_shapes, in_text_model, is_text
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.errors import DataError
from rlgraph.plan.estimates import PIECE_BYTES

# Read tensors of safetensors files into memory of a host or a GPU, several pieces at once.

READERS = 4  # threads, which share PIECE_BYTES: one alone reads as fast as it copies from the page cache, 2 to 4 GB/s
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class FileBox:
    """Where the numbers of a box lie in a file, one after the other, and `out`, contiguous, which they are to fill in its own dtype."""

    file: Path
    begin: int
    dtype: torch.dtype
    out: torch.Tensor


class PieceReader:
    """Reads boxes of the files in pieces of `PIECE_BYTES` over all threads, each of which reads, copies and casts one at a time.

    What crosses the bus to a GPU has the dtype of the file, and lies in pinned memory. Nothing is mapped, so that pages which were read
    don't count as memory of the process.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._places = {name: (file, place) for file in files for name, place in header_places(file).items()}
        self._own = threading.local()  # of a thread: its piece of memory, and its stream
        self._pool: ThreadPoolExecutor | None = None  # its threads end with it

    def box(self, source: str, offsets: tuple[int, ...], out: torch.Tensor) -> FileBox | None:
        """Find the box of a tensor that begins at `offsets` and is as large as `out`; None where it does not lie in one run of the file."""
        file, (kind, shape, begin) = self._places[source]
        same = tuple(out.shape[1:]) == shape[1:] and out.is_contiguous()
        if kind not in DTYPES or not shape or not same:
            return None
        dtype, row = DTYPES[kind], torch.Size(shape[1:]).numel()
        return FileBox(file, begin + offsets[0] * row * dtype.itemsize, dtype, out)

    def read(self, boxes: Iterable[FileBox]) -> None:
        """Fill the boxes. Raises DataError for a file that ends early."""
        pieces = [piece for box in boxes for piece in _pieces(box)]
        if not pieces:
            return
        device = pieces[0].out.device
        begun = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None  # earlier work may use this memory
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, "reader")
        with ExitStack() as stack:
            opened = {file: stack.enter_context(file.open("rb", buffering=0)).fileno() for file in {piece.file for piece in pieces}}
            for _ in self._pool.map(lambda piece: self._read(opened[piece.file], piece, begun), pieces):
                pass

    def _read(self, opened: int, piece: FileBox, begun: torch.cuda.Event | None) -> None:
        size, on_gpu = piece.out.numel() * piece.dtype.itemsize, begun is not None
        if not hasattr(self._own, "memory"):
            self._own.memory = torch.empty(PIECE_BYTES // READERS, dtype=torch.uint8, pin_memory=on_gpu)
            self._own.stream = torch.cuda.Stream(piece.out.device) if on_gpu else None
        held = self._own.memory[:size]
        into = memoryview(held.numpy())
        done = 0
        while done < size:
            count = os.preadv(opened, [into[done:]], piece.begin + done)
            if not count:
                raise DataError(f"'{piece.file}' ends at byte {piece.begin + done}, within a tensor: it was cut off while it was read")
            done += count
        numbers = held.view(piece.dtype).view(piece.out.shape)
        if begun is None:
            piece.out.copy_(numbers)
            return
        with torch.cuda.stream(self._own.stream):
            begun.wait(self._own.stream)
            piece.out.copy_(numbers.to(piece.out.device, non_blocking=True))
            self._own.stream.synchronize()  # then this memory is free for the next piece


def _pieces(box: FileBox) -> Iterator[FileBox]:
    flat = box.out.view(-1)
    numbers = PIECE_BYTES // READERS // box.dtype.itemsize
    for start in range(0, flat.numel(), numbers):
        yield FileBox(box.file, box.begin + start * box.dtype.itemsize, box.dtype, flat[start : start + numbers])


# The tensors of a model's folder as boxes of a model's parameters, which transformers may fuse: the names that leave a trainer.
#
# Loaders of engines, exports and other programs know a model by the names of its folder, where each expert has matrices of its own. In
# memory transformers keeps all experts of a layer in one parameter. A part is a view, so nothing is copied to give it its own name.

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

    def view_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """View the part of a whole parameter."""
        box = parameter[tuple(slice(*span) for span in self.spans)]
        return box.squeeze(0) if self.one_of_many else box


PartsByName: TypeAlias = Mapping[str, tuple[FolderPart, ...]]  # by parameter


def whole_part(name: str, shape: Numbers) -> FolderPart:
    """The tensor of a folder that is a whole parameter."""
    return FolderPart(name, shape, tuple((0, size) for size in shape))


def copy_parts(parameters: Mapping[str, torch.Tensor], parts: PartsByName, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights, by their names in the folder, into the parameters whose `parts` they are."""
    for name, parameter in parameters.items():
        for part in parts[name]:
            part.view_of(parameter).copy_(weights[part.name])


def fused_parts(operations: Iterable[Any], sources: Mapping[str, list[str]], shapes: Mapping[str, Numbers]) -> tuple[FolderPart, ...]:
    """Find the parts of a parameter that transformers makes of `sources`, the tensors by pattern and in their order.

    It knows experts that are stacked, and then concatenated, e.g. gate and up. Other operations have no parts.
    """
    kinds = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]  # of transformers, some with one
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
    parameters = unsharded_weights({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
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
            yield from _cut_shard(shard, named)


def _cut_shard(shard: WeightShard, parts: Iterable[FolderPart]) -> Iterator[WeightShard]:
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


# The weights of a model folder, read box by box under the names of the model's parameters.
#
# A parameter is a tensor of the folder under its own name or an old one, or in models whose code fuses what the folder keeps apart (the
# experts of a layer) several of them: only the box is read. What is fused in another way is made whole by transformers' own conversion.

Pieces: TypeAlias = Iterator[tuple[slice, torch.Tensor]]  # of a box, each with its rows


class FolderWeights:
    """The weights of the folder `path` for `model`, a `skeleton` or a built model.

    Of a multimodal folder that is the language model; with `whole` the model has all of its parts, or some. Raises DataError for a
    parameter that the folder does not hold, or holds in another shape.
    """

    def __init__(self, path: str | Path, model: Any, *, whole: bool = False) -> None:
        self._path, self._model = path, model
        self._nested = check_model(path).nested and not whole
        found = [(file, header_shapes(file)) for file in sorted(check_model(path).path.glob("*.safetensors"))]
        self._reader = PieceReader(file for file, _ in found)
        self._files = {name: (file, shape) for file, shapes in found for name, shape in shapes.items()}  # by tensor of the folder
        self._plain: dict[str, str] = {}  # by parameter, the tensor of the folder that it is
        self._made: dict[str, tuple[str, Any, dict[str, tuple[str, str]]]] = {}  # by parameter, conversion and its tensors
        self._last: tuple[str, Mapping[str, Any]] = ("", {})  # the conversion made last: one may give several parameters
        self._alias: dict[str, str] = {}  # by parameter that the folder lacks, one that it is tied to
        self._resolve()
        self._check()
        self._tie()

    def fill(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Copy the box of a parameter or buffer that begins at `offsets` and is as large as `out` into `out`, in its dtype."""
        if not out.numel():
            return
        name = self._alias.get(name, name)
        parts = self._fused_parts(name) if name in self._made else ()
        if name in self._made and not parts:
            _copy(self._pieces(name, tuple(offsets), tuple(out.shape)), out)
            return
        sources = [WeightShard(self._plain.get(name, name), tuple(out.shape), tuple(offsets), out)]
        if parts:
            box = WeightShard(name, tuple(self._model.get_parameter(name).shape), tuple(offsets), out)
            sources = list(folder_shards([box], {name: parts}))
        runs = [self._reader.box(part.name, part.offsets, part.tensor) for part in sources]
        self._reader.read(run for run in runs if run is not None)
        for part, run in zip(sources, runs, strict=True):
            if run is None:
                _copy(self._read(part.name, part.offsets, tuple(part.tensor.shape)), part.tensor)

    def load(self, dtype: torch.dtype) -> None:
        """Give the model its parameters in host memory, in `dtype`, and the buffers that the folder holds."""
        made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied parameters stay one
        for place, module in self._model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in made:
                    made[parameter] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
                    self.fill(f"{place}.{name}", (0,) * parameter.dim(), made[parameter].detach())
                module.register_parameter(name, made[parameter])
            for name, buffer in module.named_buffers(recurse=False):
                if self.holds(f"{place}.{name}"):
                    self.fill(f"{place}.{name}", (0,) * buffer.dim(), buffer)

    def holds(self, name: str) -> bool:
        """Whether the folder has what a parameter or buffer of this name is made of."""
        name = self._alias.get(name, name)
        return name in self._plain or name in self._made

    def source(self, name: str) -> str | None:
        """The name in the folder of the tensor that a parameter is; None for one that is made of several, or is not there."""
        return self._plain.get(self._alias.get(name, name))

    def parts(self) -> PartsByName:
        """The tensors of the folder that each parameter is made of; none for a parameter whose making they do not show."""
        shapes = {source: shape for source, (_, shape) in self._files.items()}
        found: dict[str, tuple[FolderPart, ...]] = {}
        for parameter, _ in self._model.named_parameters():
            name = self._alias.get(parameter, parameter)
            if name in self._plain:
                found[parameter] = (whole_part(self._plain[name], shapes[self._plain[name]]),)
            elif name in self._made:
                found[parameter] = self._fused_parts(name)
        return found

    def _fused_parts(self, name: str) -> tuple[FolderPart, ...]:
        """The tensors of the folder that a conversion makes a parameter of; none where it does not show them."""
        first, converter, sources = self._made[name]
        by_pattern: dict[str, list[str]] = {pattern: [] for pattern in converter.source_patterns}
        for source, (_, pattern) in sources.items():
            by_pattern[pattern].append(source)
        shapes = {source: self._files[source][1] for source in sources}
        return fused_parts(converter.operations, by_pattern, shapes) if first == name else ()

    def _pieces(self, name: str, offsets: Numbers, shape: Numbers) -> Pieces:
        """Yield the box of a parameter in pieces, each with its rows of the box."""
        name = self._alias.get(name, name)
        if name in self._plain:
            yield from self._read(self._plain[name], offsets, shape)
        else:
            yield slice(None), self._convert_parameter(name)[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))]

    def _read(self, source: str, offsets: Numbers, shape: Numbers) -> Pieces:
        """Yield the box of a tensor of the folder in pieces of `PIECE_BYTES` along its first dim."""
        from safetensors import safe_open

        if not shape:
            with safe_open(self._files[source][0], "pt") as tensors:
                yield slice(None), tensors.get_tensor(source)
            return
        inner = [slice(at, at + size) for at, size in zip(offsets[1:], shape[1:], strict=True)]
        rows = max(1, PIECE_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))
        for start in range(0, shape[0], rows):
            end = min(start + rows, shape[0])
            with safe_open(self._files[source][0], "pt") as tensors:  # opened again, so that pages that were read are let go
                yield slice(start, end), tensors.get_slice(source)[(slice(offsets[0] + start, offsets[0] + end), *inner)]

    def _resolve(self) -> None:
        """Find for each tensor of the folder the parameter that it is, or is a part of, by the renamings of transformers."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mappings = get_model_conversion_mapping(self._model)
        renamings = [mapping for mapping in mappings if isinstance(mapping, WeightRenaming)]
        converters = [mapping for mapping in mappings if isinstance(mapping, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        state, prefix = self._model.state_dict(), self._model.base_model_prefix
        for source in sorted(self._files, key=dot_natural_key):
            if not is_text(source, self._nested):
                continue
            known = in_text_model(source) if self._nested else source
            name, pattern = rename_source_key(known, renamings, converters, prefix, state)
            if name not in state and known in state:
                name, pattern = rename_source_key(known, [], [], prefix, state)
            if name not in state:
                continue
            if pattern is None:
                self._plain.setdefault(name, source)
                continue
            converter = by_pattern[pattern]
            targets = [name.replace(converter.target_patterns[0], other) for other in converter.target_patterns]
            _, _, sources = self._made.setdefault(name, (name, converter, {}))
            sources[source] = (name, pattern)
            self._made |= {target: self._made[name] for target in targets if target in state}

    def _convert_parameter(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        first, converter, sources = self._made[name]
        if self._last[0] != first:
            self._last = ("", {})
            making = copy.deepcopy(converter)
            for source, (target, pattern) in sources.items():
                with safe_open(self._files[source][0], "pt") as tensors:
                    making.add_tensor(target, source, pattern, tensors.get_tensor(source).detach)
            self._last = first, making.convert(first, model=self._model, config=self._model.config)
        found = self._last[1][name]
        tensor: torch.Tensor = found[0] if isinstance(found, list) else found
        return tensor

    def _check(self) -> None:
        state = self._model.state_dict()
        for name, source in self._plain.items():
            file, shape = self._files[source]
            if shape != tuple(state[name].shape):
                raise DataError(
                    f"'{file}': '{source}' has the shape {list(shape)}, but by config.json it is {list(state[name].shape)}: weights and "
                    "config belong to different models; take both from one"
                )

    def _tie(self) -> None:
        """Let tied parameters of which the folder holds one be that one, and keep apart what it holds twice with different values."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        lacking = []
        for names in groups.values():
            there = [name for name in names if self.holds(name)]
            lacking += [] if there else names
            self._alias |= {name: there[0] for name in names if there and name not in there}
            for name in there[1:]:
                if not self._same(there[0], name):
                    module, _, own = name.rpartition(".")
                    old = self._model.get_parameter(name)
                    self._model.get_submodule(module).register_parameter(own, torch.nn.Parameter(torch.empty_like(old)))
        if lacking:
            raise DataError(
                f"model '{self._path}': its *.safetensors hold no weights for {lacking[:3]}{' …' if len(lacking) > 3 else ''}; they belong "
                "to another model than config.json, or a part is missing"
            )

    def _same(self, first: str, second: str) -> bool:
        shape = tuple(self._model.get_parameter(first).shape)
        pieces = zip(*(self._pieces(name, (0,) * len(shape), shape) for name in (first, second)), strict=True)
        return all(torch.equal(one, other) for (_, one), (_, other) in pieces)


def _copy(pieces: Pieces, out: torch.Tensor) -> None:
    for rows, piece in pieces:
        target = out[rows] if out.dim() else out
        target.copy_(piece.to(out.device))  # cast there: what crosses the bus is the file's dtype
