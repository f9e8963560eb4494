"""The files beside the weights of an exported folder: config, generation config, tokenizer with its chat template."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlgraph.engines.hf_export.layout import ExportDtype

COPIED = (  # of the model's folder, where they are there
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "processor_config.json",
    "preprocessor_config.json",
)
GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_companions(folder: Path, model: Path, dtype: ExportDtype, scores: Literal["log_probs", "values"]) -> None:
    """Write config.json, generation_config.json and the tokenizer's files into `folder`, made of those of the model's folder."""
    config = json.loads((model / "config.json").read_text())
    _write(folder / "config.json", exported_config(config, dtype, scores))
    generation = model / "generation_config.json"
    if generation.exists():
        shutil.copyfile(generation, folder / generation.name)
    elif scores == "log_probs":
        tokens = {name: config[name] for name in GENERATION if config.get(name) is not None}
        _write(folder / generation.name, {"_from_model_config": True, **tokens})
    for name in COPIED:
        if (model / name).is_dir():
            shutil.copytree(model / name, folder / name)
        elif (model / name).exists():
            shutil.copyfile(model / name, folder / name)


def exported_config(config: Mapping[str, Any], dtype: ExportDtype, scores: Literal["log_probs", "values"]) -> dict[str, Any]:
    """Change a config to what is exported: plain weights in `dtype`, and for a critic the class that scores texts by one number.

    >>> exported_config({"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}, "bfloat16", "log_probs")
    {'architectures': ['LlamaForCausalLM'], 'dtype': 'bfloat16'}
    """
    found = {name: value for name, value in config.items() if name not in ("torch_dtype", "quantization_config")} | {"dtype": dtype}
    if scores == "values":
        names = [str(name).replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or ()]
        labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        found |= {"architectures": names, **labels}
    return found


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
