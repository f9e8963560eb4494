"""The columns that travel on edges: name, dtype, dimensions and who writes them.

Dimensions: N prompts of a step, B responses (B = N x group_size, the responses of one prompt side by side),
P prompt tokens, T response tokens. Prompts are padded on the left, responses on the right, with token 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Column: TypeAlias = torch.Tensor | list[str]
Columns: TypeAlias = Mapping[str, Column]


@dataclass(frozen=True)
class ColumnSpec:
    """What a column holds: its dtype (`str` for text), its dimensions, and the node that usually writes it."""

    dtype: torch.dtype | type[str]
    dims: tuple[str, ...]
    written_by: str
    meaning: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element; text has no fixed size and gives 0."""
        return self.dtype.itemsize if isinstance(self.dtype, torch.dtype) else 0


# Why a response ended: what number i of the column `finish_reasons` means. All but "stop" cut it off where it would have gone on.
FINISH_REASONS = ("stop", "length", "turns", "abort")

COLUMNS: dict[str, ColumnSpec] = {
    "prompt_texts": ColumnSpec(str, ("N",), "prompts", "prompts as text"),
    "prompt_ids": ColumnSpec(torch.int64, ("N",), "prompts", "position of each prompt in the data order, counted over epochs"),
    "prompts": ColumnSpec(torch.int64, ("B", "P"), "rollout", "prompt token ids"),
    "prompt_mask": ColumnSpec(torch.bool, ("B", "P"), "rollout", "true on prompt tokens, false on padding"),
    "responses": ColumnSpec(torch.int64, ("B", "T"), "rollout", "response token ids; `list[str]` parameters get them as text"),
    "response_mask": ColumnSpec(torch.bool, ("B", "T"), "rollout", "true on tokens the policy wrote, false on padding and tool tokens"),
    "rollout_log_probs": ColumnSpec(torch.float32, ("B", "T"), "rollout", "log-probs of the engine when the token was sampled"),
    "weight_version": ColumnSpec(torch.int32, ("B", "T"), "rollout", "version of the weights that wrote each token"),
    "finish_reasons": ColumnSpec(
        torch.int8, ("B",), "rollout", "why each response ended: 0 by itself, 1 at its limit of tokens, 2 of turns, 3 aborted"
    ),
    "group_ids": ColumnSpec(torch.int64, ("B",), "rollout", "equal for the responses of one prompt"),
    "loss_mask": ColumnSpec(
        torch.bool, ("B", "T"), "rollout_correction", "true on the tokens that are trained; where given, it stands for `response_mask`"
    ),
    "current_version": ColumnSpec(torch.int32, ("B",), "policy.update", "version of the weights at the start of the update"),
    "old_log_probs": ColumnSpec(torch.float32, ("B", "T"), "policy.log_probs", "log-probs of the trainer at the start of the update"),
    "ref_log_probs": ColumnSpec(torch.float32, ("B", "T"), "reference.log_probs", "log-probs of the frozen reference"),
    "values": ColumnSpec(torch.float32, ("B", "T"), "critic.values", "value estimates"),
    "rewards": ColumnSpec(torch.float32, ("B",), "reward", "one reward a response"),
    "token_rewards": ColumnSpec(torch.float32, ("B", "T"), "kl_shaped_rewards", "rewards by token"),
    "baseline_rewards": ColumnSpec(torch.float32, ("B",), "reward", "reward of the greedy response to the same prompt"),
    "sum_pi_squared": ColumnSpec(torch.float32, ("B", "T"), "policy.log_probs", "sum of squared probabilities over the vocabulary"),
    "advantages": ColumnSpec(torch.float32, ("B", "T"), "advantages", "advantage of each response token"),
    "returns": ColumnSpec(torch.float32, ("B", "T"), "advantages", "regression target of the critic"),
    "rollout_is_weights": ColumnSpec(torch.float32, ("B", "T"), "rollout_correction", "importance weights of trainer over engine"),
}


def share(count: int, rank: int, world: int) -> range:
    """Return the rows of one of `world` ranks: those of all ranks below one another are all rows, in their order."""
    return range(count * rank // world, count * (rank + 1) // world)


def rows_of(columns: Columns) -> int:
    """Return how many rows the columns have; every column of one batch has the same number."""
    first = next(iter(columns.values()))
    return len(first)


def repeat_rows(column: Column, times: int) -> Column:
    """Return the column with each row repeated `times` in place: dims [N, ...] become [N x times, ...]."""
    if times == 1:
        return column
    if isinstance(column, torch.Tensor):
        return column.repeat_interleave(times, dim=0)
    return [row for row in column for _ in range(times)]


def concat_rows(parts: Sequence[Columns]) -> dict[str, Column]:
    """Return the parts below one another, as if one worker had written them; [B, T] columns are padded to the longest T."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: _concat(name, [part[name] for part in parts]) for name in parts[0]}


def _concat(name: str, columns: Sequence[Column]) -> Column:
    tensors = [c for c in columns if isinstance(c, torch.Tensor)]
    if not tensors:
        return [row for column in columns for row in column]
    if tensors[0].ndim < 2:
        return torch.cat(tensors)
    width = max(t.shape[1] for t in tensors)
    left = name in COLUMNS and "P" in COLUMNS[name].dims
    return torch.cat([torch.nn.functional.pad(t, (width - t.shape[1], 0) if left else (0, width - t.shape[1])) for t in tensors])
