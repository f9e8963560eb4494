"""The columns that every rollout writes, one row a response, and the seed of each response."""

from collections.abc import Sequence

import torch

from rlgraph.columns import FINISH_REASONS, Column, Columns
from rlgraph.engines.api import Response

WRITES = (
    *("prompts", "prompt_mask", "responses", "response_mask"),
    *("rollout_log_probs", "weight_version", "finish_reasons", "group_ids"),
)


def seed_of(seed: int, prompt: int, member: int) -> int:
    """Derive a response's seed from the generator's seed, its prompt's place in the data order and its own place in the group."""
    return (seed * 1_000_003 + prompt * 65_537 + member) % 2**31


def columns_of(prompts: Sequence[Sequence[int]], responses: Sequence[Response], group_ids: Column) -> dict[str, Column]:
    """Pack responses into the columns that every rollout writes, one row each: prompts padded on the left, responses on the right."""
    tokens, mask = padded(prompts, torch.int64, left=True)
    sampled, written = padded([r.tokens for r in responses], torch.int64, left=False)
    log_probs, _ = padded([r.log_probs for r in responses], torch.float32, left=False)
    versions, _ = padded([r.versions for r in responses], torch.int32, left=False)
    return {
        "prompts": tokens,
        "prompt_mask": mask,
        "responses": sampled,
        "response_mask": written,
        "rollout_log_probs": log_probs,
        "weight_version": versions,
        "finish_reasons": torch.tensor([FINISH_REASONS.index(r.finish) for r in responses], dtype=torch.int8),
        "group_ids": group_ids,
    }


def truncated(columns: Columns) -> torch.Tensor:
    """Mark the responses `[B]` that ended at a limit of tokens or of turns rather than by themselves."""
    reasons = columns["finish_reasons"]
    assert isinstance(reasons, torch.Tensor)
    return reasons != FINISH_REASONS.index("stop")


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the rows with 0 to the longest and stack them. The mask is true where nothing was padded."""
    if not rows:  # this rank has no share of this part
        return torch.zeros(0, 0, dtype=dtype), torch.zeros(0, 0, dtype=torch.bool)
    side = "left" if left else "right"
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    full = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r), dtype=torch.bool) for r in rows], batch_first=True, padding_side=side)
    return full, mask
