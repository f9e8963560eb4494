"""A trainer's model that computes what the engine computes, bit for bit: float32 on a CPU with one thread, bfloat16 on a GPU.

On a CPU embeddings, norms and the products in between are equal as they are. Linear maps, rotations and attention are exchanged for the
engine's kernels; log-probs are a `log_softmax` on both sides. On a GPU see `gpu_model`.
"""

from typing import Any

import torch

from rlgraph.errors import DataError

FAMILIES = ("llama", "qwen2", "qwen3")  # by tests/engines/test_exact.py


def check_family(path: str, model_type: str) -> None:
    """Raise DataError for a model that is not proven to be exact."""
    if model_type not in FAMILIES:
        raise DataError(
            f"exact=True with '{path}': a model of the family '{model_type}' is not proven to be exact; those that are: "
            f"{', '.join(FAMILIES)}"
        )


def check_on_gpu(path: str) -> None:
    """Raise DataError for a model that is exact on a CPU and not proven to be so on a GPU."""
    from rlgraph.engines.exact.gpu_rules import check_model
    from rlgraph.engines.hf_models.text_part import text_config

    check_model(text_config(path))


def exchange(head: Any, device: str) -> list[Any]:
    """Give the model of a policy's `head` the engine's kernels. Returns the linear maps that `forget` when weights change."""
    if device == "cuda":
        from rlgraph.engines.exact import gpu_model

        gpu_model.exchange(head)
        return []
    from rlgraph.engines.exact import cpu_attention
    from rlgraph.engines.exact.cpu_linear import ExactLinear
    from rlgraph.engines.exact.cpu_rotation import LateRotation
    from rlgraph.engines.hf_models.backbone import backbone_of, layers_of

    model = head.model
    cpu_attention.register()
    model.set_attn_implementation(cpu_attention.NAME)
    backbone = backbone_of(model)
    backbone.rotary_emb = LateRotation(backbone.rotary_emb)
    for layer in layers_of(backbone):
        object.__setattr__(layer.self_attn, "rotation", backbone.rotary_emb)  # no second parent of the module
    found = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for module in found:
        module.__class__ = ExactLinear
    return found
