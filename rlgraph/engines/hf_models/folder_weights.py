"""The weights of a model folder, read box by box under the names of the model's parameters.

A parameter is a tensor of the folder under its own name or an old one, or in models whose code fuses what the folder keeps apart (the
experts of a layer) several of them: only the box is read. What is fused in another way is made whole by transformers' own conversion.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.engines.hf_models.file_reading import PieceReader
from rlgraph.engines.hf_models.folder_parts import FolderPart, Numbers, PartsByName, folder_shards, fused_parts, whole_part
from rlgraph.engines.hf_models.model_files import header_shapes
from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.text_part import in_text_model, is_text
from rlgraph.errors import DataError
from rlgraph.plan.estimates import PIECE_BYTES

Pieces: TypeAlias = Iterator[tuple[slice, torch.Tensor]]  # of a box, each with its rows


class FolderWeights:
    """The weights of the folder `path` for `model`, a `skeleton` or a built model.

    Raises DataError for a parameter that the folder does not hold, or holds in another shape.
    """

    def __init__(self, path: str | Path, model: Any) -> None:
        self._path, self._model = path, model
        self._nested = check_model(path).nested
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
        parts = self._fused(name) if name in self._made else ()
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
                found[parameter] = self._fused(name)
        return found

    def _fused(self, name: str) -> tuple[FolderPart, ...]:
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
            yield slice(None), self._converted(name)[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))]

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

    def _converted(self, name: str) -> torch.Tensor:
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
                    "config are of two models; take both from one"
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
                f"model '{self._path}': its *.safetensors hold no weights for {lacking[:3]}{' …' if len(lacking) > 3 else ''}; they are of "
                "another model than config.json, or a part is missing"
            )

    def _same(self, first: str, second: str) -> bool:
        shape = tuple(self._model.get_parameter(first).shape)
        pieces = zip(*(self._pieces(name, (0,) * len(shape), shape) for name in (first, second)), strict=True)
        return all(torch.equal(one, other) for (_, one), (_, other) in pieces)


def _copy(pieces: Pieces, out: torch.Tensor) -> None:
    for rows, piece in pieces:
        target = out[rows] if out.dim() else out
        target.copy_(piece.to(out.device))  # cast there: what crosses the bus is the file's dtype
