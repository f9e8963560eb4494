"""Load the tokenizer of a model folder, where possible without `AutoTokenizer`, whose imports take three seconds."""

import json
from pathlib import Path
from typing import Any

from rlgraph.engines.hf_models.hub import no_hub

# The classes that AutoTokenizer takes for these types of models, by what the folder names: a test compares.
KNOWN = {("llama", "TokenizersBackend"), ("qwen2", "Qwen2Tokenizer"), ("qwen3", "Qwen2Tokenizer")}


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer that transformers' `AutoTokenizer` would load."""
    import transformers

    kind = class_of(Path(path))
    with no_hub():
        return getattr(transformers, kind or "AutoTokenizer").from_pretrained(path)


def class_of(folder: Path) -> str | None:
    """The class of a folder's tokenizer, if its files name a known one; else None."""
    try:
        config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    except (OSError, ValueError):  # AutoTokenizer raises its own error
        return None
    if not isinstance(config, dict) or not isinstance(tokenizer, dict) or "auto_map" in tokenizer:
        return None
    kind = tokenizer.get("tokenizer_class")
    return str(kind) if (config.get("model_type"), kind) in KNOWN else None
