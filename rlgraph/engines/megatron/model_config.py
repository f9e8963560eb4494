"""Configurations of Hugging Face models for Megatron-Core, and the models that it is not offered for."""

from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.text_part import text_config
from rlgraph.engines.megatron.ranks import MegatronRanks
from rlgraph.errors import GraphError, shown
from rlgraph.plan.estimates import undivided
from rlgraph.settings import Recompute

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # by tests/engines/test_megatron.py


def check_folder(where: str, path: str | Path, *, tensor: int = 1, context: int = 1, pipeline: int = 1, expert: int = 1) -> None:
    """Check that Megatron-Core trains the model of a folder. Raises as `check_config` does."""
    check_model(path)
    check_config(where, text_config(path), tensor=tensor, context=context, pipeline=pipeline, expert=expert)


def check_config(where: str, config: Any, *, tensor: int = 1, context: int = 1, pipeline: int = 1, expert: int = 1) -> None:
    """Check that Megatron-Core trains a model of this configuration.

    Raises GraphError for a family or a feature that it is not offered for, and for sizes that the ranks do not divide.
    """
    given = f"{where}(trainer='megatron')"
    if config.model_type not in FAMILIES:
        raise GraphError(
            f"{given}: models of type {shown(config.model_type)} are not trained by Megatron-Core here; it is offered for "
            f"{', '.join(FAMILIES)}: leave out trainer"
        )
    unknown = _unknown(config)
    if unknown:
        raise GraphError(f"{given}: the model has {', '.join(unknown)}, which is not offered with Megatron-Core; leave out trainer")
    experts = getattr(config, "num_experts", None) or 1
    if experts == 1 < expert:
        raise GraphError(f"{where}(expert_parallel={expert}): the model has no experts; leave out expert_parallel")
    inner = tensor if experts > 1 else config.intermediate_size  # experts are not cut
    found = undivided(config.num_attention_heads, config.num_key_value_heads, None, inner, tensor=tensor, context=context)
    for name, size, setting, ranks in (
        *([(*found, tensor * context)] if found is not None else []),
        ("num_hidden_layers", config.num_hidden_layers, f"pipeline_parallel={pipeline}", pipeline),
        ("num_experts", experts, f"expert_parallel={expert}", expert),
    ):
        if size % ranks:
            raise GraphError(
                f"{where}({setting}): the model has {name}={size}, which {setting} does not divide; every rank has as many: choose a "
                f"divisor of {size}"
            )


def _unknown(config: Any) -> list[str]:
    """Name what a model of a known family has that is not offered."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    dense = getattr(config, "num_experts", None) and (config.mlp_only_layers or config.decoder_sparse_step != 1)
    found = {
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        f"hidden_act={shown(config.hidden_act)}": config.hidden_act != "silu",
        "sliding windows": kinds != {"full_attention"},
        "layers without experts among those with them": dense,
    }
    return [name for name, has in found.items() if has]


def transformer_config(config: Any, ranks: MegatronRanks, *, dtype: torch.dtype, device: str, recompute: Recompute) -> Any:
    """Translate the configuration of a Hugging Face model. Nothing is fused, and nothing is drawn at random."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    heads = config.num_attention_heads
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks.tensor,
        context_parallel_size=ranks.context,
        pipeline_model_parallel_size=ranks.pipeline,
        sequence_parallel=ranks.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the other one wants lengths that do not vary
        cuda_graph_scope=[],
        calculate_per_token_loss=True,  # else the schedule divides a loss that our totals have divided already
        deallocate_pipeline_outputs=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **_recomputing(recompute, mixture=bool(getattr(config, "num_experts", None))),
        **_experts(config, ranks),
    )


def _recomputing(recompute: Recompute, *, mixture: bool) -> dict[str, Any]:
    """Translate what layers compute again; Megatron-Core knows no part of attention apart, so that "selective" is the rest of a layer."""
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe" if mixture else "mlp"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}


def _experts(config: Any, ranks: MegatronRanks) -> dict[str, Any]:
    """Translate the experts of a mixture: the most probable ones are taken, and no token is dropped."""
    if not getattr(config, "num_experts", None):
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.norm_topk_prob,  # else the probabilities of those taken add up to 1
        "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "expert_model_parallel_size": ranks.expert,
        "expert_tensor_parallel_size": 1,
    }
