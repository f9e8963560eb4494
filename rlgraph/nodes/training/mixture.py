"""An update on several batches: each with its loss and its weight, in one optimizer step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from rlgraph.algorithms.aggregation import Totals
from rlgraph.columns import Column, Columns, concat_rows, rows_of
from rlgraph.engines.api import Loss, chosen_at
from rlgraph.errors import GraphError, shown
from rlgraph.graph.nodes import Output
from rlgraph.nodes.base import tensor_of

FAMILIES = ("actor", "critic", "preference", "reward")  # of the update's own metrics
PART = "part_of_batch"  # the column that says which batch a row is of
Also: TypeAlias = tuple[Output | Sequence[Output], Loss, float]


@dataclass(frozen=True)
class Part:
    """One more batch of an update: its columns have the `prefix` in front, its metrics the name of its first node."""

    prefix: str
    name: str
    loss: Any
    weight: float
    behaviour: str  # the column that ratios are taken against

    def of(self, columns: Columns) -> dict[str, Column]:
        """Pick its columns, under their own names."""
        return {name.removeprefix(self.prefix): column for name, column in columns.items() if name.startswith(self.prefix)}


@dataclass(frozen=True)
class Mixture:
    """The weighted sum of the losses of several batches. Each is normalised by the tokens and rows of its own batch.

    `parts` are (loss, weight, totals, front of its metrics' names).
    """

    parts: tuple[tuple[Any, float, Totals, str], ...]
    reads: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_entropy(self) -> bool:
        """Whether one of the losses needs it."""
        return any(loss.needs_entropy for loss, *_ in self.parts)

    @property
    def chosen_at(self) -> str | None:
        """The column with the tokens whose log-probs one of the losses reads."""
        return next((at for at in (chosen_at(loss) for loss, *_ in self.parts) if at is not None), None)

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Add up the shares of the losses of this micro-batch's rows, each by the rows of its own batch."""
        part, found = tensor_of(batch, PART), dict[str, float]()
        whole = log_probs.sum() * 0
        for number, (loss, weight, own, front) in enumerate(self.parts):
            rows = (part == number).nonzero()[:, 0]
            if not len(rows):
                continue
            columns = {name: _pick(column, rows) for name, column in batch.items()}
            value, metrics = loss(log_probs[rows], columns, own, None if entropy is None else entropy[rows])
            whole = whole + weight * value
            found |= {front + name.rpartition("/")[2] if front else name: number for name, number in metrics.items()}
        return whole, found


def joined(batches: Sequence[Columns]) -> dict[str, Column]:
    """Join batches of different columns along their rows; what a batch lacks is 0 or no text. The column `PART` numbers them."""
    like: dict[str, tuple[Column, int]] = {}  # a column, and how wide the responses beside it are
    for batch in batches:
        like = {**{name: (column, _width(batch)) for name, column in batch.items()}, **like}
    same = [{name: batch[name] if name in batch else _nothing(*found, batch) for name, found in like.items()} for batch in batches]
    numbered = [{**batch, PART: torch.full((rows_of(batch),), number)} for number, batch in enumerate(same)]
    return concat_rows(numbered)


def _width(batch: Columns) -> int:
    return tensor_of(batch, "response_mask").shape[1]


def _nothing(like: Column, beside: int, batch: Columns) -> Column:
    """Make the column that a batch lacks; one of tokens is as wide as the batch's own responses, so that all columns end as wide."""
    rows = rows_of(batch)
    if not isinstance(like, torch.Tensor):
        return [""] * rows
    of_tokens = like.ndim > 1 and like.shape[1] == beside
    return like.new_zeros(rows, *((_width(batch), *like.shape[2:]) if of_tokens else like.shape[1:]))


def _pick(column: Column, rows: torch.Tensor) -> Column:
    return column[rows] if isinstance(column, torch.Tensor) else [column[row] for row in rows.tolist()]


def checked_also(node: str, also: Sequence[Any]) -> Iterator[tuple[Sequence[Output], Any, float]]:
    """Check what `also` was given: (a batch or several outputs, loss, weight) each. Raises GraphError for anything else."""
    for number, entry in enumerate(also):
        where = f"node '{node}' has also[{number}]={shown(entry)}"
        if not isinstance(entry, tuple) or len(entry) != 3:
            raise GraphError(f"{where}; each is (batch, loss, weight), as (examples, rg.SFTLoss(), 0.1)")
        given, loss, weight = entry
        outputs = [given] if isinstance(given, Output) else given
        if not isinstance(outputs, list | tuple) or not outputs or not all(isinstance(o, Output) and o.kind == "batch" for o in outputs):
            raise GraphError(f"{where}; its batch is the output of a node, or a list of outputs whose columns belong together")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise GraphError(f"{where}; its weight is a finite number above 0")
        yield outputs, loss, float(weight)


def own_name(node: str, taken: Sequence[str]) -> str:
    """Name the metrics of a further batch for its node, with a number where that name is another batch's or a family of metrics.

    >>> own_name("pairs", []), own_name("pairs", ["pairs"]), own_name("actor", [])
    ('pairs', 'pairs2', 'actor2')
    """
    names = (node, *(f"{node}{number}" for number in range(2, len(taken) + 4)))
    return next(name for name in names if name not in taken and name not in FAMILIES)


def mixed(each: Sequence[tuple[Columns, Any]], more: Sequence[Part]) -> tuple[Columns, Mixture]:
    """Join the batches of an optimizer step with their losses: the update's own first, then those of `more`."""
    weights = [(1.0, ""), *((part.weight, f"{part.name}/") for part in more)]
    parts = tuple(
        (loss, weight, Totals.of(tensor_of(batch, "response_mask")), front)
        for (batch, loss), (weight, front) in zip(each, weights, strict=True)
    )
    return joined([batch for batch, _ in each]), Mixture(parts)
