"""The tower of a model that reads images: the features that it makes of them, and what the language model reads in their places.

The tower and its projector stay as the folder has them unless they are trained too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlgraph.batching.packing import InputImages
from rlgraph.engines.forward.image_blocks import ImageBlocks
from rlgraph.engines.forward.packed_attention import PARTS, register
from rlgraph.engines.hf.folder_weights import FolderWeights, PartsByName, copy_parts
from rlgraph.engines.hf.images import BOTH_WAYS, KEPT, TEXT, processor_of, read_images, tokens_of_image
from rlgraph.engines.hf.model_files import FamilyOptions
from rlgraph.engines.hf.unloaded import load_vision
from rlgraph.errors import DataError

PARTED = ("qwen2_5_vl", "qwen3_vl")  # whose towers attend within parts of images


@dataclass(frozen=True)
class Seen:
    """What a tower makes of the images of a row: features `[n, H]`, what is added behind the first layers `[n, H]` each, and their `grid`.

    The grid [images, 3] counts patches in time, height and width. `ends` are the numbers of features up to the end of each image.
    """

    features: torch.Tensor
    deep: tuple[torch.Tensor, ...]
    grid: torch.Tensor | None
    ends: tuple[int, ...]

    def first(self, count: int) -> "Seen":
        """Take the features of the first images, `count` in all: a row may end before an image that a tool has answered with.

        Raises DataError if that is not at the end of an image: one was cut off, or encoded with another processor.
        """
        if count not in (0, *self.ends):
            raise DataError(
                f"a row has {count} tokens of images for {len(self.features)} features; an image's tokens cannot be cut off: raise "
                "max_context, or drop long prompts (overlong='drop')"
            )
        return replace(self, features=self.features[:count], deep=tuple(layer[:count] for layer in self.deep))


class ImageTower:
    """The part of a model that makes features of images. `token` is the id in whose places they go.

    It is `trained`, a module of the model that trains it, or else loaded from the folder in `dtype` on a `device`, and frozen.
    """

    def __init__(self, path: str | Path, device: torch.device, dtype: torch.dtype, trained: torch.nn.Module | None = None) -> None:
        self._path, self._trained = str(path), trained is not None
        model: Any = load_vision(path) if trained is None else trained
        self._parts: PartsByName = {}
        if trained is None:
            folder = FolderWeights(path, model, whole=True)
            folder.load(dtype)
            self._parts = folder.parts()
            model.to(device).requires_grad_(False)
        config = model.config
        self.token = int(config.image_token_id)
        self._axes = "mrope_section" in FamilyOptions(config.get_text_config()).rope_parameters
        if config.model_type in PARTED and device.type == "cuda" and dtype != torch.float32:
            register()
            config.vision_config._attn_implementation = PARTS
        self._whole, self._model = model, model.model
        self._device, self._dtype = device, dtype
        self._kept: dict[str, Seen] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the folder that a frozen tower is."""
        return {part.name: part.shape for parts in self._parts.values() for part in parts}

    def replace_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights of a tower that is trained elsewhere, by their names in the folder, and forget what the old ones saw."""
        self._kept.clear()
        copy_parts(dict(self._whole.named_parameters()), self._parts, weights)

    def see(self, row: str) -> Seen:
        """Compute what the language model reads of the images of a row, in their order; a frozen tower keeps that of the last rows."""
        if self._trained:
            return self._compute(row)
        if row not in self._kept:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[row] = self._compute(row)
        return self._kept[row]

    def _compute(self, row: str) -> Seen:
        processor, images = processor_of(self._path), read_images(row)
        read = processor(text=[processor.image_token * len(images)], images=[images], return_tensors="pt")
        given = {name: value.to(self._device) for name, value in read.items() if name not in TEXT}
        given["pixel_values"] = given["pixel_values"].to(self._dtype)
        found = self._model.get_image_features(**given)
        deep = tuple(_join(layer) for layer in found.get("deepstack_features", ()))
        ends = accumulate(tokens_of_image(self._path, *image.size).count(self.token) for image in images)
        return Seen(_join(found.pooler_output), deep, read.get("image_grid_thw"), tuple(ends))

    def inputs(self, embed: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor, shown: InputImages) -> dict[str, Any]:
        """Make what the language model reads of `tokens` at `positions` [S, L]: embeddings, with features in the places of images.

        A model may write the token of an image too, which is of none. Raises DataError as `Seen.first`.
        """
        embedded: torch.Tensor = embed(tokens)
        places = shown.given & (tokens == self.token)
        counts = shown.row[places].bincount(minlength=len(shown.rows)).tolist()
        by_row = {row: self.see(row) for row in dict.fromkeys(shown.rows) if row != "[]"}
        seen = [by_row[row].first(count) for row, count in zip(shown.rows, counts, strict=True) if row != "[]"]
        if self._trained:  # all ranks have to add up gradients of the same parameters, also where no image uses them
            embedded = embedded + sum(0.0 * parameter.sum() for parameter in self._model.parameters() if parameter.requires_grad)
        if not seen:
            return {"inputs_embeds": embedded, "position_ids": positions}
        features = torch.cat([each.features for each in seen]).to(embedded.dtype)
        given: dict[str, Any] = {"inputs_embeds": embedded.masked_scatter(places[..., None], features)}
        given["position_ids"] = self.positions(tokens, positions, shown, by_row)
        given |= {"image_blocks": ImageBlocks.of(places, shown.row)} if self._whole.config.model_type in BOTH_WAYS else {}
        deep = [torch.cat(layer).to(embedded.dtype) for layer in zip(*(each.deep for each in seen), strict=True)]
        return given | ({"visual_pos_masks": places, "deepstack_visual_embeds": deep} if deep else {})

    def positions(
        self, tokens: torch.Tensor, positions: torch.Tensor, shown: InputImages, seen: Mapping[str, Seen] = MappingProxyType({})
    ) -> torch.Tensor:
        """Find the positions that rotate `tokens`: as given, or [4, S, L] for a model that counts images in time, height and width.

        The first of the four are those given, by which attention knows its sequences. `seen` is what is known of the rows.
        """
        if not self._axes:
            return positions
        host, places, of = positions.cpu(), (shown.given & (tokens == self.token)).cpu(), shown.row.cpu()
        found, shifts = host.expand(3, *host.shape).clone(), torch.zeros(len(shown.rows) + 1, dtype=torch.long)
        for index, row in enumerate(shown.rows):
            images = places & (of == index)
            if row == "[]" or not bool(images.any()):
                continue
            own = (of == index) & (host <= host[images].max())  # up to its last image, behind which all tokens are shifted alike
            types = images[own][None].int()
            axes, shift = self._model.get_rope_index(types, types, image_grid_thw=(seen.get(row) or self.see(row)).grid)
            found[:, own], shifts[index] = axes[:, 0] - shift, shift
        return torch.cat([positions[None], (found + shifts[of]).to(positions.device)])


def _join(found: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Join features `[n, H]` that are one tensor, or one for each image."""
    whole = found if isinstance(found, torch.Tensor) else torch.cat(list(found))
    return whole.reshape(-1, whole.shape[-1])
