"""Export a model that trained an adapter: the adapter apart, as PEFT's folder, or merged into its base, as a whole model."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.engines.hf_export.folder import Exported, GrowingExport, exported, take_room, write_companions
from rlgraph.engines.hf_export.layout import DTYPES, ExportDtype, ExportLayout, Numbers, planned, write_shards
from rlgraph.engines.hf_models.pretrained import parameter_shapes
from rlgraph.engines.lora.modules import BaseWeights
from rlgraph.engines.lora.peft_folder import SavedAdapter, peft_names, read_adapter, write_config
from rlgraph.engines.lora.settings import TENSORS

WriteBoxes = Callable[[Path, ExportLayout], None]
APART = ".adapter"  # a folder inside of a growing export, for the matrices that are then merged


@dataclass(frozen=True)
class AdapterExport:
    """An adapter of the model in `path`, a hub id or folder named `base`: its matrices have these `shapes`, and `write` writes them."""

    adapter: SavedAdapter
    path: str
    base: str
    step: int
    dtype: ExportDtype
    shapes: Mapping[str, Numbers]
    write: WriteBoxes
    files: Mapping[str, str]  # text files to add, by name

    def write_apart(self, folder: str | Path) -> Exported:
        """Write PEFT's folder of the adapter. Raises ExportError, with nothing left, if it cannot."""
        layout = _layout(self.shapes, self.dtype)
        with GrowingExport(folder, layout) as growing:
            try:
                write_config(growing.path, self.adapter, self.base, self.shapes)
                self._add_files(growing.path)
                self.write(growing.path, layout)
            except OSError as error:
                raise growing.failed(error) from error
            growing.finish()
        return Exported(growing.target, self.step, self.dtype, layout.parameters, layout.bytes)

    def write_merged(self, folder: str | Path, most_file_bytes: int) -> Exported:
        """Write the whole model with the adapter merged in: one tensor is in memory at a time, besides the adapter."""
        own, path = _layout(self.shapes, "float32"), self.path
        layout = planned(exported(parameter_shapes(path), path, "log_probs", f"export('{folder}')"), self.dtype, most_file_bytes)
        with GrowingExport(folder, layout) as growing:
            apart = growing.path / APART
            try:
                apart.mkdir()
                take_room(apart, own)
                self.write(apart, own)
                write_companions(growing.path, Path(path), self.dtype, "log_probs")
                self._add_files(growing.path)
                write_shards(growing.path, layout, _merged(path, apart, self.adapter, DTYPES[self.dtype][1]))
                shutil.rmtree(apart)
            except OSError as error:
                raise growing.failed(error) from error
            growing.finish()
        return Exported(growing.target, self.step, self.dtype, layout.parameters, layout.bytes)

    def _add_files(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")


def _layout(shapes: Mapping[str, Numbers], dtype: ExportDtype) -> ExportLayout:
    return planned(peft_names(shapes), dtype, most_bytes=1 << 62, single=TENSORS)


def _merged(path: str, apart: Path, adapter: SavedAdapter, dtype: torch.dtype) -> Iterator[WeightShard]:
    weights = BaseWeights(path, adapter.base).with_adapter(read_adapter(apart), adapter.scale, dtype)
    for name in weights:
        tensor = weights[name]
        yield WeightShard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
