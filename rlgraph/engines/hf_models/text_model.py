"""The text model of a folder: loaded with its weights in one process, and what its parameters are in the folder."""

from pathlib import Path
from typing import Any, Literal

import torch

from rlgraph.engines.forward.packed_attention import padded
from rlgraph.engines.hf_models.backbone import load_causal, load_headless
from rlgraph.engines.hf_models.folder_parts import PartsByName
from rlgraph.engines.hf_models.folder_weights import FolderWeights
from rlgraph.engines.hf_models.pretrained import check_model


def load_text_model(path: str | Path, dtype: torch.dtype) -> Any:
    """Load the language model of a folder, also of a multimodal one, in `dtype`. Raises DataError as `skeleton` does."""
    from transformers import AutoModelForCausalLM

    if not check_model(path).nested:
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=padded(AutoModelForCausalLM, path))
        return plain.eval()
    model = load_causal(path)
    weights = FolderWeights(path, model)
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied parameters stay one
    for place, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
                weights.fill(f"{place}.{name}", (0,) * parameter.dim(), made[parameter].detach())
            module.register_parameter(name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            if weights.holds(f"{place}.{name}"):
                weights.fill(f"{place}.{name}", (0,) * buffer.dim(), buffer)
    return model


def parts_of(path: str | Path, scores: Literal["log_probs", "values"]) -> PartsByName:
    """Find the tensors of a folder that each parameter of a trained model is made of, for a policy or a critic."""
    return FolderWeights(path, load_causal(path) if scores == "log_probs" else load_headless(path)).parts()
