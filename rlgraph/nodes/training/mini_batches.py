"""Several optimizer steps on one batch: epochs, mini-batches, and the average of their metrics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlgraph import settings
from rlgraph.columns import Columns, rows_of
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Output
from rlgraph.nodes.training.mixture import Part, mixed
from rlgraph.nodes.training.whole_losses import prepared
from rlgraph.settings import Count


@dataclass(frozen=True)
class UpdateSchedule:
    """An update walks its batch `epochs` times, each time in so many `mini_batches`; each of them is an optimizer step.

    A mini-batch is adjacent rows, in the order of the batch, so the responses to one prompt are trained together and a run depends on
    its seed alone. A loss is normalised by the tokens and rows of its mini-batch. A mini-batch whose rows are all masked is skipped: it
    takes no optimizer step, does not advance the warm-up, and counts in no metric.
    """

    epochs: Count = 1
    mini_batches: Count = 1

    def __post_init__(self) -> None:
        settings.check(self)

    def cut(self, batch: Columns) -> Iterator[Columns]:
        """Yield the batch of each optimizer step."""
        rows = rows_of(batch)
        for _ in range(self.epochs):
            for index in range(self.mini_batches):
                own = slice(rows * index // self.mini_batches, rows * (index + 1) // self.mini_batches)
                yield batch if self.mini_batches == 1 else {name: column[own] for name, column in batch.items()}

    def update(
        self,
        engine: Any,
        batch: Columns,
        loss: Any,
        more: Sequence[tuple[Columns, Part]] = (),
        *,
        temperature: float = 1.0,
        **settings: Any,
    ) -> dict[str, float]:
        """Take the optimizer steps, each with the settings, and average each metric over the steps that report it.

        `more` are further batches with their losses. They are cut into as many mini-batches, one of each an optimizer step.
        """
        found: dict[str, list[float]] = {}
        for mini_batches in zip(self.cut(batch), *(self.cut(other) for other, _ in more), strict=True):
            if not _has_tokens(mini_batches[0]):
                continue
            each = [prepared(engine, mini_batches[0], loss, temperature)]
            each += [prepared(engine, rows, own.loss, temperature) for rows, (_, own) in zip(mini_batches[1:], more, strict=True)]
            ready, whole = mixed(each, [own for _, own in more]) if more else each[0]
            for name, value in engine.update(ready, whole, temperature=temperature, **settings).items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def empty(self, batch: Columns) -> int:
        """Count the optimizer steps that are skipped because their mini-batches have no token to learn from."""
        return sum(not _has_tokens(rows) for rows in self.cut(batch))


def _has_tokens(mini_batch: Columns) -> bool:
    mask = mini_batch["response_mask"]
    assert isinstance(mask, torch.Tensor)
    return bool(mask.any())


def checked_schedule(node: str, inputs: Sequence[Any], epochs: int, mini_batches: int) -> UpdateSchedule:
    """Make the schedule of an update. Raises GraphError for a count below 1, or mini-batches of different sizes."""
    where = f"node '{node}'"
    rows = max((output.node.rows for output in inputs if isinstance(output, Output)), default=0)
    if rows % mini_batches:
        raise GraphError(
            f"{where} has mini_batches={mini_batches} of a batch of {rows} rows; mini-batches are to be equally large, as each is one "
            "optimizer step: choose a divisor, or another number of prompts"
        )
    return UpdateSchedule(epochs, mini_batches)
