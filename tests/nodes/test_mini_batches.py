"""Several optimizer steps on a batch: which rows each takes and how often, and what metrics become."""

from typing import Any

import torch

from rlgraph.columns import Columns
from rlgraph.nodes.mini_batches import Walks

BATCH = {"responses": torch.arange(8)[:, None], "texts": [str(i) for i in range(8)]}


class Recorder:
    """An engine that notes the rows of each optimizer step."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def update(self, batch: Columns, loss: Any) -> dict[str, float]:
        responses = batch["responses"]
        assert isinstance(responses, torch.Tensor)
        assert list(batch["texts"]) == [str(i) for i in responses[:, 0].tolist()]
        self.rows.append(responses[:, 0].tolist())
        return {"step": float(len(self.rows))} | ({"first": 1.0} if len(self.rows) == 1 else {})


def rows_of(walks: Walks) -> list[list[int]]:
    engine = Recorder()
    walks.update(engine, BATCH, None)
    return engine.rows


def test_a_batch_is_one_optimizer_step_unless_said_otherwise() -> None:
    assert rows_of(Walks()) == [list(range(8))]


def test_parts_are_rows_side_by_side_and_each_walk_repeats_them() -> None:
    assert rows_of(Walks(epochs=2, mini_batches=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_a_metric_is_the_mean_over_the_optimizer_steps_that_have_it() -> None:
    assert Walks(epochs=2, mini_batches=2).update(Recorder(), BATCH, None) == {"step": 2.5, "first": 1.0}
