"""Modules of a layer that Megatron-Core has with Transformer Engine alone: attention over packed sequences, norms of cut sequences, and
experts that compute together."""

from dataclasses import dataclass
from typing import Any

import torch

from rlgraph.engines.forward import flash4
from rlgraph.engines.forward.packed_attention import attend


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

    Ranks that share the row exchange tokens for heads and back (`attend_apart`).
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        flash4.load()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, *, packed_seq_params: Packed, **given: Any
    ) -> torch.Tensor:
        """Attend `[l, H, D]`, for the tokens of this rank."""
        packed = packed_seq_params
        query, key = (_rotated(x, packed.cos[:, None], packed.sin[:, None]) for x in (query, key))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        row: dict[str, Any] = {"cu_seq_lens_q": packed.starts, "max_length_q": packed.longest, "context_group": packed.group}
        found, _ = attend(self, query, key, value, None, **row)
        return found[0]


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
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
