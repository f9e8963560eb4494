"""Reward: a plain function from texts to one number a response."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlgraph.columns import COLUMNS, Column, Columns
from rlgraph.errors import GraphError, RlgraphError
from rlgraph.graph import Model, Output, Work, declare
from rlgraph.nodes.base import Context, Fired, Stage

TOKEN_COLUMNS = {"responses": "response_mask", "prompts": "prompt_mask"}


@dataclass(frozen=True, eq=False)
class Reward:
    """Decode what the function wants as text, call it, and check what it returns."""

    function: Callable[..., Sequence[float]]
    parameters: tuple[str, ...]
    tokenizer: str | None  # model folder, where token ids are to be decoded
    writes: str = "rewards"
    work: Work = "host"

    def start(self, context: Context) -> Stage:
        if self.tokenizer is not None:
            context.tokenizer(self.tokenizer)  # loaded before the first step, not in it
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Fired:
        arguments = {name: self._argument(context, name, columns) for name in self.parameters}
        rewards = self.function(**arguments)
        rows = len(columns[self.parameters[0]])
        checked = checked_rewards(self.function, rewards, rows)
        spread = {"mean": checked.mean(), "max": checked.max(), "min": checked.min()}
        return {self.writes: checked}, {f"critic/{self.writes}/{name}": value.item() for name, value in spread.items()}

    def _argument(self, context: Context, name: str, columns: Columns) -> Column:
        ids = columns[name]
        if name not in TOKEN_COLUMNS or self.tokenizer is None:
            return ids
        mask = columns[TOKEN_COLUMNS[name]]
        assert isinstance(ids, torch.Tensor)
        assert isinstance(mask, torch.Tensor)
        tokens = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        texts: list[str] = context.tokenizer(self.tokenizer).batch_decode(tokens, skip_special_tokens=True)
        return texts


def reward(function: Callable[..., Sequence[float]], *inputs: Output, writes: str = "rewards", name: str = "reward") -> Output:
    """Declare a reward: `function` gets a column for each of its parameters and returns one number a response.

    A parameter is named for the column it gets: `responses` and `prompts` come as decoded text (as token ids [B, T] if the
    parameter is annotated `torch.Tensor`), `answers` from the field `answer` of the data set, repeated for each response.
    `writes` names the column that the numbers go to: `baseline_rewards` for those of a greedy response, or a name of your own where
    an estimator reads several rewards, as `rg.algorithms.GDPO(keys=("right", "brief"))` does.

    Raises GraphError for a parameter whose column no input carries, a function without parameters, or a column of another kind.
    """
    if not callable(function):
        raise GraphError(f"node '{name}' was given {function!r}; a reward is a function that returns one number a response")
    _check_column(name, writes)
    signature = inspect.signature(function)
    parameters = tuple(signature.parameters)
    if not parameters or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in signature.parameters.values()):
        raise GraphError(
            f"node '{name}': the parameters of {_title(function)}{signature} name the columns it reads, as in (responses, answers)"
        )
    as_tokens = {p.name for p in signature.parameters.values() if p.annotation in (torch.Tensor, "torch.Tensor")}
    decoded = [p for p in parameters if p in TOKEN_COLUMNS and p not in as_tokens]
    reads = (*parameters, *(TOKEN_COLUMNS[p] for p in decoded if TOKEN_COLUMNS[p] not in parameters))
    operation = Reward(function, parameters, _tokenizer(inputs, decoded[0]) if decoded else None, writes)
    return Output(declare(name, operation, inputs, reads=reads, writes=(writes,)))


def _check_column(name: str, writes: object) -> None:
    if not isinstance(writes, str) or not writes:
        raise GraphError(f"node '{name}' has writes={writes!r}; name the column that the rewards go to, as writes='baseline_rewards'")
    spec = COLUMNS.get(writes)
    if spec is not None and (spec.dtype, spec.dims) != (torch.float32, ("B",)):
        raise GraphError(
            f"node '{name}' has writes='{writes}', which holds {spec.meaning}; a reward is one number a response: name another"
        )


def _tokenizer(inputs: Sequence[Output], column: str) -> str | None:
    for output in inputs:
        model = getattr(getattr(output, "node", None), "model", None)
        if isinstance(model, Model) and column in output.columns:
            return model.path
    return None


def checked_rewards(function: Callable[..., object], rewards: object, rows: int) -> torch.Tensor:
    """Return rewards [B] float32. Raises RlgraphError naming the first row whose reward is missing or no finite number."""
    where = f"reward function {_title(function)}"
    try:
        values = [float(r) for r in rewards]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise RlgraphError(f"{where} returned {type(rewards).__name__}; it returns one number a response, as a list or tensor") from error
    if len(values) != rows:
        raise RlgraphError(f"{where} returned {len(values)} rewards for {rows} responses; it returns one a response, in their order")
    for row, value in enumerate(values):
        if not math.isfinite(value):
            raise RlgraphError(f"{where} returned {value} for response {row}; a reward is a finite number")
    return torch.tensor(values, dtype=torch.float32)


def _title(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", repr(function))
