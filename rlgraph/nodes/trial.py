"""Trial of users' functions: each is called once on a made-up batch at the launch, before anything starts."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from rlgraph import notices
from rlgraph.algorithms.masks import Totals
from rlgraph.algorithms.policy_loss import WholeLoss
from rlgraph.columns import COLUMNS, Column, Columns, repeat_rows
from rlgraph.engines.api import chosen_at
from rlgraph.errors import GraphError, RlgraphError, show_value
from rlgraph.nodes.base import Context, ReadColumns, checked_columns, checked_metrics, fired_parts
from rlgraph.nodes.rewards.calls import CallFailed, FunctionPool

if TYPE_CHECKING:
    from rlgraph.graph.graph import Graph
    from rlgraph.graph.nodes import Node

PROMPTS = 2  # of a made-up batch, each with its group of responses
LIMIT_S = 5.0  # of a function's trial
MISTAKES = (NameError, AttributeError, TypeError, ImportError)  # errors that do not depend on the arguments
SIZES = {"P": 3, "T": 5, "L": 1, "E": 1, "K": 2}  # of the dimensions of made-up columns
PROMPT_TOKEN, RESPONSE_TOKEN = 1, 2
PROMPT = "What is 2 + 2?"
RESPONSES = ("2 + 2 = 4, so the answer is 4.", "I do not know.")

Given = TypeVar("Given")


class TooLong(RlgraphError):
    """A call did not return before its deadline."""


class MadeUpTokenizer:
    """Decodes the token ids of a made-up batch."""

    def batch_decode(self, rows: Sequence[Sequence[int]], **settings: Any) -> list[str]:
        return [PROMPT if PROMPT_TOKEN in row else RESPONSES[place % 2] for place, row in enumerate(rows)]


def try_functions(graph: "Graph") -> None:
    """Call each function, estimator and operation of the user on a made-up batch of 2 prompts.

    A notice names a function that does not return within 5 seconds, or whose error made-up columns may cause. `trial=False` leaves a
    function out, and so do its `retries`. Raises RlgraphError naming the failed node.
    """
    made: dict[Node, Columns] = {}
    with _preserve_random_states():
        for node in graph.nodes:
            heights = [len(next(iter(made[output.node].values()), ())) for output in node.inputs if made[output.node]]
            widest = max((output.node.rows for output in node.inputs), default=node.rows)
            rows = max(max(heights, default=PROMPTS) * node.rows // widest, 1)
            columns = _read(node, made)
            tried = None if columns is None else _call_once(node, columns, rows)
            made[node] = made_up(node.writes, rows) if tried is None else tried


def _call_once(node: "Node", columns: Columns, rows: int) -> Columns | None:
    """Call the node's function; None if there is none, or if its result is unknown, for which a notice gives the reason."""
    leaves_out = "trial=False" if node.traits.given is not None else "traits = rg.extend.NodeTraits(trial=False)"
    try:
        found: Any = node.operation.trial(node, columns, rows) if node.traits.trial else None
        checked: Columns | None = _fire_once(node, columns, rows) if found is NotImplemented else found
        return checked
    except TooLong as late:
        notices.here.say(f"node '{node.name}': {late}, so it is not tried before the launch; {leaves_out} does not wait for it")
    except RlgraphError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, (RlgraphError, *MISTAKES)):
            where = "" if str(error).startswith(f"node '{node.name}'") else f"node '{node.name}': "
            raise type(error)(f"{where}{error} (found on a made-up batch; {leaves_out} leaves that out)") from cause
        said = str(cause).partition("\n")[0]
        notices.here.say(
            f"node '{node.name}': its function raised {type(cause).__name__}: {said:.100} on a made-up batch; "
            f"if it does on a real one, the run ends at its first step; {leaves_out} leaves the trial out"
        )
    return None


def _fire_once(node: "Node", columns: Columns, rows: int) -> Columns | None:
    """Start a copy of the node's operation and call its stage as the first step would. Raises RlgraphError as a run would."""
    many = node.chunks > 1 and node.follows is None  # it makes the chunks of a batch
    if node.model is not None or many or node.traits.given == () or any(output.prefix for output in node.inputs):
        return None
    written, rewards = _fire(node, columns), columns.get("rewards")
    if _not_finite(columns, written) and isinstance(rewards, torch.Tensor):  # made-up texts may all score the same, unlike in most batches
        written = _fire(node, {**columns, "rewards": (torch.arange(len(rewards)) % 2).to(rewards) / 2 + 0.25})
    if name := _not_finite(columns, written):
        raise GraphError(
            f"node '{node.name}' returned {name} with NaN or an infinity; its numbers must be finite: check for a division by 0, e.g. by a "
            "standard deviation"
        )
    due = rows if node.inputs else node.rows
    count, read = (max((len(column) for column in batch.values()), default=0) for batch in (written, columns))
    if count == node.rows != due:
        return None  # it relies on the rows of a step
    checked_columns(node.name, node.writes, written, read if rows < read == count else due)  # a stage that chooses rows may find few
    return {name: column[:rows] for name, column in written.items()}


def _fire(node: "Node", columns: Columns) -> Columns:
    operation, read = copy_callable(node.operation), columns if node.earlier is not None else ReadColumns(columns)
    what = "the function" if node.traits.given is not None else f"its operation '{type(operation).__name__}'"
    written, metrics = fired_parts(_call_in_time(what, lambda: operation.start(Context())(0, read)))
    checked_metrics(node.name, metrics)
    checked_columns(node.name, node.writes, written)
    return written


def _call_in_time(what: str, call: Callable[[], Any]) -> Any:
    """Call a user's function. Raises TooLong after `LIMIT_S`, and GraphError, with its cause, for its errors."""
    try:
        return FunctionPool(call, [{}], 1, LIMIT_S).run()[0]
    except CallFailed as failure:
        if failure.late:
            raise TooLong(f"{what} {failure.what}") from None
        cause = failure.__cause__
        raise GraphError(str(cause) if isinstance(cause, RlgraphError) else f"{what} {failure.what}") from cause


def _not_finite(columns: Columns, written: Columns) -> str:
    """Name a written column of rlgraph's own with NaN or infinity at a trained token, or for a response."""
    mask = columns.get("loss_mask", columns.get("response_mask"))
    for name, column in written.items():
        if name in COLUMNS and isinstance(column, torch.Tensor) and column.is_floating_point():
            used = mask if isinstance(mask, torch.Tensor) and mask.shape == column.shape else torch.ones_like(column, dtype=torch.bool)
            if not column[used].isfinite().all():
                return name
    return ""


def made_up(writes: Sequence[str], rows: int) -> dict[str, Column]:
    """Make up the written columns of a node that rlgraph defines, with `rows` rows each."""
    return {name: _column(name, rows) for name in writes if name in COLUMNS}


def copy_callable(function: Given) -> Given:
    """Copy a user's object, so that a trial does not change its state; a function is returned unchanged."""
    try:
        return copy.deepcopy(function)
    except Exception:  # noqa: BLE001 (a copy of its state may raise anything)
        return function


def _read(node: "Node", made: "dict[Node, Columns]") -> Columns | None:
    """Collect the columns that a node reads, repeated to the widest input; None if one of them is unknown."""
    found: dict[str, Column] = {}
    for name in node.reads:
        output = node.carrier(name)
        column = made[output.node].get(name.removeprefix(output.prefix))
        if column is None:
            return None
        found[name] = column.clone() if isinstance(column, torch.Tensor) else column
    most = max((len(column) for column in found.values()), default=0)
    if any(most % len(column) for column in found.values()):
        return None
    return {name: repeat_rows(column, most // len(column)) for name, column in found.items()}


def _column(name: str, rows: int) -> Column:
    spec = COLUMNS[name]
    if not isinstance(spec.dtype, torch.dtype):
        return [PROMPT if "N" in spec.dims else RESPONSES[row % 2] for row in range(rows)]
    shape = (rows, *(SIZES[dim] for dim in spec.dims[1:]))
    if name == "group_ids":
        return torch.arange(rows) // max(rows // PROMPTS, 1)
    if name == "prompt_ids":
        return torch.arange(rows)
    if name == "response_mask":  # every second response is one token shorter
        return torch.arange(shape[1]) < torch.tensor([[shape[1] - row % 2] for row in range(rows)])
    if spec.dtype != torch.float32 or name == "step_labels":
        value = {"prompts": PROMPT_TOKEN, "responses": RESPONSE_TOKEN}.get(name, 0)
        return torch.full(shape, spec.dtype == torch.bool or value, dtype=spec.dtype)
    if name == "preferences":  # each row followed by a worse one
        return 1.0 - 2.0 * torch.arange(rows).remainder(2)
    if spec.dims == ("B",):
        return torch.arange(rows).remainder(2).float()
    return _make_up_numbers(name, shape, list(COLUMNS).index(name))


def _make_up_numbers(name: str, shape: Sequence[int], begin: int) -> torch.Tensor:
    """Make up numbers whose neighbours differ, since equal numbers have no deviation."""
    varied = (torch.arange(prod(shape)) + begin).remainder(7).reshape(tuple(shape)) / 8 + 0.125
    return varied.log() if name.endswith("log_probs") else varied


@contextlib.contextmanager
def _preserve_random_states() -> Iterator[None]:
    """Restore the random generators of this process, so that a trial does not change a run in it."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(arrays)


# Losses: called as a trainer calls them, with made-up log-probs, or values, that require a gradient.

LIKE_DATA = ("preferences", "margins", "step_labels")  # columns of numbers with a special meaning


class _LossColumns(dict[str, Column]):
    """The columns of a loss, and the missing columns that it asked for."""

    absent: str = ""

    def __missing__(self, name: str) -> Column:
        self.absent = name
        raise KeyError(name)


def try_loss(node: str, loss: Any, batch: Columns, scores: Literal["log_probs", "values"]) -> None:
    """Call a user's loss on a made-up batch, and compute its gradient.

    A notice reports if the loss of the batch is not the sum of the losses of its halves. Raises RlgraphError as a run would.
    """
    mask = batch["response_mask"]
    assert isinstance(mask, torch.Tensor)
    if not mask.any() or chosen_at(loss) is not None:
        return  # a run has no step there; and only the trainer makes log-probs of chosen tokens
    what = f"its loss '{type(loss).__name__}'"
    if not hasattr(loss, "needs_entropy"):
        raise GraphError(f"{what} has no `needs_entropy`: set it to False, or to True for a loss that uses the entropy")
    tried = _TriedLoss(node, what, copy_callable(loss), mask, scores)
    value, finite = tried.take(batch)
    if not finite:  # made-up advantages may all be 0, unlike in most batches
        value, finite = tried.take({name: _vary_column(name, column) for name, column in batch.items()})
    if not finite:
        raise GraphError(
            f"{what} is {value:g}, or its gradient is not finite; check for a division by 0, the log of 0, or padding: leave out the "
            "tokens where batch['response_mask'] is false before the sum"
        )
    halves = [slice(0, len(mask) // 2), slice(len(mask) // 2, None)]
    if isinstance(loss, WholeLoss) or not all(bool(mask[rows].any()) for rows in halves):
        return
    whole, parts = tried.take(batch)[0], [tried.take(batch, rows)[0] for rows in halves]
    if abs(sum(parts) - whole) > 1e-3 * (abs(whole) + sum(map(abs, parts))):
        notices.here.say(
            f"node '{node}': {what} is {whole:.4g} for a made-up batch, and {sum(parts):.4g} for its two halves together: the results of "
            "micro-batches must add up, else they depend on micro_batch_tokens; divide sums by totals.tokens or totals.rows"
        )


class _TriedLoss:
    """A loss of the user, and how a trainer calls it."""

    def __init__(self, node: str, what: str, loss: Any, mask: torch.Tensor, scores: Literal["log_probs", "values"]) -> None:
        self.node, self.what, self.loss, self.mask, self.scores = node, what, loss, mask, scores

    def take(self, batch: Columns, rows: slice = slice(None)) -> tuple[float, bool]:
        """Call the loss with some rows, and return whether it and its gradient are finite. Raises RlgraphError as a run would."""
        columns = _LossColumns({name: column[rows] for name, column in batch.items()})
        try:
            found: tuple[float, bool] = _call_in_time(self.what, lambda: self._call(columns, rows))
        except GraphError as error:
            if isinstance(error.__cause__, KeyError) and columns.absent in error.__cause__.args:
                raise GraphError(
                    f"{self.what} reads column {show_value(columns.absent)}, but its node reads {list(batch)}: add it to the loss's `reads`"
                ) from None
            raise
        return found

    def _call(self, columns: _LossColumns, rows: slice) -> tuple[float, bool]:
        scores, entropy = (torch.where(self.mask, _make_up_numbers(n, self.mask.shape, 3), 0.0)[rows] for n in (self.scores, "entropy"))
        scores.requires_grad_()
        totals = [] if isinstance(self.loss, WholeLoss) else [Totals.of(self.mask)]
        more = [entropy if self.loss.needs_entropy else None] if totals and self.scores == "log_probs" else []
        found = self.loss(scores, columns, *totals, *more)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise GraphError(f"{self.what} returned {show_value(found)}; it returns its value and its metrics: return loss, {{}}")
        value, metrics = found
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise GraphError(
                f"{self.what} returned {show_value(value)} as its value; it must be a tensor of one number: sum the losses of tokens"
            )
        if not value.requires_grad:
            given = "log-probs" if self.scores == "log_probs" else "values"
            raise GraphError(f"{self.what} has no gradient; compute it from the {given} that it is given, without detach() or item()")
        checked_metrics(self.node, metrics)
        value.sum().backward()
        finite = value.isfinite().all() & (scores.grad is None or scores.grad.isfinite().all())
        return value.item(), bool(finite)


def _vary_column(name: str, column: Column) -> Column:
    """Vary the numbers of a column of rlgraph's own."""
    if name not in COLUMNS or name in LIKE_DATA or not isinstance(column, torch.Tensor) or not column.is_floating_point():
        return column
    return _make_up_numbers(name, column.shape, list(COLUMNS).index(name))
