"""A trainer's model that computes on an NVIDIA GPU in bfloat16 what vLLM computes there, bit for bit.

Embeddings, SiLU and the products in between are equal as they are. Both sides have one kernel of norms, one attention, one rotation, one
log-softmax, and products of matrices that are summed in one piece: `exact_worker` gives vLLM those that it lacks.
"""

from typing import Any

from rlgraph.engines.exact import gpu_attention, gpu_rotation
from rlgraph.engines.exact.gpu_norm import norm_forward
from rlgraph.engines.exact.gpu_products import exchange_lone_rows, leave_sums_whole
from rlgraph.engines.exact.gpu_rules import check_machine, check_model
from rlgraph.engines.forward import fused_norms
from rlgraph.engines.hf_models.backbone import backbone_of, layers_of
from rlgraph.errors import DataError


def exchange(head: Any) -> None:
    """Give the model of a policy's `head` the kernels. Raises DataError for a model or a machine without proof."""
    check_machine()
    check_model(head.model.config.get_text_config())
    leave_sums_whole()
    head.exact = True
    model = head.model
    exchange_lone_rows(model)
    gpu_attention.register()
    model.set_attn_implementation(gpu_attention.NAME)
    backbone = backbone_of(model)
    layers = layers_of(backbone)
    if fused_norms.install(model, norm_forward) < 2 * len(layers) + 1:
        raise DataError(f"{type(model).__name__} has norms other than plain RMS norms, which exact=True does not support; leave it out")
    gpu_rotation.install(layers[0].self_attn)
    backbone.rotary_emb = gpu_rotation.TableRotation(backbone.rotary_emb, model.config.get_text_config())
