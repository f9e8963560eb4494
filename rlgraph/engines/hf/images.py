"""Images of prompts: their tokens, by a model's own processor, and the features that the model's tower makes of them.

A prompt has one token for each feature of its images, and the features take the place of the embeddings of these tokens. The images of
a row travel as a JSON list of data URLs. The tower and its projector stay as the folder has them unless they are trained too.
"""

import base64
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlgraph.batching.packing import InputImages
from rlgraph.engines.forward.image_blocks import ImageBlocks
from rlgraph.engines.forward.packed_attention import PARTS, register
from rlgraph.engines.hf.folder_weights import FolderWeights, PartsByName
from rlgraph.engines.hf.model_files import FamilyOptions
from rlgraph.engines.hf.pretrained import quiet
from rlgraph.engines.hf.unloaded import load_vision
from rlgraph.errors import DataError

FAMILIES = ("gemma3", "idefics3", "internvl", "llava", "qwen2_5_vl", "qwen3_vl", "smolvlm")  # by tests/engines/test_images.py
BOTH_WAYS = ("gemma3",)  # whose language models attend in both directions within an image; the others are causal there too
FILMS = ("internvl", "qwen2_5_vl", "qwen3_vl", "smolvlm")  # whose processors read videos too
NEEDS = {"smolvlm": "num2words"}  # a package that the processor imports, also for images alone
PARTED = ("qwen2_5_vl", "qwen3_vl")  # whose towers attend within parts of images
TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # what a processor makes beside what a tower reads
KEPT = 256  # rows whose features a tower keeps: several passes read the rows of a batch


def check_sees(where: str, path: str | Path, *, whole: bool = False) -> None:
    """Raise DataError for a model that is given images, and that reads none or is of a family whose images are not supported.

    Also for one whose processor lacks a package. With `whole`, for an engine that runs the whole model in its own way, the package may be
    torchvision, which the part for videos needs, and the model has to be causal within images.
    """
    kind = json.loads((Path(path) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in FAMILIES:
        raise DataError(
            f"{where} gets images, and the model '{path}' is of the family {kind!r}; images are read by {', '.join(FAMILIES)}: use "
            "a model of one of these, or leave the images out"
        )
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        raise DataError(f"{where}: the processor of '{path}' ({kind}) needs {NEEDS[kind]}: pip install {NEEDS[kind]}")
    if whole and kind in BOTH_WAYS:
        raise DataError(
            f"{where}: '{path}' ({kind}) attends in both directions within an image, which vLLM does not do on host cores, and which is "
            "not tested on GPUs; use engine='transformers'"
        )
    if whole and kind in FILMS and importlib.util.find_spec("torchvision") is None:
        raise DataError(f"{where}: the processor of '{path}' ({kind}) needs torchvision, of your torch's version: pip install torchvision")


def open_images(urls: str) -> list[Any]:
    """Open the images of a row, given as a JSON list of data URLs, with Pillow, which reads their pixels when they are needed."""
    from PIL import Image

    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in json.loads(urls)]


def read_images(urls: str) -> list[Any]:
    """Read the images of a row in RGB."""
    return [image.convert("RGB") for image in open_images(urls)]


@lru_cache(maxsize=4)
def processor_of(path: str) -> Any:
    """Load the processor of a folder, which cuts images into patches and writes their tokens. Raises DataError for a folder without one."""
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    with quiet():
        config = AutoConfig.from_pretrained(path)
        bare = config.model_type in FILMS and importlib.util.find_spec("torchvision") is None  # which the part for videos needs
        found = _without_videos(PROCESSOR_MAPPING[type(config)], path) if bare else AutoProcessor.from_pretrained(path)
    if not hasattr(found, "image_processor"):
        raise DataError(f"model '{path}' has no processor of images (preprocessor_config.json); copy it from the published model")
    return found


def _without_videos(kind: Any, path: str) -> Any:
    """Load a processor without its part for videos, which transformers insists on."""
    from transformers import AutoImageProcessor, AutoTokenizer

    unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: type(argument)})
    settings = Path(path) / "processor_config.json"
    given = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
    own = {name: given[name] for name in ("image_seq_length", "image_seq_len") if name in given}
    return unchecked(AutoImageProcessor.from_pretrained(path), AutoTokenizer.from_pretrained(path), video_processor=None, **own)


@lru_cache(maxsize=1 << 16)
def tokens_of_image(path: str, width: int, height: int) -> tuple[int, ...]:
    """List the tokens that the processor writes in the place of an image of so many pixels: one for each feature, and marks around them."""
    from PIL import Image

    processor = processor_of(path)
    given = {"text": [processor.image_token], "images": [[Image.new("RGB", (width, height))]], "add_special_tokens": False}
    return tuple(processor(**given)["input_ids"][0])


def mark_of(path: str | Path) -> int:
    """The token that a chat template writes for an image."""
    processor = processor_of(str(path))
    return int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))


def expand_images(path: str | Path, prompt: Sequence[int], urls: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Write the tokens of a prompt's images in the places of their marks, one mark for each, and tell where each begins and ends.

    Raises DataError for more marks or fewer.
    """
    images, mark = open_images(urls), mark_of(path)
    count = list(prompt).count(mark)
    if count != len(images):
        raise DataError(
            f"the chat template of '{path}' writes {count} marks for a prompt with {len(images)} images; use a template that writes one "
            "for each part {'type': 'image'}, and a prompt whose text has none"
        )
    written = iter([tokens_of_image(str(path), *image.size) for image in images])
    tokens, places, sizes = list[int](), list[tuple[int, int]](), _newlines(str(path))
    for before, own in zip([None, *prompt], prompt, strict=False):
        new = list(next(written)) if own == mark else [own]
        if mark in (before, own) and tokens and tokens[-1] in sizes and new[0] in sizes:
            newlines = "\n" * (sizes[tokens.pop()] + sizes[new[0]])
            new[:1] = processor_of(str(path)).tokenizer(newlines, add_special_tokens=False)["input_ids"]
        ends = [place for place, token in enumerate(new, len(tokens)) if token not in sizes]
        tokens += new
        places += [(ends[0], ends[-1] + 1)] if own == mark else []
    return tokens, places


@lru_cache(maxsize=4)
def _newlines(path: str) -> dict[int, int]:
    """The tokens of newlines only, with their numbers of these; empty for a processor that writes none around an image.

    Those of an image and of the text next to it are encoded as one text: Gemma has tokens of up to 31.
    """
    processor = processor_of(path)
    if not vars(processor).get("full_image_sequence", "").startswith("\n"):
        return {}
    tokens = {token for size in range(1, 64) for token in processor.tokenizer("\n" * size, add_special_tokens=False)["input_ids"]}
    return {token: len(text) for token in tokens if not (text := processor.tokenizer.decode([token])).strip("\n")}


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
        for name, parameter in self._whole.named_parameters():
            for part in self._parts[name]:
                part.view_of(parameter).copy_(weights[part.name])

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
            embedded = embedded + sum(0.0 * parameter.sum() for parameter in self._model.parameters())
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
