"""Results of a run so far, by which a curriculum chooses: mean rewards of each data set of a mixture, and of each of its rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlgraph.errors import DataError, shown


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
            raise DataError(f"results of data set {shown(source)}: the mixture has {self._names}")
        return self._names.index(source)

    def state(self) -> dict[str, Any]:
        """Collect the results for a checkpoint."""
        by_step = {"sums": torch.tensor(self._sums, dtype=torch.float64), "counts": torch.tensor(self._counts, dtype=torch.int64)}
        return {**by_step, "row_sums": dict(self._row_sums), "row_counts": dict(self._row_counts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._sums, self._counts = state["sums"].tolist(), state["counts"].tolist()
        self._row_sums, self._row_counts = dict(state["row_sums"]), dict(state["row_counts"])
