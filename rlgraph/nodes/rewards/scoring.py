"""Scores of responses: call a user's function once for a batch or once for each response, and check its numbers."""

import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlgraph.columns import Column, Columns
from rlgraph.errors import DataError, GraphError, RlgraphError, function_name, show_value
from rlgraph.graph.nodes import Output
from rlgraph.nodes.base import Context
from rlgraph.nodes.prompts import plural
from rlgraph.nodes.rewards.calls import ONCE, CallFailed, Calls, FunctionPool, Retry, Scorer
from rlgraph.nodes.trial import LIMIT_S, MadeUpTokenizer, TooLong, copy_callable

# Scores with more than a number: the response's answer, and whether that answer is right.

PRED_CHARACTERS = 1000  # characters of an answer; a longer one is cut, since votes compare full texts


class Score(float):
    """A score with the answer `pred` that was found in the response, for `maj@k`, and how right it is, `acc`.

    It is a number: arithmetic with it returns plain numbers. `pred` is None if the scorer does not return answers, and "" if the response
    has none. `acc` is None if it equals the score.

    >>> score = Score(-1.0, pred="41", acc=0.0)
    >>> score + 2, score.pred, score.acc
    (1.0, '41', 0.0)

    Raises DataError for a value that is not a number.
    """

    pred: str | None
    acc: float | None

    def __new__(cls, value: float, pred: object = None, acc: float | None = None) -> "Score":
        try:
            made = super().__new__(cls, value)
            made.acc = None if acc is None else float(acc)
        except (TypeError, ValueError):
            raise DataError(f"Score({show_value(value)}, acc={show_value(acc)}): a score and its acc are numbers") from None
        made.pred = None if pred is None else str(pred)[:PRED_CHARACTERS]
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (Score, (float(self), self.pred, self.acc))


def score_of(value: object) -> object:
    """Convert a mapping as verl's scorers return, {"score": 1.0, "acc": True, "pred": "42"}, to a `Score`; pass other values through.

    Raises DataError for a mapping without a number under "score".
    """
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise DataError(
            f"a mapping has its number under 'score', e.g. {{'score': 1.0, 'pred': '42'}}; it has {show_value(sorted(map(str, value)))}"
        )
    return Score(value["score"], value.get("pred"), value.get("acc"))


TOKEN_COLUMNS = {"responses": "response_mask", "prompts": "prompt_mask"}
LARGEST = torch.finfo(torch.float32).max
# So that reward functions written for verl and TRL run unchanged: their parameters' names, and the names here.
ALIASES = {
    "solution_str": "response",
    "solution_strs": "responses",
    "completion": "response",
    "completions": "responses",
    "ground_truth": "answer",
    "ground_truths": "answers",
}
EXCERPT = 60  # characters of a prompt in an error
FAILURE = 300  # characters of a failure in a warning
log = logging.getLogger("rlgraph.rewards")


@dataclass(frozen=True)
class Graded:
    """The scores of responses, how many calls were repeated, and how many responses got the default."""

    scores: list[Score]
    retries: int
    defaults: int

    @property
    def tensor(self) -> torch.Tensor:
        """The scores, [B] float32."""
        return torch.tensor(self.scores, dtype=torch.float32)

    def metrics(self, retry: Retry | None) -> dict[str, float]:
        """Compute the mean number of repeated calls per response, and the share that got the default; empty without retries."""
        rows = max(len(self.scores), 1)
        return {} if retry is None else {"retries": self.retries / rows, "defaults": self.defaults / rows}


@dataclass(frozen=True, eq=False)
class Scoring:
    """A function of responses, with the column that each of its parameters gets.

    A `single` function is called for each response, `concurrency` calls at a time; any other function once for the batch. The columns
    `named_by` are read only for errors, which name the response and its prompt.
    """

    function: Callable[..., Any]
    columns: tuple[tuple[str, str], ...]  # of each parameter
    single: bool
    tokenizer: str | None  # model folder; None: no token ids to decode
    decoded: tuple[str, ...]
    named_by: tuple[str, ...]
    concurrency: int
    deadline_s: float
    retry: Retry | None = None
    trial: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        masks = (TOKEN_COLUMNS[column] for column in self.decoded)
        return tuple(dict.fromkeys((*(column for _, column in self.columns), *masks, *self.named_by)))

    def check(self) -> None:
        """Check what the scorer needs, before anything starts. Raises RlgraphError."""
        if isinstance(self.function, Scorer):
            self.function.check()

    def start(self, context: Context) -> None:
        """Load the tokenizer, so that the first step does not."""
        if self.tokenizer is not None and self.decoded:
            context.tokenizer(self.tokenizer)

    def grade(self, context: Context, columns: Columns) -> Graded:
        """Score the responses: a finite number each, with the answer and its `acc` if the function returns them.

        Raises RlgraphError naming the response for which the function raises, misses the deadline, or returns no finite number.
        """
        rows = len(columns[self.columns[0][1]])
        given = {parameter: self._argument(context, column, columns) for parameter, column in self.columns}
        calls = [{p: _at(values, row) for p, values in given.items()} for row in range(rows)] if self.single else [given]
        retry = self.retry or ONCE
        pool = FunctionPool(self.function, calls, self.concurrency, self.deadline_s, retry, lambda value: self._usable(value, rows))
        try:
            returned = pool.run()
        except CallFailed as failure:
            if self.trial and failure.late and self.deadline_s == LIMIT_S:
                raise TooLong(f"{title(self.function)} {failure.what}") from None
            which = self._sample(context, columns, failure.place) if self.single else self._of_batch(context, columns, given, failure)
            raise RlgraphError(f"{title(self.function)} {failure.what}, {which}") from failure.__cause__
        for place in pool.defaults:
            returned[place] = retry.default if self.single else [retry.default] * rows
        rewards = returned if self.single else returned[0]
        scores = checked_rewards(self.function, rewards, rows, lambda row: self._sample(context, columns, row))
        defaults = len(pool.defaults) if self.single else rows * len(pool.defaults)
        if defaults:
            words = title(self.function), defaults, rows, retry.default, pool.failure[:FAILURE]
            log.warning("%s: %d of %d responses got the default %s; the last failure: %s", *words)
        return Graded(scores, pool.retries, defaults)

    def try_on(self, columns: Columns) -> torch.Tensor | None:
        """Score made-up columns at the launch; None if the function is not to be tried. Raises as `grade` does."""
        if not self.trial:
            return None
        tokenizers = {} if self.tokenizer is None else {self.tokenizer: MadeUpTokenizer()}
        return replace(self, function=copy_callable(self.function), deadline_s=LIMIT_S).grade(Context(cache=tokenizers), columns).tensor

    def _usable(self, value: object, rows: int) -> bool:
        try:
            checked_rewards(self.function, [value] if self.single else value, 1 if self.single else rows)
        except RlgraphError:
            return False
        return True

    def _argument(self, context: Context, name: str, columns: Columns) -> Column:
        return texts_of(context, self.tokenizer, name, columns) if name in self.decoded and self.tokenizer else columns[name]

    def _sample(self, context: Context, columns: Columns, row: int) -> str:
        return f"for response {row}{_place(context, self.tokenizer, columns, row)}"

    def _of_batch(self, context: Context, columns: Columns, given: dict[str, Column], failure: CallFailed) -> str:
        """Name the response for which a batch function fails: by itself it raises the same kind of error, while another one passes."""
        rows, failing, taken = len(columns[self.columns[0][1]]), [], 0
        for row in range(rows):
            alone = {p: values[row : row + 1] for p, values in given.items()}
            try:
                FunctionPool(self.function, [alone], 1, self.deadline_s / rows).run()
                taken += 1
            except CallFailed as again:
                failing += [row] if type(again.__cause__) is type(failure.__cause__) else []
            if taken and failing:
                return self._sample(context, columns, failing[0])
        return f"for the batch of {rows} responses, {'and for each of them alone' if failing else 'though for none of them alone'}"


def match_parameters(
    where: str,
    function: Callable[..., Any],
    carried: Sequence[str],
    tokenizer: str | None,
    calls: Calls,
    texts: Sequence[str] = (),
) -> Scoring:
    """Match the parameters of `function` with the columns `carried` by the inputs. Columns in `texts` are already text.

    Raises GraphError for anything but a function, and for parameters that name no columns.
    """
    if not callable(function):
        raise GraphError(f"{where} was given {show_value(function)}; a reward is a function that returns one number per response")
    parameters = column_parameters(where, function, carried)
    if not parameters:
        raise GraphError(
            f"{where}: the parameters of {_name(function)}{inspect.signature(function)} name the columns it reads, "
            "as in (responses, answers)"
        )
    known = {p: ALIASES.get(p, p) if p not in carried and plural(p) not in carried else p for p in parameters}
    single = any(n not in carried and (plural(n) in carried or plural(n) in TOKEN_COLUMNS) for n in known.values())
    columns = tuple((p, plural(n) if single and n not in carried else n) for p, n in known.items())
    as_tokens = {p.name for p in parameters.values() if p.annotation in (torch.Tensor, "torch.Tensor")}
    tokens = [column for p, column in columns if column in TOKEN_COLUMNS and column not in texts and p not in as_tokens]
    decoded = tuple(tokens) if tokenizer else ()
    return Scoring(
        function, columns, single, tokenizer, decoded, _named_by(carried, tokenizer), *calls.of(where, function), calls.tries(function)
    )


def column_parameters(where: str, function: Callable[..., Any], carried: Sequence[str]) -> dict[str, inspect.Parameter]:
    """Choose the parameters that get a column: not parameters that `functools.partial` fills, nor a parameter with a default and without a
    column.

    Raises GraphError for parameters that name no columns.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise GraphError(f"{where}: {_name(function)} has no readable signature; pass a Python function that calls it") from None
    filled = function.keywords if isinstance(function, functools.partial) else {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        named = [ALIASES.get(p.name, p.name) for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
        raise GraphError(
            f"{where}: {_name(function)}{inspect.signature(function)} accepts any columns; name the columns that it reads instead of **, "
            f"e.g. ({', '.join([*named, 'answers'])}): there are {list(carried)}"
        )
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters.values()):
        raise GraphError(
            f"{where}: the parameters of {_name(function)}{inspect.signature(function)} name the columns it reads, "
            "as in (responses, answers)"
        )
    there = {*carried, *TOKEN_COLUMNS}
    return {
        name: p for name, p in parameters.items() if name not in filled and (p.default is p.empty or name in there or plural(name) in there)
    }


def _named_by(carried: Sequence[str], tokenizer: str | None) -> tuple[str, ...]:
    once = {column for column, count in Counter(carried).items() if count == 1}
    prompt = ("prompt_texts",) if "prompt_texts" in once else ("prompts", "prompt_mask") if tokenizer else ()
    return tuple(column for column in ("group_ids", *prompt) if column in once)


def tokenizer_of(inputs: Iterable[Any]) -> str | None:
    """Find the folder of the model that wrote the token ids among the inputs; None if there are none."""
    for output in inputs:
        model = output.node.model if isinstance(output, Output) else None
        if model is not None and set(TOKEN_COLUMNS) & set(output.columns):
            return model.path
    return None


def texts_of(context: Context, tokenizer: str, name: str, columns: Columns) -> list[str]:
    """Decode the token ids of a column to texts, [B], without padding, special tokens and the answers of tools."""
    ids, mask = columns[name], columns[TOKEN_COLUMNS[name]]
    assert isinstance(ids, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    tokens = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    texts: list[str] = context.tokenizer(tokenizer).batch_decode(tokens, skip_special_tokens=True)
    return texts


def _at(values: Column, row: int) -> Any:
    value = values[row]
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value


def _place(context: Context, tokenizer: str | None, columns: Columns, row: int) -> str:
    """Name the prompt of a response: its place in the data order and the end of its text, as far as the columns hold them."""
    known = []
    if "group_ids" in columns:
        known.append(f"prompt {int(columns['group_ids'][row])} of the data order")
    if "prompt_texts" in columns:
        known.append(excerpt(str(columns["prompt_texts"][row])))
    elif tokenizer and "prompts" in columns and "prompt_mask" in columns:
        alone = {name: columns[name][row : row + 1] for name in ("prompts", "prompt_mask")}
        known.append(excerpt(texts_of(context, tokenizer, "prompts", alone)[0]))
    return f" ({': '.join(known)})" if known else ""


def excerpt(text: str) -> str:
    """Quote the end of a text: prompts often begin equally and differ at the end."""
    return repr(text if len(text) <= EXCERPT else f"…{text[-EXCERPT:]}")


def checked_rewards(
    function: Callable[..., object], rewards: object, rows: int, sample: Callable[[int], str] = lambda row: f"for response {row}"
) -> list[Score]:
    """Convert rewards to scores. Raises RlgraphError naming the first row whose reward is not finite in float32."""
    where = title(function)
    if isinstance(rewards, str | Mapping) or not isinstance(rewards, Iterable):
        raise RlgraphError(f"{where} returned {type(rewards).__name__}; it returns one number per response, as a list or tensor")
    given = list(rewards)
    if len(given) != rows:
        raise RlgraphError(f"{where} returned {len(given)} rewards for {rows} responses; it returns one per response, in order")
    return [_check_score(where, reward, functools.partial(sample, row)) for row, reward in enumerate(given)]


def _check_score(where: str, reward: object, sample: Callable[[], str]) -> Score:
    if isinstance(reward, str | bytes):
        raise RlgraphError(f"{where} returned {show_value(reward)} {sample()}; it must return one number per response, not text")
    try:
        graded = score_of(reward)
        value = float(graded)  # type: ignore[arg-type] # Python raises for anything but a number
    except DataError as error:
        raise RlgraphError(f"{where} returned {show_value(reward)} {sample()}: {error}") from None
    except (TypeError, ValueError) as error:
        raise RlgraphError(f"{where} returned {show_value(reward)} {sample()}; it returns one number per response") from error
    score = graded if isinstance(graded, Score) else Score(value)
    for number in (value, *([] if score.acc is None else [score.acc])):
        if not math.isfinite(number):
            raise RlgraphError(f"{where} returned {number} {sample()}; a reward is a finite number")
        if abs(number) > LARGEST:
            raise RlgraphError(
                f"{where} returned {number:g} {sample()}; a reward must fit in float32 (at most {LARGEST:.3g} in size); scale it down"
            )
    return score


def title(function: Callable[..., object]) -> str:
    """Name a reward function, for errors."""
    return f"reward function {_name(function)}"


def _name(function: Callable[..., object]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return function_name(inner)
