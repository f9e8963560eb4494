"""Write an export: describe the ranks' shards, lay out the files, let each rank write its boxes, and publish the folder."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from rlgraph.analysis.run import CardFacts
from rlgraph.analysis.words import graph_settings
from rlgraph.channels.weights.shards import WeightShard, parameters
from rlgraph.engines.hf.export import (
    DTYPES,
    MOST_FILE_BYTES,
    AdapterForm,
    ExportDtype,
    Exported,
    ExportLayout,
    GrowingExport,
    Numbers,
    ShardBox,
    export_names,
    plan_files,
    take_room,
    write_companions,
    write_shards,
)
from rlgraph.engines.hf.model_files import revision_of
from rlgraph.engines.hf.pretrained import check_model, other_tensors, parameter_shapes
from rlgraph.engines.lora import BaseWeights, SavedAdapter, peft_names, read_adapter, write_config
from rlgraph.errors import ExportError, RlgraphError
from rlgraph.graph.graph import Graph
from rlgraph.plan.plan import Plan
from rlgraph.runtime.checkpoint.store import TrainedEntry
from rlgraph.values.lora import TENSORS

# Export a model that trained an adapter: only the adapter, as a folder in PEFT's format, or merged into its base, as a full model.

APART = ".adapter"  # a folder in an unfinished export, for the matrices before they are merged


WriteBoxes = Callable[[Path, ExportLayout], None]  # on every rank; raises OSError or RlgraphError if one of them fails


@dataclass(frozen=True)
class AdapterExport:
    """An adapter of the model in the folder `path`, named `base` by the user: its matrices have these `shapes`; `write` writes them."""

    adapter: SavedAdapter
    path: str
    base: str
    step: int
    dtype: ExportDtype
    shapes: Mapping[str, Numbers]
    write: WriteBoxes
    files: Mapping[str, str]  # text files to add, by name

    def write_adapter(self, folder: str | Path) -> Exported:
        """Write the adapter as a folder in PEFT's format. If that fails, raises ExportError and leaves no folder."""
        layout = _layout(self.shapes, self.dtype, language_part(self.path))
        with GrowingExport(folder, layout) as growing:
            try:
                write_config(growing.path, self.adapter, self.base, self.shapes)
                self._add_files(growing.path)
                self.write(growing.path, layout)
            except OSError as error:
                raise growing.note_failure(error) from error
            growing.finish()
        return Exported(growing.target, self.step, self.dtype, layout.parameters, layout.bytes)

    def write_full_model(self, folder: str | Path, most_file_bytes: int) -> Exported:
        """Write the full model with the adapter merged in: one tensor at a time is in memory, besides the adapter."""
        own, path = _layout(self.shapes, "float32"), self.path
        others = other_tensors(path)
        names = export_names(parameter_shapes(path), path, "log_probs", f"export('{folder}')") | _own_names(others)
        layout = plan_files(names, self.dtype, most_file_bytes)
        with GrowingExport(folder, layout) as growing:
            apart = growing.path / APART
            try:
                apart.mkdir()
                take_room(apart, own)
                self.write(apart, own)
                write_companions(growing.path, Path(path), self.dtype, "log_probs")
                self._add_files(growing.path)
                weights = BaseWeights(path, self.adapter.base).with_adapter(read_adapter(apart), self.adapter.scale, DTYPES[self.dtype][1])
                write_shards(growing.path, layout, (_whole_shard(name, weights[name]) for name in weights))
                write_shards(growing.path, layout, _as_they_are({name: others[name] for name in others.keys() - weights.keys()}))
                shutil.rmtree(apart)
            except OSError as error:
                raise growing.note_failure(error) from error
            growing.finish()
        return Exported(growing.target, self.step, self.dtype, layout.parameters, layout.bytes)

    def _add_files(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")


def _layout(shapes: Mapping[str, Numbers], dtype: ExportDtype, part: str = "model.") -> ExportLayout:
    return plan_files(peft_names(shapes, part), dtype, most_bytes=1 << 62, single=TENSORS)


def language_part(path: str) -> str:
    """How the names of the language model begin in transformers' model of a folder."""
    if not check_model(path).nested:
        return "model."
    return "model.text_model." if any(name.startswith("model.text_model.") for name in parameter_shapes(path)) else "model.language_model."


def _whole_shard(name: str, tensor: torch.Tensor) -> WeightShard:
    return WeightShard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


Metrics = Mapping[str, float]
CARD = "README.md"


@dataclass(frozen=True)
class Source:
    """The source of an export: the model, the steps that its weights have seen, the model card, and the form of an
    adapter."""

    model: TrainedEntry
    step: int
    card: str
    adapter: AdapterForm = "merged"


def boxes(shards: Iterable[WeightShard]) -> list[ShardBox]:
    """Describe the boxes that a rank writes: the boxes that only it holds, or that it holds as the first of several ranks."""
    return [
        ShardBox(shard.name, tuple(shard.global_shape), tuple(shard.offsets), tuple(shard.tensor.shape))
        for shard in shards
        if not shard.replica
    ]


def check_source(model: TrainedEntry, where: str) -> None:
    """Raise ExportError if the model's own folder is gone: an export copies its config and tokenizer."""
    try:
        check_model(model.path)
    except RlgraphError as error:
        raise ExportError(f"{where}: config and tokenizer of '{model.name}' come from its folder, which cannot be used: {error}") from None


def write_export(
    folder: str | Path,
    source: Source,
    dtype: ExportDtype,
    ranks: Sequence[Sequence[ShardBox]],
    write: WriteBoxes,
    most_file_bytes: int = MOST_FILE_BYTES,
) -> Exported:
    """Write an export of the ranks' shards. If that fails, raises ExportError and leaves no folder."""
    where, model = f"export('{folder}')", source.model
    whole = parameters([[_meta_shard(box) for box in rank] for rank in ranks])  # every element is held once
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
    if model.adapter is not None:
        files = {CARD: source.card}
        found = AdapterExport(model.adapter, model.path, base_of(model.path), source.step, dtype, shapes, write, files)
        return found.write_adapter(folder) if source.adapter == "apart" else found.write_full_model(folder, most_file_bytes)
    others = other_tensors(model.path)
    if others and model.scores == "values":
        raise ExportError(f"{where}: '{model.path}' is not the folder of a plain text model, so a critic of it cannot be exported")
    text = {name: shape for name, shape in shapes.items() if name not in others}
    layout = plan_files(export_names(text, model.path, model.scores, where) | _own_names(others), dtype, most_file_bytes)
    with GrowingExport(folder, layout) as growing:
        try:
            write_companions(growing.path, Path(model.path), dtype, model.scores)
            (growing.path / CARD).write_text(source.card, encoding="utf-8")
            write(growing.path, layout)
            write_shards(growing.path, layout, _as_they_are({name: others[name] for name in others.keys() - shapes.keys()}))
        except OSError as error:
            raise growing.note_failure(error) from error
        growing.finish()
    return Exported(growing.target, source.step, dtype, layout.parameters, layout.bytes)


def model_card(graph: Graph, plan: Plan, model: TrainedEntry, step: int, dtype: ExportDtype, first: Metrics, last: Metrics) -> str:
    """Write the model card of a run of the graph."""
    return plan.facade.model_card(plan, CardFacts(model.name, base_of(model.path), step, dtype, graph_settings(graph, plan), first, last))


def base_of(path: str) -> str:
    """The hub id of a model's folder, if it is in the cache of a hub; else the folder."""
    found = revision_of(path)
    return path if found is None else found[0]


def _own_names(tensors: Mapping[str, tuple[Path, Numbers]]) -> dict[str, tuple[str, Numbers]]:
    return {name: (name, shape) for name, (_, shape) in tensors.items()}


def _as_they_are(tensors: Mapping[str, tuple[Path, tuple[int, ...]]]) -> Iterator[WeightShard]:
    """Read the tensors that the trainer does not hold, one at a time."""
    for name, (file, _) in tensors.items():
        with safe_open(file, "pt") as opened:
            yield _whole_shard(name, opened.get_tensor(name))


def _meta_shard(box: ShardBox) -> WeightShard:
    return WeightShard(box.name, box.shape, box.offsets, torch.empty(box.size, device="meta"))
