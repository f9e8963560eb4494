"""Configurations of Hugging Face models for Megatron-Core, and the models that it is not offered for."""

from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.hf_models.parallel_plan import check_parallel
from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.text_part import text_config
from rlgraph.engines.megatron.ranks import Ranks
from rlgraph.errors import GraphError, shown

FAMILIES = ("llama", "qwen2", "qwen3")  # by tests/engines/test_megatron.py


def check_folder(where: str, path: str | Path, *, tensor: int = 1, pipeline: int = 1) -> None:
    """Check that Megatron-Core trains the model of a folder. Raises as `check_config` does."""
    check_model(path)
    check_config(where, text_config(path), tensor=tensor, pipeline=pipeline)


def check_config(where: str, config: Any, *, tensor: int = 1, pipeline: int = 1) -> None:
    """Check that Megatron-Core trains a model of this configuration.

    Raises GraphError for a family or a feature that it is not offered for, and for sizes that the ranks do not divide.
    """
    given = f"{where}(trainer='megatron')"
    if config.model_type not in FAMILIES:
        raise GraphError(
            f"{given}: models of type {shown(config.model_type)} are not trained by Megatron-Core here; it is offered for "
            f"{', '.join(FAMILIES)}: leave out trainer"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = [
        name
        for name, has in {
            "attention_bias": getattr(config, "attention_bias", False),
            "mlp_bias": getattr(config, "mlp_bias", False),
            f"hidden_act={shown(config.hidden_act)}": config.hidden_act != "silu",
            "sliding windows": kinds != {"full_attention"},
        }.items()
        if has
    ]
    if unknown:
        raise GraphError(f"{given}: the model has {', '.join(unknown)}, which is not offered with Megatron-Core; leave out trainer")
    if tensor > 1:
        check_parallel(where, config, tensor=tensor)
    layers = config.num_hidden_layers
    if layers % pipeline:
        raise GraphError(
            f"{where}(pipeline_parallel={pipeline}): the model has num_hidden_layers={layers}, which pipeline_parallel={pipeline} does not "
            f"divide; every stage has as many: choose a divisor of {layers}"
        )


def transformer_config(config: Any, ranks: Ranks, *, dtype: torch.dtype, device: str) -> Any:
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
        add_qkv_bias=has_qkv_bias(config),
        qk_layernorm=has_head_norms(config),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks.tensor,
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
    )


def has_qkv_bias(config: Any) -> bool:
    """Whether queries, keys and values have biases."""
    return bool(config.model_type == "qwen2")


def has_head_norms(config: Any) -> bool:
    """Whether the queries and keys of each head are normed."""
    return bool(config.model_type == "qwen3")
