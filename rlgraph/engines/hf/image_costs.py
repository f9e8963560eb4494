"""Count the part of a model that reads images before anything is loaded: its parameters, and its work for a prompt."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlgraph.engines.hf.images import KEPT, TEXT, processor_of, tokens_of_image
from rlgraph.engines.hf.model_files import is_text
from rlgraph.engines.hf.pretrained import quiet
from rlgraph.errors import DataError
from rlgraph.graph.traits import ImageSizes
from rlgraph.plan.model_shapes import ModelShape, Tower

MERGED = ("merger", "projector", "connector")  # in the names of modules that compute with features, not with patches


def tower_of_folder(path: str, prompts: ImageSizes) -> Tower:
    """Count the tower of a folder with a config.json, and its work for prompts with images of these sizes, on average.

    A folder without a processor, which decides what becomes of an image, counts as without images in its prompts.
    """
    return _tower_of(path, (Path(path) / "config.json").read_text(encoding="utf-8"), prompts)


@lru_cache(maxsize=16)  # by content, not by path: a folder may be written again
def _tower_of(path: str, config_text: str, prompts: ImageSizes) -> Tower:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        config.get_text_config().num_hidden_layers = 0
        model = AutoModelForImageTextToText.from_config(config)
    own = {name: each for name, each in model.named_parameters() if not is_text(name, nested=True)}
    products = {name: each.numel() for name, each in own.items() if each.dim() > 1 and "pos" not in name}  # positions are added
    merged, vision = sum(size for name, size in products.items() if any(word in name for word in MERGED)), config.vision_config.to_dict()
    try:
        images = [_image_of(path, vision, config.image_token_id, size) for images in prompts for size in images]
    except (DataError, OSError):
        images = []
    count = max(len(prompts), 1)
    features = sum(found for *_, found in images) / count
    of_patch = 2 * (sum(products.values()) - merged)
    computed = sum(patches * (of_patch + attention) + 2 * merged * found for patches, attention, _, found in images)
    widths = config.get_text_config().hidden_size * (1 + len(vision.get("deepstack_visual_indexes", ())))
    return Tower(
        sum(each.numel() for each in own.values()),
        computed / count,
        sum(tokens for _, _, tokens, _ in images) / count,
        int(KEPT * features * widths),
        sum(patches for patches, *_ in images) / count,
        _shape_of(vision, gated=any("gate" in name for name in own)),
    )


def _shape_of(vision: Mapping[str, Any], *, gated: bool) -> ModelShape:
    """The shape of a tower's layers: without a gate, half as wide inside as with one that keeps as much for the backward pass."""
    hidden, heads = vision["hidden_size"], vision.get("num_heads") or vision["num_attention_heads"]
    inner = vision["intermediate_size"] if gated else vision["intermediate_size"] // 2
    return ModelShape(_layers(vision), hidden, heads, heads, hidden // heads, inner, vocab=0)


def _layers(vision: Mapping[str, Any]) -> int:
    return int(vision.get("depth") or vision["num_hidden_layers"])


def _image_of(path: str, vision: Mapping[str, Any], token: int, size: tuple[int, int]) -> tuple[int, float, int, int]:
    """Count the patches of an image, the operations of a patch in attention, and the image's tokens and features."""
    from PIL import Image

    processor, sides = processor_of(path), vision["patch_size"]
    read = processor(text=[processor.image_token], images=[[Image.new("RGB", size)]], return_tensors="pt")
    pixels = next(value for name, value in read.items() if name not in TEXT)
    height, width = sides if isinstance(sides, list | tuple) else (sides, sides)
    numbers = 3 * vision.get("temporal_patch_size", 1) * height * width  # of a patch
    patches = pixels.numel() // numbers
    keys = patches if pixels.dim() == 2 else pixels.shape[-2] * pixels.shape[-1] // (height * width)  # crops attend to themselves
    layers = _layers(vision)
    whole = len(vision.get("fullatt_block_indexes", range(layers)))  # the other layers attend within windows
    windows = min((vision.get("window_size", 0) // width) ** 2, keys)
    tokens = tokens_of_image(path, *size)
    return patches, 4.0 * vision["hidden_size"] * (whole * keys + (layers - whole) * windows), len(tokens), tokens.count(token)
