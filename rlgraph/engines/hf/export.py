"""Export weights as a folder of Hugging Face: the layout is known first, then the files grow under a hidden name.

The layout says which rank writes its boxes to which bytes of which file. One rename makes the folder whole.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import torch

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.engines.hf.model_files import is_head
from rlgraph.engines.hf.pretrained import parameter_shapes
from rlgraph.errors import ExportError

# The layout of exported weights: which safetensors file holds a parameter, and at which byte, before any weight is written.
#
# Every rank writes its own boxes to these places, so no rank needs what another one holds.

Numbers: TypeAlias = tuple[int, ...]
ExportDtype: TypeAlias = Literal["bfloat16", "float32"]
AdapterForm: TypeAlias = Literal["merged", "apart"]  # of an export of a model that trained an adapter
DTYPES: Mapping[str, tuple[str, torch.dtype]] = {"bfloat16": ("BF16", torch.bfloat16), "float32": ("F32", torch.float32)}
MOST_FILE_BYTES = 5_000_000_000  # as hubs ask for; a larger parameter gets a file of its own
ALIGNMENT = 8  # of the first tensor, as in files that safetensors writes
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

assert set(DTYPES) == set(get_args(ExportDtype))


class ShardBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of a parameter that a rank holds, without its tensor."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    size: tuple[int, ...]


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """The place of a parameter: it begins at byte `begin` of file number `file`. `source` is the trainer's name of it."""

    name: str
    source: str
    shape: Numbers
    file: int
    begin: int


class ExportFile(msgspec.Struct, frozen=True, array_like=True):
    """A safetensors file: its name, its header with the 8 bytes of length in front, and its size."""

    name: str
    header: bytes
    bytes: int


class ExportLayout(msgspec.Struct, frozen=True, array_like=True):
    """All files of an export and the places of its parameters, in `dtype`. It travels to the ranks that write.

    >>> layout = plan_files({"norm.weight": ("norm.weight", (4,)), "head.weight": ("head.weight", (2, 4))}, "bfloat16")
    >>> [(slot.name, slot.begin - layout.slots[0].begin) for slot in layout.slots]
    [('head.weight', 0), ('norm.weight', 16)]
    """

    dtype: ExportDtype
    files: list[ExportFile]
    slots: list[Slot]

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(prod(slot.shape) for slot in self.slots)

    def index(self) -> str:
        """Write the index of the files, as JSON."""
        total = self.bytes - sum(len(file.header) for file in self.files)
        places = {slot.name: self.files[slot.file].name for slot in self.slots}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


def plan_files(
    parameters: Mapping[str, tuple[str, Numbers]], dtype: ExportDtype, most_bytes: int = MOST_FILE_BYTES, single: str = SINGLE
) -> ExportLayout:
    """Plan the files of parameters, given by their exported names as (trainer's name, shape): layer 2 before layer 10.

    A file alone has the name `single`; several are numbered, as `model-00001-of-00002.safetensors`.
    """
    width = DTYPES[dtype][1].itemsize
    groups: list[list[str]] = []
    size = most_bytes + 1
    for name in sorted(parameters, key=_natural):
        own = prod(parameters[name][1]) * width
        if size + own > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    files, slots = [], []
    for number, names in enumerate(groups):
        title = single if len(groups) == 1 else f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        header, ends = _header({name: parameters[name][1] for name in names}, dtype)
        begins = [0, *ends[:-1]]
        slots += [Slot(name, *parameters[name], number, len(header) + begin) for name, begin in zip(names, begins, strict=True)]
        files.append(ExportFile(title, header, len(header) + ends[-1]))
    return ExportLayout(dtype, files, slots)


def _header(shapes: Mapping[str, Numbers], dtype: ExportDtype) -> tuple[bytes, Sequence[int]]:
    """Write the header of a file, and where each of its tensors ends behind it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends: list[int] = []
    for name, shape in shapes.items():
        begin = ends[-1] if ends else 0
        ends.append(begin + prod(shape) * DTYPES[dtype][1].itemsize)
        entries[name] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [begin, ends[-1]]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, ends


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# Write the boxes of parameters that one rank holds to their places in the files of an export.

CHUNK_BYTES = 1 << 25  # cast and copied to the host at once: all the memory that writing takes


def write_shards(
    folder: Path, layout: ExportLayout, shards: Iterable[WeightShard], on_bytes: Callable[[int], None] = lambda count: None
) -> int:
    """Write boxes to the files of an export, which have their sizes already; return the bytes written, all of them on the disk.

    A box that another rank writes as well (`replica` above 0) is left to that rank, and so is a parameter that the layout leaves out.
    `on_bytes` is called after each chunk. Raises OSError where the disk does not take them.
    """
    slots = {slot.source: slot for slot in layout.slots}
    opened: dict[int, int] = {}
    written = 0
    try:
        for shard in shards:
            slot = slots.get(shard.name)
            if shard.replica or slot is None or not shard.tensor.numel():
                continue
            if slot.file not in opened:
                opened[slot.file] = os.open(folder / layout.files[slot.file].name, os.O_WRONLY | os.O_CLOEXEC)
            for at, data in _chunks(shard, slot, DTYPES[layout.dtype][1]):
                _write_all(opened[slot.file], data, at)
                written += len(data)
                on_bytes(written)
        for handle in opened.values():
            os.fsync(handle)
    finally:
        for handle in opened.values():
            os.close(handle)
    return written


def _chunks(shard: WeightShard, slot: Slot, dtype: torch.dtype) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of a box, in runs that are contiguous in the file, each with its offset there."""
    spans, run = _runs(shard)
    rows = shard.tensor.detach().reshape(len(spans), run)
    width = dtype.itemsize
    many = max(CHUNK_BYTES // (run * width), 1)  # short runs are cast together
    part = max(CHUNK_BYTES // width, 1)  # a long one in parts
    for first in range(0, len(rows), many):
        for begin in range(0, run, part):
            block = rows[first : first + many, begin : begin + part].to(dtype).cpu().contiguous()
            data = block.view(torch.uint8).numpy().data.cast("B")
            size = block.shape[1] * width
            for number in range(len(block)):
                yield slot.begin + (spans[first + number] + begin) * width, data[number * size : (number + 1) * size]


def _runs(shard: WeightShard) -> tuple[list[int], int]:
    """Cut a box into runs of elements that lie together in the whole parameter: the offset of each there, and their length.

    >>> _runs(WeightShard("w", (4, 3), (2, 0), torch.zeros(2, 3)))  # whole rows are one run
    ([6], 6)
    >>> _runs(WeightShard("w", (2, 4), (0, 2), torch.zeros(2, 2)))
    ([2, 6], 2)
    """
    shape, whole = tuple(shard.tensor.shape), tuple(shard.global_shape)
    cut = len(shape)  # every dim from here on is held whole
    while cut and shape[cut - 1] == whole[cut - 1]:
        cut -= 1
    outer = max(cut - 1, 0)
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    spans = [sum(offset * stride for offset, stride in zip(shard.offsets, strides, strict=True))]
    for dim in range(outer):
        spans = [span + place * strides[dim] for span in spans for place in range(shape[dim])]
    return spans, prod(shape[outer:])


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(handle, data, at)
        data, at = data[done:], at + done


# The folder of an export: it grows under a hidden name beside its place, and one rename makes it whole.
#
# Room for all weights is taken before the first one is written, so a full disk is found at once. A killed export leaves only a hidden
# folder, which the next export to that place removes.

GROWING = ".export"  # ends the hidden name
NO_ROOM = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EFBIG: "the system does not allow files so large"}


@dataclass(frozen=True)
class Exported:
    """An export that is whole: its folder, the steps of the run that its weights have seen, their dtype, number and bytes.

    `print` shows it on one line.
    """

    folder: Path
    step: int
    dtype: ExportDtype
    parameters: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.folder}: {self.parameters:,} parameters after step {self.step}, {self.dtype}, {self.bytes / 1e9:.2f} GB"


def check_target(folder: str | Path) -> Path:
    """Check the place of an export before anything starts, and return it as an absolute path.

    Raises ExportError if there is something already, or its parent cannot be written.
    """
    target = Path(os.path.abspath(folder))
    if os.path.lexists(target):
        raise ExportError(f"export('{folder}'): the path exists and an export does not overwrite; choose another path, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"export('{folder}'): its parent folder cannot be created ({error}); pass another folder") from None
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ExportError(f"export('{folder}'): '{target.parent}' cannot be written; pass a writable folder")
    return target


class GrowingExport:
    """An export that is being written, under a hidden name; `finish` makes it whole, `discard` leaves nothing.

    A context manager: left before `finish`, it discards. Raises ExportError for a place that `check_target` refuses, and where the disk
    has no room.
    """

    def __init__(self, folder: str | Path, layout: ExportLayout) -> None:
        self.target, self._layout = check_target(folder), layout
        self.path = self.target.parent / f".{self.target.name}-{secrets.token_hex(4)}{GROWING}"
        self._lock = -1
        _sweep(self.target)

    def __enter__(self) -> "GrowingExport":
        try:
            self.path.mkdir(mode=0o700)
            self._lock = _lock_folder(self.path)
            take_room(self.path, self._layout)
        except OSError as error:
            self.discard()
            raise self.note_failure(error) from error
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def finish(self) -> None:
        """Sync what lies in the folder, and give it its name. Raises ExportError if the disk fails or the name is taken by now."""
        try:
            for file in (file for file in self.path.rglob("*") if file.is_file()):
                _sync(file)
            self.path.chmod(0o755)
            _sync(self.path)
            if os.path.lexists(self.target):
                raise FileExistsError(errno.EEXIST, "somebody else made it meanwhile")
            self.path.rename(self.target)
            _sync(self.target.parent)
        except OSError as error:
            raise self.note_failure(error) from error

    def discard(self) -> None:
        """Remove what has not become whole."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def note_failure(self, error: OSError) -> ExportError:
        why = NO_ROOM.get(error.errno or 0)
        if why is None:
            return ExportError(f"export('{self.target}'): {type(error).__name__}: {error}; nothing is left there")
        free = shutil.disk_usage(self.target.parent).free
        return ExportError(
            f"export('{self.target}'): {why}: it takes {self._layout.bytes / 1e9:.3f} GB as {self._layout.dtype}, and {free / 1e9:.3f} GB "
            "are free there; make room or give a folder on another disk. Nothing is left there"
        )


def take_room(path: Path, layout: ExportLayout) -> None:
    """Make the files of a layout in a folder, with their headers and their sizes. Raises OSError where the disk has no room."""
    for file in layout.files:
        handle = os.open(path / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(handle, 0, file.bytes)
            os.pwrite(handle, file.header, 0)
        finally:
            os.close(handle)
    if len(layout.files) > 1:
        (path / INDEX).write_text(layout.index())


def _lock_folder(path: Path) -> int:
    """Lock a folder while this process lives, so that no other one takes it for a dead one's; -1 where the file system has no locks."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return -1
    return handle


def _sweep(target: Path) -> None:
    """Remove what killed exports to the same place have left."""
    for left in target.parent.glob(f".{target.name}-????????{GROWING}"):
        handle = _lock_folder(left)
        if handle >= 0:
            shutil.rmtree(left, ignore_errors=True)
            os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The files beside the weights of an exported folder: config, generation config, tokenizer with its chat template.

COPIED = (  # of the model's folder, where they are there
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "processor_config.json",
    "preprocessor_config.json",
)
GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_companions(folder: Path, model: Path, dtype: ExportDtype, scores: Literal["log_probs", "values"]) -> None:
    """Write config.json, generation_config.json and the tokenizer's files into `folder`, made of those of the model's folder."""
    config = json.loads((model / "config.json").read_text())
    _write(folder / "config.json", exported_config(config, dtype, scores))
    generation = model / "generation_config.json"
    if generation.exists():
        shutil.copyfile(generation, folder / generation.name)
    elif scores == "log_probs":
        tokens = {name: config[name] for name in GENERATION if config.get(name) is not None}
        _write(folder / generation.name, {"_from_model_config": True, **tokens})
    for name in COPIED:
        if (model / name).is_dir():
            shutil.copytree(model / name, folder / name)
        elif (model / name).exists():
            shutil.copyfile(model / name, folder / name)


def exported_config(config: Mapping[str, Any], dtype: ExportDtype, scores: Literal["log_probs", "values"]) -> dict[str, Any]:
    """Change a config to what is exported: plain weights in `dtype`, and for a critic the class that scores texts by one number.

    >>> exported_config({"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}, "bfloat16", "log_probs")
    {'architectures': ['LlamaForCausalLM'], 'dtype': 'bfloat16'}
    """
    found = {name: value for name, value in config.items() if name not in ("torch_dtype", "quantization_config")} | {"dtype": dtype}
    if scores == "values":
        names = [str(name).replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or ()]
        labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        found |= {"architectures": names, **labels}
    return found


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The names of a trainer's parameters in an exported folder: those of the folder that the model came from.

HEAD = "score.weight"  # of a critic; its folder may be a language model's, without one


def export_names(
    shapes: Mapping[str, Numbers], model: str | Path, scores: Literal["log_probs", "values"], where: str
) -> dict[str, tuple[str, Numbers]]:
    """Name the parameters of a trainer, given with their whole shapes, as the model's folder does: (trainer's name, shape) by each name.

    A head that is tied to the embeddings is left out: readers tie it again. A critic's backbone gets the prefix that it has in the folder.

    Raises ExportError for a parameter that the folder knows under no name, or in another shape, and for one that the trainer lacks.
    """
    known = parameter_shapes(model)
    found: dict[str, tuple[str, Numbers]] = {}
    for name, shape in shapes.items():
        if is_head(name) and name not in known:  # it is the embeddings
            continue
        own = name if name in known or (scores == "values" and name == HEAD) else _find_prefix(name, known)
        if own is None or known.get(own, shape) != shape:
            there = f"has the shape {list(known[own])}" if own is not None else "has no such name"
            raise ExportError(
                f"{where}: the trainer's parameter '{name}' {list(shape)} {there} in the model's folder '{model}'; an export keeps the "
                "names of that folder, which other programs read, and this architecture's differ in memory: it cannot be exported yet"
            )
        found[own] = name, shape
    lacks = sorted(name for name in known.keys() - found.keys() if not is_head(name)) if scores == "log_probs" else []
    if lacks:
        raise ExportError(f"{where}: the trainer lacks {lacks[:3]}, which the model's folder '{model}' has; it belongs to another model")
    return found


def _find_prefix(name: str, known: Iterable[str]) -> str | None:
    return min((own for own in known if own.endswith(f".{name}")), key=len, default=None)
