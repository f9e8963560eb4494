"""Keep the rows of a worker's batches that a recorder has asked for; all others stay where they are.

Every worker draws the same rows of a step, so the columns that several workers write for one response meet in the recorder.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlgraph.columns import Column, Columns, rows_of_rank
from rlgraph.runtime.messages import Cells, SampledRows, SampleRequest, SampleSource
from rlgraph.runtime.worker.spec import NodeSpec

MESSAGE_BYTES = 1 << 24  # of one message, about; the driver reads none above 64 MiB
TOKENS = (  # columns with a number for each token that a recorder shows; of other columns it gets those with one number a row
    *("prompts", "prompt_mask", "responses", "response_mask", "rollout_log_probs", "weight_version"),
    *("old_log_probs", "advantages", "loss_mask", "token_rewards"),
)


def chosen_rows(request: SampleRequest, rollout: str, rows: int, step: int) -> Sequence[int]:
    """Draw the rows of a step that are recorded, in their order: the same in every worker.

    >>> chosen_rows(SampleRequest(0.25, None, 0, []), "rollout", 8, step=3)
    [4, 7]
    >>> chosen_rows(SampleRequest(1.0, None, 0, []), "rollout", 3, step=3)
    range(0, 3)
    """
    count = max(round(request.share * rows), 1)
    if request.most is not None:
        count = min(count, request.most)
    if count >= rows:
        return range(rows)
    return sorted(random.Random(f"{request.seed} {rollout} {step}").sample(range(rows), count))


class SampleTap:
    """The rows that one worker has kept since they were last taken. Without a request it keeps none, and costs nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.request: SampleRequest | None = None
        self._kept: list[SampledRows] = []

    def taken(self) -> list[SampledRows]:
        """Take the rows kept since the last call."""
        found, self._kept = self._kept, []
        return found

    def keep(self, node: NodeSpec, step: int, chunk: int, written: Columns) -> None:
        """Copy the rows of one firing that were asked for to host memory."""
        for source in self.request.sources if self.request is not None else ():
            if source.node == node.name and written:
                self._kept += self._rows(source, node, step, chunk, written)

    def _rows(self, source: SampleSource, node: NodeSpec, step: int, chunk: int, written: Columns) -> Iterator[SampledRows]:
        assert self.request is not None
        here = rows_of_firing(node, chunk, source.rows // source.repeat, self.rank, self.world)
        columns = {name: column for name, column in written.items() if name in source.columns and _shown(name, column)}
        if not columns or len(next(iter(columns.values()))) != len(here):
            return  # nothing was due, or another rank writes this batch
        chosen = dict.fromkeys(row // source.repeat for row in chosen_rows(self.request, source.rollout, source.rows, step))
        own = [row for row in chosen if row in here]
        size = max(MESSAGE_BYTES // max(sum(_row_bytes(column) for column in columns.values()), 1), 1)
        for first in range(0, len(own), size):
            rows = own[first : first + size]
            cells = {name: _cells(column, [row - here.start for row in rows]) for name, column in columns.items()}
            yield SampledRows(source.node, source.rollout, step, rows, cells)


def rows_of_firing(node: NodeSpec, chunk: int, rows: int, rank: int, world: int) -> range:
    """Number the rows that a firing writes, of the `rows` of its step: a generator's rank writes those of its prompts."""
    size = rows // node.chunks
    if node.traits.work != "generate":
        return range(chunk * size, (chunk + 1) * size) if rank == 0 else range(0)
    group = node.traits.group_size or 1
    own = rows_of_rank(size // group, rank, world)
    return range(chunk * size + own.start * group, chunk * size + own.stop * group)


def _shown(name: str, column: Column) -> bool:
    return not isinstance(column, torch.Tensor) or column.ndim == 1 or name in TOKENS


def _row_bytes(column: Column) -> int:
    return column[0].nbytes if isinstance(column, torch.Tensor) and len(column) else 64


def _cells(column: Column, rows: list[int]) -> Cells:
    if not isinstance(column, torch.Tensor):
        return Cells("text", [len(rows)], text=[column[row] for row in rows])
    picked = column.detach()[torch.tensor(rows, device=column.device)]
    if picked.dtype == torch.int64 and picked.ndim > 1:
        picked = picked.to(torch.int32)  # token ids
    if picked.dtype in (torch.bfloat16, torch.float16):
        picked = picked.float()
    array: Any = picked.cpu().contiguous().numpy()
    return Cells(str(array.dtype), list(array.shape), data=array.tobytes())
