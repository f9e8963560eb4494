"""The language model of a multimodal folder in vLLM, run as the text model that it is: no tower is built, whatever it would need."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.hf_models.model_files import header_shapes
from rlgraph.engines.hf_models.text_part import in_text_model


def arguments(nested: bool) -> dict[str, Any]:
    """The arguments of `vllm.EngineArgs` for such a folder. Its weights have other names than vLLM reads; `folder_weights` has them."""
    return {"hf_overrides": language_model, "load_format": "dummy"} if nested else {}


def language_model(config: Any) -> Any:
    """Take the configuration of the language model out of that of a multimodal one; another one, by which vLLM tries this, stays."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config()
    if text is config:
        return config
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    return text


def folder_weights(path: Path, names: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read the weights of these names from a folder."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in header_shapes(file) if name in names}
    return found


def as_text_model(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name weights of a multimodal folder as a folder of the text model does."""
    return {in_text_model(name): tensor for name, tensor in weights.items()}
