"""Mixtures: several data sets drawn in proportion to their weights, which may change from step to step, also by results."""

import bisect
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from rlgraph.data.rows import LIST, Dataset, Overlong, Row, Rows, place_of, rows
from rlgraph.errors import DataError, show_value
from rlgraph.settings import checked, refuse_unknown

# Results of a run so far, by which a curriculum chooses: mean rewards of each data set of a mixture, and of each of its rows.


class Results:
    """The results of the steps whose rewards are known, for a curriculum: exact means, the same in a run that was killed and resumed.

    >>> results = Results({"easy": 1, "hard": 2})
    >>> results.learn(["easy", "hard", "hard"], [0, 1, 0], [1.0, 0.0, 0.5])
    >>> results.steps, results.mean("easy"), results.mean("hard"), results.row("hard", 1)
    (1, 1.0, 0.25, 0.0)

    `learn` adds a step: the data set, the row and the mean reward of each of its prompts. `rg.prompts(results=…)` calls it.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._names = list(sizes)
        self._sums: list[list[float]] = []  # of each step, by data set
        self._counts: list[list[int]] = []
        self._row_sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
        self._row_counts = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}

    @property
    def steps(self) -> int:
        """The number of steps whose rewards are known."""
        return len(self._sums)

    def mean(self, source: str, last: int | None = None) -> float | None:
        """Compute the mean reward of a data set's prompts, of all steps or of the `last` ones; None where it had no prompt.

        Raises DataError for a data set that the mixture lacks.
        """
        at = self._index(source)
        steps = slice(None) if last is None else slice(max(len(self._sums) - last, 0), None)
        count = sum(counts[at] for counts in self._counts[steps])
        return sum(sums[at] for sums in self._sums[steps]) / count if count else None

    def row(self, source: str, row: int) -> float | None:
        """Compute the mean reward of a row of a data set over the times it was drawn; None if it was not. Raises DataError as `mean`."""
        self._index(source)
        count = int(self._row_counts[source][row])
        return float(self._row_sums[source][row]) / count if count else None

    def learn(self, sources: Sequence[str], rows: Sequence[int], rewards: Sequence[float]) -> None:
        """Add a step: data set, row and mean reward of each prompt."""
        sums, counts = [0.0] * len(self._names), [0] * len(self._names)
        for source, row, reward in zip(sources, rows, rewards, strict=True):
            sums[self._names.index(source)] += reward
            counts[self._names.index(source)] += 1
            self._row_sums[source][row] += reward
            self._row_counts[source][row] += 1
        self._sums.append(sums)
        self._counts.append(counts)

    def _index(self, source: str) -> int:
        if source not in self._names:
            raise DataError(f"results of data set {show_value(source)}: the mixture has {self._names}")
        return self._names.index(source)

    def state(self) -> dict[str, Any]:
        """Collect the results for a checkpoint."""
        by_step = {"sums": torch.tensor(self._sums, dtype=torch.float64), "counts": torch.tensor(self._counts, dtype=torch.int64)}
        return {**by_step, "row_sums": dict(self._row_sums), "row_counts": dict(self._row_counts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._sums, self._counts = state["sums"].tolist(), state["counts"].tolist()
        self._row_sums, self._row_counts = dict(state["row_sums"]), dict(state["row_counts"])


# Mixtures: several data sets drawn in proportion to their weights, which may change from step to step.

Curriculum: TypeAlias = Callable[..., Mapping[str, float]]  # of the seed and the step, or of these and the results so far


@refuse_unknown
@dataclass(frozen=True, eq=False)
class Mix:
    """Data sets by name, with the weights by which prompts are drawn from them. `rg.data.mix` makes it.

    >>> import rlgraph as rg
    >>> mixed = rg.data.mix({"easy": [{"prompt": "1 + 1 ="}], "hard": [{"prompt": "17 * 23 ="}]}, weights={"easy": 3, "hard": 1})
    >>> mixed.at(seed=0, step=5)
    [0.75, 0.25]

    Its rows are those of all data sets, one after another.

    * `sources`: the data sets by name.
    * `overlong`: what becomes of prompts that are too long; `rg.data.mix` says more.
    """

    sources: Mapping[str, Dataset]
    weights: Mapping[str, float] | Curriculum
    overlong: Overlong = field(default_factory=Overlong)

    @property
    def ends(self) -> list[int]:
        """The row at which each data set ends."""
        return list(itertools.accumulate(len(rows) for rows in self.sources.values()))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Row:
        ends = self.ends
        number = bisect.bisect_right(ends, index)
        name, rows = list(self.sources.items())[number]
        try:
            return rows[index - (ends[number - 1] if number else 0)]
        except DataError as error:
            raise DataError(f"data set '{name}' of the mixture: {error}") from None

    def place(self, index: int) -> str:
        """Name a row as its own data set does, for errors."""
        number = bisect.bisect_right(self.ends, index)
        name, rows = list(self.sources.items())[number]
        found = place_of(rows, index - (self.ends[number - 1] if number else 0))
        return found.replace(LIST, f"data set '{name}' of the mixture")

    @property
    def by_results(self) -> bool:
        """Whether the weights depend on the results so far: a curriculum of three arguments."""
        return callable(self.weights) and _takes_results(self.weights)

    def at(self, seed: int, step: int, results: Results | None = None) -> list[float]:
        """Compute the share of each data set at a step, by these results where the curriculum reads them.

        Raises DataError for weights that are none.
        """
        given = self._weights(seed, step, results)
        where = f"the weights of the mixture at step {step}"
        if not isinstance(given, Mapping) or set(given) != set(self.sources):
            raise DataError(f"{where} are {show_value(given)}; they give a number to each of {list(self.sources)}")
        wrong = [name for name, weight in given.items() if not _is_weight(weight)]
        if wrong or not sum(given.values()):
            raise DataError(f"{where} are {show_value(dict(given))}; each is a finite number of at least 0, and one is above 0")
        total = sum(given.values())
        return [given[name] / total for name in self.sources]

    def _weights(self, seed: int, step: int, results: Results | None) -> Any:
        if not callable(self.weights):
            return self.weights
        if not self.by_results:
            return self.weights(seed, step)
        return self.weights(seed, step, results or Results({name: len(rows) for name, rows in self.sources.items()}))


def _takes_results(weights: Callable[..., Any]) -> bool:
    """Whether a curriculum has a third argument. Raises DataError where its arguments are neither two nor three."""
    try:
        wanted = inspect.signature(weights)
    except ValueError:  # a function of C
        return False
    for count in (2, 3):
        try:
            wanted.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise DataError(f"mix(weights={show_value(weights)}): a curriculum is a function of (seed, step), or of (seed, step, results)")


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


@checked(DataError)
def mix(sources: Mapping[str, Any], weights: Mapping[str, float] | Curriculum) -> Mix:
    """Mix data sets: each prompt is drawn from one of them by its weight, and each data set in a seeded order of its own.

    >>> import rlgraph as rg
    >>> easy, hard = [{"prompt": "1 + 1 ="}], [{"prompt": "17 * 23 ="}, {"prompt": "19 * 29 ="}]
    >>> len(rg.data.mix({"easy": easy, "hard": hard}, weights={"easy": 3, "hard": 1}))
    3
    >>> def harder(seed, step):
    ...     return {"easy": 1.0, "hard": min(step / 100, 4.0)}
    >>> rg.prompts(rg.data.mix({"easy": easy, "hard": hard}, weights=harder), count=8)
    the batch of 'prompts'

    A function of `(seed, step)` is a curriculum. It gives the same weights for the same step whenever it is called, so that a job that
    resumes draws what it would have drawn. One of `(seed, step, results)` also sees the rewards so far: `results.mean("hard")` of a
    data set, `results.row("hard", 7)` of a row, None before there are any; `rg.prompts(results=…)` brings them back.

    The metrics `data/mix/NAME` count the prompts of a step. All data sets have the same fields, and prompts that are too long are
    treated alike: the same `overlong` and `max_prompt_tokens`.

    Raises DataError for weights that are not one for each data set, and for data sets that treat long prompts differently.
    """
    if not sources:
        raise DataError("mix({}): a mixture has at least one data set")
    found = {name: source if isinstance(source, Rows) else rows(source) for name, source in sources.items()}
    first, *others = found.items()
    for name, other in others:
        if other.overlong != first[1].overlong:
            raise DataError(
                f"mix: the data sets '{first[0]}' and '{name}' treat long prompts differently, by {first[1].overlong} and "
                f"{other.overlong}; give both the same overlong and max_prompt_tokens"
            )
    made = Mix(found, weights, first[1].overlong)
    shares = made.at(0, 0)
    if not callable(weights) and 0 in shares:
        raise DataError(f"mix(weights={show_value(dict(weights))}): a data set of weight 0 is never drawn; leave it out")
    return replace(made, weights=weights if callable(weights) else dict(weights))
