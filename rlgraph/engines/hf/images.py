"""Images of prompts: their tokens, by a model's own processor, and the features that the model's tower makes of them.

A prompt has one token for each feature of its images, and the features take the place of the embeddings of these tokens. The images of
a row travel as a JSON list of data URLs. The tower and its projector stay as the folder has them: they are frozen, and not published.
"""

import base64
import io
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.hf.pretrained import quiet
from rlgraph.errors import DataError

FAMILIES = ("idefics3", "llava")  # whose language models are plain: causal, and tokens counted one by one
KEPT = 256  # rows whose features a tower keeps: several passes read the rows of a batch


def check_sees(where: str, path: str | Path) -> None:
    """Raise DataError for a model that is given images, and that reads none or is of a family whose images are not supported."""
    kind = json.loads((Path(path) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in FAMILIES:
        raise DataError(
            f"{where} gets images, and the model '{path}' is of the family {kind!r}; images are read by {', '.join(FAMILIES)}: use "
            "a model of one of these, or leave the images out"
        )


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
    from transformers import AutoProcessor

    with quiet():
        found = AutoProcessor.from_pretrained(path)
    if not hasattr(found, "image_processor"):
        raise DataError(f"model '{path}' has no processor of images (preprocessor_config.json); copy it from the published model")
    return found


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


def expand_images(path: str | Path, prompt: Sequence[int], urls: str) -> list[int]:
    """Write the tokens of a prompt's images in the places of their marks, one mark for each. Raises DataError for more marks or fewer."""
    images, mark = open_images(urls), mark_of(path)
    count = list(prompt).count(mark)
    if count != len(images):
        raise DataError(
            f"the chat template of '{path}' writes {count} marks for a prompt with {len(images)} images; use a template that writes one "
            "for each part {'type': 'image'}, and a prompt whose text has none"
        )
    written = iter([tokens_of_image(str(path), *image.size) for image in images])
    return [token for own in prompt for token in (next(written) if own == mark else (own,))]


class ImageTower:
    """The part of a model that makes features of images, frozen. `token` is the id in whose places they go.

    It is loaded in `dtype` on a `device`, without the layers of the language model.
    """

    def __init__(self, path: str | Path, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForImageTextToText

        self._path = str(path)
        with quiet():  # about the weights of the layers that are left out
            config = AutoConfig.from_pretrained(path)
            config.get_text_config().num_hidden_layers = 0
            model = AutoModelForImageTextToText.from_pretrained(path, config=config, dtype=dtype)
        self.token = int(config.image_token_id)
        model.set_input_embeddings(torch.nn.Identity())  # the engine embeds tokens itself
        self._model = model.model.to(device).eval().requires_grad_(False)
        self._device, self._dtype = device, dtype
        self._kept: dict[str, torch.Tensor] = {}

    def features(self, row: str) -> torch.Tensor:
        """Compute the features `[n, H]` of the images of a row, in their order; the features of the last rows are kept."""
        if row not in self._kept:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[row] = self._compute(row)
        return self._kept[row]

    @torch.no_grad()
    def _compute(self, row: str) -> torch.Tensor:
        processor, images = processor_of(self._path), read_images(row)
        read = processor(text=[processor.image_token * len(images)], images=[images], return_tensors="pt")
        pixels = {name: value.to(self._device) for name, value in read.items() if "pixel" in name}
        pixels["pixel_values"] = pixels["pixel_values"].to(self._dtype)
        found = self._model.get_image_features(**pixels).pooler_output
        found = found if isinstance(found, torch.Tensor) else torch.cat(list(found))
        return found.reshape(-1, found.shape[-1])

    def embed(self, embed: torch.nn.Module, tokens: torch.Tensor, prompts: torch.Tensor, rows: Sequence[str]) -> torch.Tensor:
        """Embed `tokens` [S, L], with the features of the images of `rows` in the places of theirs, one row behind another.

        `prompts` [S, L] is true on the tokens of prompts: a model may write the token of an image too, which is of none. Raises DataError
        if there are not as many places as features: a prompt was cut off, or encoded with another processor.
        """
        embedded: torch.Tensor = embed(tokens)
        places = prompts & (tokens == self.token)
        shown = [self.features(row) for row in rows if row != "[]"]
        count = sum(len(each) for each in shown)
        if int(places.sum()) != count:
            raise DataError(
                f"prompts have {int(places.sum())} tokens of images for {count} features; an image's tokens cannot be cut off: raise "
                "max_context, or drop long prompts (overlong='drop')"
            )
        return embedded.masked_scatter(places[..., None], torch.cat(shown).to(embedded.dtype)) if shown else embedded
