"""The layers of Megatron-Core and their config for a Hugging Face model, and the ranks that share them.

Ranks share matrices (tensor), rows of tokens (context) or layers (pipeline), or have other sequences (data). Neighbours share matrices,
then rows, and the ranks of a stage come before those of the next: of 8 ranks with `tensor` and `pipeline` 2, ranks 0 and 1 share the first
layers, as 2 and 3 do for other sequences, and ranks 4 to 7 have the last layers. With `context` 2, ranks 0 and 2 have two halves of the
same rows. `expert` neighbours of a stage share the experts of a mixture, whole ones, whatever else they share.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.engines.forward import flash4
from rlgraph.engines.forward.packed_attention import attend
from rlgraph.engines.hf.model_files import FamilyOptions, text_config
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.errors import GraphError, show_value
from rlgraph.plan.estimates import find_undivided_size
from rlgraph.settings import Recompute

# The ranks of a model that Megatron-Core cuts: those that share matrices (tensor), rows of tokens (context) or layers (pipeline), or have
# other sequences (data).

ORDER = "tp-cp-ep-dp-pp"
_made: list[tuple[int, int, int, int]] = []  # Megatron-Core's groups are of a process, however many models it has


class MegatronRanks:
    """The place of one rank of `world`. `data` counts the ranks of a stage that have sequences of their own; those of `data_group` compute
    with the same parameters for other tokens.

    Raises GraphError if the number of ranks is not a multiple of the ranks per pass, or if another model of this process is sharded
    differently.
    """

    def __init__(self, rank: int, world: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1, expert: int = 1) -> None:
        asked = tensor, context, pipeline, expert
        given = f"MegatronEngine(world={world}, {_name_setting(asked)})"
        for sharing in (tensor * context * pipeline, pipeline * expert):
            if world % sharing:
                raise GraphError(f"{given}: ranks form groups of {sharing}; use a multiple")
        if _made and _made[-1] != asked:
            raise GraphError(
                f"{given}: another model in these processes has {_name_setting(_made[-1])}, and Megatron-Core supports one per process; "
                "set the same for both, or use separate processes"
            )
        from megatron.core import parallel_state as groups

        if not _made:
            experts = {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": 1}
            more = {"context_parallel_size": context, "order": ORDER, "create_gloo_process_groups": False}
            groups.initialize_model_parallel(tensor, pipeline, **more, **experts)
        _made.append(asked)
        stage = world // pipeline  # ranks of one
        self.world, self.tensor, self.context, self.pipeline, self.expert = world, tensor, context, pipeline, expert
        self.data = stage // (tensor * context)
        self.stage, of_stage = divmod(rank, stage)
        of_row, self.tensor_rank = divmod(of_stage, tensor)
        self.data_rank, self.context_rank = divmod(of_row, context)
        self.expert_data_rank, self.expert_rank = divmod(of_stage, expert)
        self.tensor_group: Any = groups.get_tensor_model_parallel_group()
        self.context_group: Any = groups.get_context_parallel_group()
        self.data_group: Any = groups.get_data_parallel_group(with_context_parallel=True)
        self.expert_data_group: Any = groups.get_expert_data_parallel_group()
        self.tied_group: Any = groups.get_embedding_group() if self.is_first or self.is_last else None

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.stage == self.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank reports the scores of its tokens: it is one of those that computed the head."""
        return self.is_last and self.tensor_rank == 0

    def close(self) -> None:
        """Let go of Megatron-Core's groups, if no other model of this process has them."""
        _made.pop()
        if not _made and dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()


def _name_setting(asked: tuple[int, int, int, int]) -> str:
    return "tensor_parallel={}, context_parallel={}, pipeline_parallel={}, expert_parallel={}".format(*asked)


# Modules of a layer that Megatron-Core has with Transformer Engine alone: attention over packed sequences, norms of cut sequences, and
# experts that compute together.


@dataclass(frozen=True)
class Packed:
    """Sequences that lie one behind another in a row: where each begins, the longest, and the rotation `[L, D]` at each token.

    The ranks of a `group` have consecutive tokens of the row each, and the rotation at these. Megatron-Core hands all this on to the
    attention as it is, and looks at `qkv_format` alone.
    """

    starts: torch.Tensor
    longest: int
    cos: torch.Tensor
    sin: torch.Tensor
    group: Any = None
    qkv_format: str = "thd"


class RMSNorm(torch.nn.Module):
    """A root mean square norm, of the tokens that this rank has or of its heads."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else "cuda"
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, self.weight.shape, self.weight, self.eps)


class PackedAttention(torch.nn.Module):
    """Attention within each sequence of a packed row, for the heads of this rank. It rotates queries and keys itself.

    Ranks that share the row exchange tokens for heads and back (`attend_by_head`).
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        flash4.load()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, *, packed_seq_params: Packed, **given: Any
    ) -> torch.Tensor:
        """Attend `[l, H, D]`, for the tokens of this rank."""
        packed = packed_seq_params
        query, key = (_rotate_states(x, packed.cos[:, None], packed.sin[:, None]) for x in (query, key))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        row: dict[str, Any] = {"cu_seq_lens_q": packed.starts, "max_length_q": packed.longest, "context_group": packed.group}
        found, _ = attend(self, query, key, value, None, **row)
        return found[0]


def _rotate_states(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat((-second, first), -1) * sin


class Experts(torch.nn.Module):
    """The `count` experts of this rank, in one matrix each for all gates and ups, and for all downs, as transformers keeps them."""

    def __init__(self, count: int, config: Any, pg_collection: Any = None) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.moe_ffn_hidden_size
        made: dict[str, Any] = {"dtype": config.params_dtype, "device": "cpu" if config.use_cpu_initialization else "cuda"}
        self.gate_up = torch.nn.Parameter(torch.empty(count, 2 * inner, size, **made))
        self.down = torch.nn.Parameter(torch.empty(count, size, inner, **made))

    def forward(self, states: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Compute `states [N, H]`, which lie expert by expert, `counts` of each, and multiply by the weights `[N]` of the router."""
        ends = counts.cumsum(0).to(states.device, torch.int32)
        gate, up = _product(states, self.gate_up, ends).chunk(2, -1)
        found = _product(torch.nn.functional.silu(gate) * up, self.down, ends)
        return found * weights[:, None].to(found.dtype), None


def _product(states: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch._grouped_mm(states, matrices.transpose(1, 2), offs=ends)
    return found


def layer_spec(*, head_norms: bool, experts: bool) -> Any:
    """Describe a layer to Megatron-Core: its own matrices and router, and the modules of this file."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from rlgraph.engines.megatron.attention import Attention

    of_heads = RMSNorm if head_norms else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=of_heads,
        k_layernorm=of_heads,
    )
    dense = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=ModuleSpec(module=Experts))) if experts else dense
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(module=Attention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


# Configurations of Hugging Face models for Megatron-Core, and the models that it is not offered for.

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
            f"{given}: models of type {show_value(config.model_type)} cannot be trained with Megatron-Core; it supports "
            f"{', '.join(FAMILIES)}: leave out trainer"
        )
    unknown = _unsupported_features(config)
    if unknown:
        raise GraphError(f"{given}: the model has {', '.join(unknown)}, which is not supported with Megatron-Core; leave out trainer")
    experts = FamilyOptions(config).num_experts or 1
    if experts == 1 < expert:
        raise GraphError(f"{where}(expert_parallel={expert}): the model has no experts; leave out expert_parallel")
    inner = tensor if experts > 1 else config.intermediate_size  # experts are not cut
    found = find_undivided_size(config.num_attention_heads, config.num_key_value_heads, None, inner, tensor=tensor, context=context)
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


def _unsupported_features(config: Any) -> list[str]:
    """Name what a model of a known family has that is not offered."""
    options = FamilyOptions(config)
    kinds = set(options.layer_types or ["full_attention"])
    dense = options.num_experts and (config.mlp_only_layers or config.decoder_sparse_step != 1)
    found = {
        "attention_bias": options.attention_bias,
        "mlp_bias": options.mlp_bias,
        f"hidden_act={show_value(config.hidden_act)}": config.hidden_act != "silu",
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
        kv_channels=FamilyOptions(config).head_dim or config.hidden_size // heads,
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
        **_recompute_options(recompute, mixture=bool(FamilyOptions(config).num_experts)),
        **_experts(config, ranks),
    )


def _recompute_options(recompute: Recompute, *, mixture: bool) -> dict[str, Any]:
    """Translate what layers compute again; Megatron-Core knows no part of attention apart, so that "selective" is the rest of a layer."""
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe" if mixture else "mlp"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}


def _experts(config: Any, ranks: MegatronRanks) -> dict[str, Any]:
    """Translate the experts of a mixture: the most probable ones are taken, and no token is dropped."""
    if not FamilyOptions(config).num_experts:
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
