"""The rows of a batch that a pass is of: picked from the batch, so many of their logits at once, and scores put back in their places."""

import torch

from rlgraph.batching.packing import MicroBatch, response_lengths
from rlgraph.columns import Column, Columns
from rlgraph.engines.forward.collectives import filled
from rlgraph.errors import DataError
from rlgraph.plan.memory_laws import LOGITS_AT_ONCE

AT_ONCE = {"cpu": 1 << 24, "cuda": LOGITS_AT_ONCE}  # logits: on a GPU enough rows for a product at its full speed


def check_lengths(batch: Columns, most: int | None) -> None:
    """Raise DataError for a row of more tokens than `most`, the `rotary_limit` of the model that reads it."""
    if most is None:
        return
    longest = int((tensor_of(batch, "prompt_mask").sum(-1) + response_lengths(tensor_of(batch, "response_mask"))).max())
    if longest > most:
        raise DataError(
            f"a row has {longest} tokens, but beyond {most} the model's rotary factors depend on the longest row of a micro-batch, so that "
            f"log-probs would depend on micro_batch_tokens; cut rows to {most} tokens (max_tokens=, max_context=)"
        )


def unpacked(values: torch.Tensor, micro_batch: MicroBatch, width: int) -> torch.Tensor:
    """Put the values at their places in `[rows, T]`, with 0 elsewhere."""
    own = values.new_zeros(len(micro_batch.rows), width, *values.shape[1:]).index_put((micro_batch.row, micro_batch.column), values)
    return own if micro_batch.group is None else filled(own, micro_batch.group)


def rows_of(batch: Columns, rows: torch.Tensor, device: torch.device) -> Columns:
    """Pick rows of every column, on a device."""

    def pick(column: Column) -> Column:
        return column[rows.to(column.device)].to(device) if isinstance(column, torch.Tensor) else [column[i] for i in rows.tolist()]

    return {name: pick(column) for name, column in batch.items()}


def tensor_of(batch: Columns, name: str) -> torch.Tensor:
    """A column that is a tensor."""
    column = batch[name]
    assert isinstance(column, torch.Tensor)
    return column


def shape_of(batch: Columns) -> tuple[int, int]:
    """The number of responses of a batch, and of the tokens of the longest."""
    rows, width = tensor_of(batch, "responses").shape
    return rows, width


def rows_at_once(device: torch.device, words: int) -> int:
    """Count the rows whose logits are in memory at once, for a head of so many words."""
    return max(1, AT_ONCE[device.type] // words)
