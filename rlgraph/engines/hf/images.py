"""Images of prompts: the families of models that read them, and their tokens, by a model's own processor.

A prompt has one token for each feature that the model's tower makes of its images. The images of a row travel as a JSON list of data URLs.
"""

import base64
import importlib.util
import io
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlgraph.engines.hf.pretrained import quiet
from rlgraph.errors import DataError

FAMILIES = ("gemma3", "idefics3", "internvl", "llava", "qwen2_5_vl", "qwen3_vl", "smolvlm")  # by tests/engines/test_images.py
BOTH_WAYS = ("gemma3",)  # whose language models attend in both directions within an image; the others are causal there too
FILMS = ("internvl", "qwen2_5_vl", "qwen3_vl", "smolvlm")  # whose processors read videos too
NEEDS = {"smolvlm": "num2words"}  # a package that the processor imports, also for images alone
KEPT = 256  # rows whose features a tower keeps: several passes read the rows of a batch
TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # what a processor makes beside what a tower reads


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
