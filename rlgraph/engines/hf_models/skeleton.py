"""A Hugging Face model without the memory of its weights: parameters on the meta device, buffers as its code computes them."""

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlgraph.engines.forward.packed_attention import padded
from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.text_part import text_config
from rlgraph.errors import DataError


def skeleton(auto: Any, path: str | Path) -> Any:
    """Build the text model of a folder by a class like `AutoModelForCausalLM`, in float32 and without dropout.

    Its parameters are on the meta device. Tables that are computed and in no file, such as rotary frequencies, are in host memory.

    Raises DataError for a folder without a model, or with quantised weights, which cannot be trained.
    """
    check_model(path)
    config = text_config(path)
    if getattr(config, "quantization_config", None) is not None:
        raise DataError(f"model '{path}': config.json has a quantization_config; a trainer takes weights in bfloat16, float16 or float32")
    with _EmptyOnMeta():
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=padded(auto, path))
    kept: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied parameters stay one
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                kept.setdefault(parameter, torch.nn.Parameter(parameter.detach().to("meta")))
                module.register_parameter(name, kept[parameter])
    return model.eval()


class _EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty`, which modules of torch make their parameters of, give tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), "device": "meta"}) if func is torch.empty else func(*args, **(kwargs or {}))
