"""What the engine of a generator is made of: two generators for which this is the same text have engines that are the same."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from rlgraph.engines.hf_models.model_files import header_shapes
from rlgraph.errors import DataError

APART = {"pool", "sampling"}  # fields of a generator that its engine does not see
FILES = ("config.json", "generation_config.json")


def made_of(generator: Any) -> str | None:
    """Describe a `Generator`'s engine by its settings and the folder of its model, whose numbers may change.

    None where the folder's weights are quantised, which an engine takes only as it loads, or cannot be read.
    """
    folder = Path(generator.path)
    texts = [(folder / name).read_text(encoding="utf-8") if (folder / name).exists() else "" for name in FILES]
    if '"quantization_config"' in texts[0]:
        return None
    try:
        shapes = [header_shapes(file) for file in sorted(folder.glob("*.safetensors"))]
    except (DataError, OSError):
        return None
    settings = {field.name: getattr(generator, field.name) for field in fields(generator) if field.name not in APART}
    return repr((settings, texts, shapes))
