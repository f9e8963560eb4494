"""Families of decoder models, and what rlgraph does with each: `python tests/support/families.py` prints the table of docs/models.md."""

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[1:3]]

WINDOWS = {"use_sliding_window": True, "max_window_layers": 1}
# fmt: off
AS_THEY_ARE = [
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "phimoe", "olmo",
    "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "stablelm", "starcoder2", "cohere", "cohere2", "gpt_neox", "gpt_oss", "glm",
    "glm4", "smollm3", "exaone4", "ernie4_5", "apertus", "seed_oss", "arcee", "deepseek_v3", "falcon", "gpt2", "opt", "bloom", "mamba",
    "minimax", "bamba", "jetmoe",
]
# fmt: on
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # by the name in the table: a type of transformers, and settings
    **{kind: (kind, {}) for kind in AS_THEY_ARE},
    "qwen2, with windows": ("qwen2", WINDOWS),
    "qwen3, with windows": ("qwen3", WINDOWS),
    "phi3, with windows": ("phi3", {"sliding_window": 2047}),
    "minimax, first layer linear": ("minimax", {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
    "llama4_text": ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"], "num_hidden_layers": 2}),
    "qwen3_next": ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
    "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3}),
    **{f"{kind}, text part": (kind, {}) for kind in ("gemma3", "qwen3_5", "qwen3_5_moe")},
}
QWEN3_5_VISION = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
}
NESTED: dict[str, dict[str, Any]] = {  # multimodal folders, by their type of transformers: a small tower beside the language model
    "gemma3": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "qwen3_5": QWEN3_5_VISION,
    "qwen3_5_moe": QWEN3_5_VISION,
}
COLUMNS = {
    "padded": "trainer, padded",
    "shared": "trainer, shared prompts",
    "flat": "trainer, flat (GPU)",
    "generator": '`engine="transformers"`',
}


def folder_of(name: str, parent: Path) -> Path:
    """Make a folder with a small random model of a family."""
    from transformers import AutoConfig

    from rlgraph.engines.forward.self_test import miniature, quiet
    from rlgraph.engines.hf_models.pretrained import byte_tokenizer

    folder = parent / name
    kind, settings = FAMILIES[name]
    if kind in NESTED:
        return nested_folder(kind, folder)
    with quiet():
        miniature(AutoConfig.for_model(kind, **settings), "eager").save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder


def nested_folder(kind: str, folder: Path) -> Path:
    """Make a folder with a small random multimodal model, whose language model is as a family's."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from rlgraph.engines.forward.self_test import _draw, miniature, quiet
    from rlgraph.engines.hf_models.pretrained import byte_tokenizer

    with quiet():
        text = miniature(AutoConfig.for_model(kind).get_text_config(), "eager").config
        config = AutoConfig.for_model(kind, text_config=text.to_dict(), **NESTED[kind])
        config.tie_word_embeddings = text.tie_word_embeddings
        model = AutoModelForImageTextToText.from_config(config)
        _draw(model)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder


def results(folder: Path) -> dict[str, str]:
    """Tell what rlgraph does with a model, by the columns of the table: "right", or that it is refused and why."""
    from rlgraph.engines.forward.self_test import FLAT_SHARED, generator_result, trainer_results
    from rlgraph.errors import DataError

    try:
        found = {**trainer_results(folder), "generator": generator_result(folder)}
    except DataError:
        return dict.fromkeys(COLUMNS, "refused")
    right = {name: result.right for name, result in found.items()}
    instead = {"shared": "own prompts", "flat": "padded"}  # what a trainer does where only that layout is out
    words = {name: "right" if right[name] else instead[name] if name in instead and right["padded"] else "refused" for name in COLUMNS}
    return words | ({"flat": "own prompts"} if right["flat"] and not right[FLAT_SHARED] else {})


def table() -> str:
    """The table of all families."""
    lines = ["| family | " + " | ".join(COLUMNS.values()) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    with tempfile.TemporaryDirectory() as parent:
        for name in FAMILIES:
            cells = results(folder_of(name, Path(parent)))
            lines.append(f"| {name} | " + " | ".join(cells[column] for column in COLUMNS) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable()
    print(table())
