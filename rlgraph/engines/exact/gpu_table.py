"""The cosines and sines by which engine and trainer rotate queries and keys on a GPU, computed by the same lines."""

from typing import Any

import torch


def head_size(config: Any) -> int:
    """How many numbers a head of a model has."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def table_of(config: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The cosines, then the sines, of all positions of a model: `[positions, D]` for heads of D numbers.

    Computed in float64 on the host, so that no machine rounds otherwise.
    """
    given = config.rope_parameters
    size = head_size(config)
    speeds = given["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * speeds
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype).to(device)
