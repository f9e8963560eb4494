"""Prompts of a mixture whose shares depend on the results so far, which come back over an edge of columns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlgraph.columns import Columns
from rlgraph.data.mixtures import Mix, Results
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Feedback
from rlgraph.nodes.base import Fired, tensor_of
from rlgraph.nodes.data_order import Mixed, drawn_parts

if TYPE_CHECKING:
    from rlgraph.nodes.prompts import Prompts

REWARDS = "rewards"


def check_results(name: str, data: Any, results: Feedback | None) -> None:
    """Refuse results without a curriculum that reads them, and the reverse."""
    reads = isinstance(data, Mix) and data.by_results
    if reads and results is None:
        raise DataError(
            f"{name}: the curriculum of the mixture reads results, which have to come back: give results=rg.feedback('results', depth=1, "
            "columns='rewards'), and close it with the rewards"
        )
    if results is not None and not reads:
        raise DataError(f"{name}: results='{results.name}' has no effect without a mixture whose weights are a function of three arguments")
    if results is not None and results.columns != (REWARDS,):
        raise DataError(f"{name}: results='{results.name}' carries {list(results.columns) or 'weights'}; give it columns='rewards'")


class PromptsByResults:
    """Draws the prompts of each step by the rewards of those up to `depth` + 1 steps before. Its state is part of each checkpoint.

    Step k knows the results of the steps before max(0, k - depth), whatever the clock says, so that a run depends on its seed and depth
    alone. Each data set is drawn in its own seeded order, as in other mixtures.
    """

    def __init__(self, source: "Prompts") -> None:
        assert isinstance(source.data, Mix)
        assert isinstance(source.order, Mixed)
        self.source, self.data, self.order = source, source.data, source.order
        self.names = list(self.data.sources)
        self.results = Results({name: len(rows) for name, rows in self.data.sources.items()})
        self.drawn = [0] * len(self.names)  # rows of each data set, before the next step
        self.waiting: list[tuple[list[int], list[int]]] = []  # parts and rows of the steps whose rewards are not known

    def __call__(self, step: int, columns: Columns) -> Fired:
        if REWARDS in columns:
            self._learn(tensor_of(columns, REWARDS))
        shares = self.data.at(self.source.seed, step, self.results)
        parts = list(drawn_parts(self.source.seed, step, self.source.count, shares))
        rows = []
        for part in parts:
            rows.append(self.order.row_of(part, self.drawn[part]))
            self.drawn[part] += 1
        self.waiting.append((parts, rows))
        first = step * self.source.count
        ids = torch.arange(first, first + self.source.count)
        counts = {f"data/mix/{name}": float(parts.count(number)) for number, name in enumerate(self.names)}
        written = {"prompt_ids": ids, **self.source.columns([self.source.checked_row(row) for row in rows])}
        return written, self.source.metrics | counts

    def _learn(self, rewards: torch.Tensor) -> None:
        """Take the rewards of the oldest step that is not known: those of the responses to each prompt, one prompt after another."""
        parts, rows = self.waiting.pop(0)
        if len(rewards) % len(parts):
            raise DataError(
                f"results: {len(rewards)} rewards came back of {len(parts)} prompts; close the edge with rewards of the rollout's responses"
            )
        means = rewards.double().view(len(parts), -1).mean(-1).tolist()
        begins = [0, *self.data.ends]
        own = [self.source.index(row) - begins[part] for part, row in zip(parts, rows, strict=True)]
        self.results.learn([self.names[part] for part in parts], own, means)

    def state(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn), "waiting": [list(each) for each in self.waiting], "results": self.results.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.drawn = list(state["drawn"])
        self.waiting = [(list(parts), list(rows)) for parts, rows in state["waiting"]]
        self.results.load_state(state["results"])
