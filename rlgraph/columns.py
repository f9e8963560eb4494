"""The columns that travel on edges: name, dtype, dimensions and who writes them.

Dimensions: N prompts of a step, B responses (B = N x group_size, the responses of one prompt side by side),
P prompt tokens, T response tokens, L layers with experts, E experts chosen for a token. Prompts are padded on the left, responses on the
right, with token 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Column: TypeAlias = torch.Tensor | list[str]
Columns: TypeAlias = Mapping[str, Column]  # a batch by the names of its columns, as {"rewards": torch.zeros(8)}


@dataclass(frozen=True)
class ColumnSpec:
    """The content of a column: its dtype (`str` for text), its dimensions, and the node that usually writes it."""

    dtype: torch.dtype | type[str]
    dims: tuple[str, ...]
    written_by: str
    meaning: str

    @property
    def itemsize(self) -> int:
        """The bytes of one element; 0 for text, which has no fixed size."""
        return self.dtype.itemsize if isinstance(self.dtype, torch.dtype) else 0


# Why a response ended: the column `finish_reasons` holds indices into this tuple. All but "stop" cut the response off.
FINISH_REASONS = ("stop", "length", "turns", "abort")

COLUMNS: dict[str, ColumnSpec] = {
    "prompt_texts": ColumnSpec(str, ("N",), "prompts", "prompts as text"),
    "prompt_messages": ColumnSpec(str, ("N",), "prompts", "conversations as JSON: `messages`, `tools`, `template_kwargs`"),
    "prompt_images": ColumnSpec(str, ("N",), "prompts", "images of each conversation, in the order of its parts: a JSON list of data URLs"),
    "prompt_ids": ColumnSpec(torch.int64, ("N",), "prompts", "position of each prompt in the order of the data, counted over epochs"),
    "prompts": ColumnSpec(torch.int64, ("B", "P"), "rollout", "prompt token ids"),
    "prompt_mask": ColumnSpec(torch.bool, ("B", "P"), "rollout", "true on prompt tokens, false on padding"),
    "responses": ColumnSpec(torch.int64, ("B", "T"), "rollout", "response token ids; `list[str]` parameters get them as text"),
    "response_mask": ColumnSpec(torch.bool, ("B", "T"), "rollout", "true on tokens the policy wrote, false on padding and tool tokens"),
    "rollout_log_probs": ColumnSpec(torch.float32, ("B", "T"), "rollout", "log-probs of the engine when the token was sampled"),
    "prompt_routes": ColumnSpec(
        torch.int16, ("B", "P", "L", "E"), "rollout", "experts that the engine chose for each prompt token; -1 where they are not known"
    ),
    "routes": ColumnSpec(torch.int16, ("B", "T", "L", "E"), "rollout", "the same of response tokens; -1 for the last, which is never read"),
    "weight_version": ColumnSpec(torch.int32, ("B", "T"), "rollout", "version of the weights that wrote each token"),
    "finish_reasons": ColumnSpec(
        torch.int8, ("B",), "rollout", "why each response ended: 0 by itself, 1 at the token limit, 2 at the turn limit, 3 aborted"
    ),
    "group_ids": ColumnSpec(torch.int64, ("B",), "rollout", "equal for the responses of one prompt"),
    "images": ColumnSpec(str, ("B",), "rollout", "the images of each prompt, and of the turns behind it: a JSON list of data URLs"),
    "image_mask": ColumnSpec(torch.bool, ("B", "T"), "rollout", "true on the tokens of images in a response, which tools answered with"),
    "outputs": ColumnSpec(str, ("B",), "rollout", "what an agent program returned or printed"),
    "loss_mask": ColumnSpec(
        torch.bool, ("B", "T"), "rollout_correction", "true on the tokens that are trained; replaces `response_mask` where it is given"
    ),
    "current_version": ColumnSpec(torch.int32, ("B",), "policy.update", "version of the weights at the start of the update"),
    "old_log_probs": ColumnSpec(torch.float32, ("B", "T"), "policy.log_probs", "log-probs of the trainer at the start of the update"),
    "ref_log_probs": ColumnSpec(torch.float32, ("B", "T"), "reference.log_probs", "log-probs of the frozen reference"),
    "values": ColumnSpec(torch.float32, ("B", "T"), "critic.values", "value estimates"),
    "rewards": ColumnSpec(torch.float32, ("B",), "reward", "one reward per response"),
    "token_rewards": ColumnSpec(torch.float32, ("B", "T"), "kl_shaped_rewards", "one reward per token"),
    "baseline_rewards": ColumnSpec(torch.float32, ("B",), "reward", "reward of the greedy response to the same prompt"),
    "sum_pi_squared": ColumnSpec(torch.float32, ("B", "T"), "policy.log_probs", "sum of squared probabilities over the vocabulary"),
    "advantages": ColumnSpec(torch.float32, ("B", "T"), "advantages", "advantage of each response token"),
    "returns": ColumnSpec(torch.float32, ("B", "T"), "advantages", "regression target of the critic"),
    "teacher_log_probs": ColumnSpec(torch.float32, ("B", "T"), "teacher.log_probs", "log-probs of the teacher"),
    "teacher_top_ids": ColumnSpec(torch.int32, ("B", "T", "K"), "teacher.top_log_probs", "the teacher's most probable tokens"),
    "teacher_top_log_probs": ColumnSpec(torch.float32, ("B", "T", "K"), "teacher.top_log_probs", "and the teacher's log-probs of them"),
    "preferences": ColumnSpec(torch.float32, ("B",), "pairs", "1 for a row that is preferred, or good; -1 for one that is not; else 0"),
    "margins": ColumnSpec(torch.float32, ("B",), "pairs", "by how much the chosen row of a pair is better, on both of its rows"),
    "step_labels": ColumnSpec(torch.float32, ("B", "T"), "stepwise", "1 at the last token of a good step, -1 of a bad one, else 0"),
    "step_rewards": ColumnSpec(torch.float32, ("B", "T"), "learned_reward.step_rewards", "reward of each step at its last token, else 0"),
    "step_mask": ColumnSpec(torch.bool, ("B", "T"), "learned_reward.step_rewards", "true on the last token of each step"),
    "rollout_is_weights": ColumnSpec(torch.float32, ("B", "T"), "rollout_correction", "importance weights of trainer over engine"),
}


def rows_of_rank(count: int, rank: int, world: int) -> range:
    """Give rank `rank` of `world` its contiguous share of `count` rows; the shares of all ranks, in rank order, are all the rows.

    >>> [list(rows_of_rank(5, rank, world=2)) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return range(count * rank // world, count * (rank + 1) // world)


def rows_of(columns: Columns) -> int:
    """Return the number of rows of a batch, which is the same for each of its columns."""
    first = next(iter(columns.values()))
    return len(first)


def repeat_rows(column: Column, times: int) -> Column:
    """Repeat each row `times` times in place: dims [N, ...] become [N x times, ...]. Texts are a new list: a reader may change its own.

    >>> repeat_rows(["a", "b"], 2)
    ['a', 'a', 'b', 'b']
    """
    if isinstance(column, torch.Tensor):
        return column if times == 1 else column.repeat_interleave(times, dim=0)
    return [row for row in column for _ in range(times)]


def rows_at(column: Column, rows: torch.Tensor) -> Column:
    """Pick rows of a column by their indices [n], in this order.

    >>> rows_at(["a", "b", "c"], torch.tensor([2, 0]))
    ['c', 'a']
    """
    return column[rows] if isinstance(column, torch.Tensor) else [column[row] for row in rows.tolist()]


def concat_rows(batches: Sequence[Columns]) -> dict[str, Column]:
    """Concatenate batches along their rows, as if one worker had written them; pad [B, T] columns to the longest T.

    >>> concat_rows([{"responses": torch.tensor([[5, 6]])}, {"responses": torch.tensor([[7]])}])["responses"].tolist()
    [[5, 6], [7, 0]]
    """
    if len(batches) == 1:
        return dict(batches[0])
    return {name: _concat(name, [batch[name] for batch in batches]) for name in batches[0]}


def _concat(name: str, columns: Sequence[Column]) -> Column:
    tensors = [c for c in columns if isinstance(c, torch.Tensor)]
    if not tensors:
        return [row for column in columns for row in column]
    tensors = [t for t in tensors if len(t)] or tensors[:1]  # a writer without rows may not know further dimensions
    if tensors[0].ndim < 2:
        return torch.cat(tensors)
    width = max(t.shape[1] for t in tensors)
    left = name in COLUMNS and "P" in COLUMNS[name].dims
    behind = (0, 0) * (tensors[0].ndim - 2)  # further dimensions, as K, are equal
    lacks = [(t, width - t.shape[1]) for t in tensors]
    return torch.cat([torch.nn.functional.pad(t, (*behind, *((lack, 0) if left else (0, lack)))) for t, lack in lacks])


def pad_rows(rows: Sequence[Sequence[float]], dtype: torch.dtype, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the rows with 0 to the longest and stack them. The mask is true where nothing was padded."""
    if not rows:  # a rank without a share of the batch
        return torch.zeros(0, 0, dtype=dtype), torch.zeros(0, 0, dtype=torch.bool)
    side = "left" if left else "right"
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    full = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r), dtype=torch.bool) for r in rows], batch_first=True, padding_side=side)
    if not full.shape[1]:  # no response has a token, as where every environment has failed: a column has one at least
        full, mask = (torch.nn.functional.pad(each, (0, 1)) for each in (full, mask))
    return full, mask


def truncation_mask(columns: Columns) -> torch.Tensor:
    """Mark the responses `[B]` that ended at a limit of tokens or of turns rather than by themselves."""
    reasons = columns["finish_reasons"]
    assert isinstance(reasons, torch.Tensor)
    return reasons != FINISH_REASONS.index("stop")
