"""The text part of a model folder: of a folder of a text model all of it, of a multimodal one its language model.

A multimodal config has its language model's in `text_config`, and its weights below `language_model.` or `model.language_model.`. That
part is trained and published as the text model that it is; the towers of other modalities stay as the folder has them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlgraph import notices

NESTED = "text_config"
PREFIXES = ("model.language_model.", "language_model.")
UNSCALED = ("aya_vision", "cohere2_vision")  # types whose class of transformers ignores the text model's logit_scale
DRAFTS = ("mtp.", "model.mtp.")  # layers that predict several tokens at once, which no trainer and no plain decoding uses


def is_nested(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a multimodal model with a language model in it."""
    return isinstance(config.get(NESTED), dict)


def text_config(path: str | Path) -> Any:
    """Load the configuration of a folder's text model by transformers, all defaults filled in."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    if text is not config:
        tied = json.loads((Path(path) / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings")
        text.tie_word_embeddings = text.tie_word_embeddings if tied is None else tied
        if config.model_type in UNSCALED and text.logit_scale != 1.0:
            notices.here.say(
                f"model '{path}' is trained and decoded with its logit_scale={text.logit_scale:g}, as by vLLM; transformers' class for "
                f"'{config.model_type}' leaves that out, so it would sample from an export at {text.logit_scale:g} times the temperature"
            )
    return text


def rotary_limit(config: Any) -> int | None:
    """Read off a text model's configuration the most tokens that a row may have; None where the rotary factors depend on no length.

    Of the types "longrope" and "dynamic" transformers computes other factors if any row of a batch is longer, for all its rows.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]  # or one for each type of layer
    found = [
        config.max_position_embeddings if "dynamic" in kind["rope_type"] else kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope" or "dynamic" in kind.get("rope_type", "")
    ]
    return min(found, default=None)


def text_entries(path: str | Path, config: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config.json that describe the text model, under the type of the whole model."""
    if not is_nested(config):
        return config
    return {**config, **text_config(path).to_dict(), "model_type": config["model_type"]}


def is_text(name: str, nested: bool) -> bool:
    """Whether a tensor of a folder belongs to the text model.

    >>> is_text("model.language_model.norm.weight", True), is_text("vision_tower.norm.weight", True), is_text("mtp.norm.weight", False)
    (True, False, False)
    """
    return not name.startswith(DRAFTS) and (not nested or name.startswith(("lm_head.", *PREFIXES)))


def is_head(name: str) -> bool:
    """Whether a tensor of a folder is the language head."""
    return in_text_model(name) == "lm_head.weight"


def in_text_model(name: str) -> str:
    """The name of a tensor of a multimodal folder as a folder of the text model alone would have it.

    >>> in_text_model("language_model.model.norm.weight"), in_text_model("model.language_model.norm.weight")
    ('model.norm.weight', 'model.norm.weight')
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return name
    rest = name.removeprefix(prefix)
    return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
