"""The columns that every rollout writes, one row a response, and the seed of each response."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlgraph.columns import FINISH_REASONS, Column, Columns
from rlgraph.engines.api import Request, Response

WRITES = (
    *("prompts", "prompt_mask", "responses", "response_mask"),
    *("rollout_log_probs", "weight_version", "finish_reasons", "group_ids"),
)
REWARDS = ("rewards", "token_rewards")  # of environments


@dataclass(frozen=True)
class Task:
    """A response that is due: its request, its place in its group, and for conversations the `item`, the columns of its prompt."""

    request: Request
    member: int = 0
    item: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Outcome:
    """A response to a prompt. `written` marks the tokens that the policy wrote; None: all of them.

    `rewards` are an environment's, by the place of the token that each is for. `counts` are those of a conversation.
    """

    prompt: Sequence[int]
    response: Response
    written: Sequence[bool] | None = None
    rewards: Mapping[int, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)


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


def columns_of_sampled(sampled: Sequence[Outcome], group_ids: Column, rewarded: bool = False) -> dict[str, Column]:
    """Pack what was sampled into columns; with `rewarded` also `rewards` [B] and `token_rewards` [B, T], whose sums are equal."""
    columns = columns_of([one.prompt for one in sampled], [one.response for one in sampled], group_ids)
    mask, tokens = columns["response_mask"], columns["responses"]
    assert isinstance(mask, torch.Tensor)
    assert isinstance(tokens, torch.Tensor)
    for row, one in enumerate(sampled):
        if one.written is not None:
            mask[row, : len(one.written)] = torch.tensor(one.written, dtype=torch.bool)
    if not rewarded:
        return columns
    rewards = torch.zeros(tokens.shape, dtype=torch.float32)
    for row, one in enumerate(sampled):
        for place, reward in one.rewards.items():
            rewards[row, place] = reward
    return columns | {"rewards": rewards.sum(-1), "token_rewards": rewards}


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
    if not full.shape[1]:  # no response has a token, as where every environment has failed: a column has one at least
        full, mask = (torch.nn.functional.pad(each, (0, 1)) for each in (full, mask))
    return full, mask
