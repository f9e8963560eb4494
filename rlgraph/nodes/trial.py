"""Trial of users' functions: each is called once on a made-up batch at the launch, before anything starts."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlgraph import notices
from rlgraph.columns import COLUMNS, Column, Columns, repeat_rows
from rlgraph.errors import RlgraphError

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Graph, Node

PROMPTS = 2  # of a made-up batch, each with its group of responses
LIMIT_S = 5.0  # of a function's trial
MISTAKES = (NameError, AttributeError, TypeError, ImportError)  # what a function raises whatever it is given
SIZES = {"P": 3, "T": 5, "L": 1, "E": 1, "K": 2}  # of the dimensions of made-up columns
PROMPT_TOKEN, RESPONSE_TOKEN = 1, 2
PROMPT = "What is 2 + 2?"
RESPONSES = ("2 + 2 = 4, so the answer is 4.", "I do not know.")


class TooLong(RlgraphError):
    """A call had not returned at its deadline."""


class MadeUpTokenizer:
    """Decodes the token ids of a made-up batch."""

    def batch_decode(self, rows: Sequence[Sequence[int]], **settings: Any) -> list[str]:
        return [PROMPT if PROMPT_TOKEN in row else RESPONSES[place % 2] for place, row in enumerate(rows)]


def try_functions(graph: "Graph") -> None:
    """Call each function of the user on a made-up batch of 2 prompts. Raises RlgraphError naming the node whose function goes wrong.

    A notice tells of one that has not returned within 5 seconds, or that raised what may come of made-up texts. `trial=False` leaves a
    function out, and so do its `retries`.
    """
    made: dict[Node, Columns] = {}
    with _preserve_random_states():
        for node in graph.nodes:
            heights = [len(next(iter(made[output.node].values()), ())) for output in node.inputs if made[output.node]]
            widest = max((output.node.rows for output in node.inputs), default=node.rows)
            rows = max(heights, default=PROMPTS) * max(node.rows // widest, 1)
            columns = _read(node, made)
            tried = None if columns is None else _call_once(node, columns, rows)
            made[node] = made_up(node.writes, rows) if tried is None else tried


def _call_once(node: "Node", columns: Columns, rows: int) -> Columns | None:
    """Call the node's function; None where there is none, or where a notice tells why its result is not known."""
    try:
        found: Columns | None = node.operation.trial(node, columns, rows)
        return found
    except TooLong as late:
        notices.here.say(f"node '{node.name}': {late}, so it is not tried before the launch; trial=False does not wait for it")
    except RlgraphError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, (RlgraphError, *MISTAKES)):
            where = "" if str(error).startswith(f"node '{node.name}'") else f"node '{node.name}': "
            raise type(error)(f"{where}{error} (found on a made-up batch; trial=False leaves that out)") from cause
        said = str(cause).partition("\n")[0]
        notices.here.say(
            f"node '{node.name}': its function raised {type(cause).__name__}: {said:.100} on a made-up batch; "
            "if it does on a real one, the run ends at its first step; trial=False leaves the trial out"
        )
    return None


def made_up(writes: Sequence[str], rows: int) -> dict[str, Column]:
    """Make up the columns that rlgraph defines among those that a node writes, `rows` rows of each."""
    return {name: _column(name, rows) for name in writes if name in COLUMNS}


def copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy an object that is called, so that a trial does not change its state; a function is itself."""
    try:
        return copy.deepcopy(function)
    except Exception:  # noqa: BLE001 (whatever its state says to a copy)
        return function


def _read(node: "Node", made: "dict[Node, Columns]") -> Columns | None:
    """Collect the columns that a node reads, repeated to the widest input; None if one of them is not known."""
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
    value = {"prompts": PROMPT_TOKEN, "responses": RESPONSE_TOKEN}.get(name, -1 if name.endswith("log_probs") else 0)
    column = torch.full(shape, spec.dtype == torch.bool or value, dtype=spec.dtype)
    return column + torch.arange(rows).remainder(2).to(spec.dtype) if spec.dims == ("B",) and spec.dtype == torch.float32 else column


@contextlib.contextmanager
def _preserve_random_states() -> Iterator[None]:
    """Leave the random numbers of this process as they are, so that a trial does not change a run in it."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(arrays)
