"""The folder of an export: weights and companion files grow under a hidden name, and one rename makes it whole."""

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlgraph.engines.hf_export.layout import INDEX, ExportDtype, ExportLayout
from rlgraph.engines.hf_models.pretrained import parameter_shapes
from rlgraph.engines.hf_models.text_part import is_head
from rlgraph.errors import ExportError

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
        raise ExportError(f"export('{folder}'): this name exists; an export replaces nothing: give another name, or remove what is there")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"export('{folder}'): its parent folder cannot be made ({error}); give a folder that can") from None
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ExportError(f"export('{folder}'): '{target.parent}' cannot be written; give a folder that can")
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

Numbers = tuple[int, ...]
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
        raise ExportError(f"{where}: the trainer holds no {lacks[:3]}, which the model's folder '{model}' has; it is of another model")
    return found


def _find_prefix(name: str, known: Iterable[str]) -> str | None:
    return min((own for own in known if own.endswith(f".{name}")), key=len, default=None)
