"""Self-attention whose matrix has all queries of a rank, then all keys, then all values, each of which is one box of its parameter.

Megatron-Core's own has queries, keys and values of one group of heads behind each other, so that a rank's queries lie in as many pieces as
it has groups. Here a rank without tensor parallel neighbours holds each parameter whole, in one piece of memory, and publishes it so.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention


class Attention(SelfAttention):
    """Megatron-Core's self-attention, with another order of the rows in the matrix of queries, keys and values."""

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: None = None, output_gate: bool = False, split_qkv: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute queries `[L, 1, heads, D]` of the states `[l, 1, H]`, and keys and values `[L, 1, groups, D]`."""
        mixed, _ = self.linear_qkv(hidden_states)
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        sizes = [count * self.hidden_size_per_attention_head for count in (heads, groups, groups)]
        query, key, value = (part.unflatten(-1, (-1, self.hidden_size_per_attention_head)) for part in mixed.split(sizes, -1))
        return _norm_heads(self.q_layernorm, query), _norm_heads(self.k_layernorm, key), value


def _norm_heads(norm: Any, heads: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = heads if norm is None else norm(heads)
    return found
