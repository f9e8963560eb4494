"""A trainer's model that computes what the engine computes, bit for bit: float32 on a CPU with one thread, bfloat16 on a GPU.

On a CPU embeddings, norms and the products in between are equal as they are. Linear maps, rotations and attention are exchanged for the
engine's kernels; log-probs are a `log_softmax` on both sides. On a GPU see `gpu_model`.
"""

from typing import Any

import torch


def exchange(head: Any, device: str) -> list[Any]:
    """Give the model of a policy's `head` the engine's kernels. Returns the linear maps that `forget` when weights change."""
    if device == "cuda":
        from rlgraph.engines.exact import gpu

        gpu.exchange(head)
        return []
    from rlgraph.engines.exact import cpu
    from rlgraph.engines.exact.cpu import ExactLinear, LateRotation
    from rlgraph.engines.hf.backbone import backbone_of, layers_of

    model = head.model
    cpu.register()
    model.set_attn_implementation(cpu.NAME)
    backbone = backbone_of(model)
    backbone.rotary_emb = LateRotation(backbone.rotary_emb)
    for layer in layers_of(backbone):
        object.__setattr__(layer.self_attn, "rotation", backbone.rotary_emb)  # no second parent of the module
    found = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for module in found:
        module.__class__ = ExactLinear  # in place: another module in its stead would change the names of parameters, and what holds it
    return found
