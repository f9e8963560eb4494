"""Several optimizer steps on a batch: which rows each takes and how often, and what metrics become."""

from typing import Any

import torch

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.nodes.base import Context
from rlgraph.nodes.training.guards import Guards, UpdateGuard
from rlgraph.nodes.training.update import Training, UpdateSchedule

BATCH = {"responses": torch.arange(8)[:, None], "texts": [str(i) for i in range(8)], "response_mask": torch.ones(8, 1, dtype=torch.bool)}


class Recorder:
    """An engine that notes the rows of each optimizer step."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def update(self, batch: Columns, loss: Any, **settings: Any) -> dict[str, float]:
        responses = batch["responses"]
        assert isinstance(responses, torch.Tensor)
        assert list(batch["texts"]) == [str(i) for i in responses[:, 0].tolist()]
        self.rows.append(responses[:, 0].tolist())
        return {"step": float(len(self.rows))} | ({"first": 1.0} if len(self.rows) == 1 else {})


def rows_of(schedule: UpdateSchedule) -> list[list[int]]:
    engine = Recorder()
    schedule.update(engine, BATCH, None)
    return engine.rows


def test_a_batch_is_one_optimizer_step_unless_said_otherwise() -> None:
    assert rows_of(UpdateSchedule()) == [list(range(8))]


def test_parts_are_rows_side_by_side_and_each_walk_repeats_them() -> None:
    assert rows_of(UpdateSchedule(epochs=2, mini_batches=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_a_metric_is_the_mean_over_the_optimizer_steps_that_have_it() -> None:
    assert UpdateSchedule(epochs=2, mini_batches=2).update(Recorder(), BATCH, None) == {"step": 2.5, "first": 1.0}


def test_a_mini_batch_in_which_every_row_is_masked_is_no_optimizer_step_and_is_counted() -> None:
    schedule, engine, guards = UpdateSchedule(epochs=2, mini_batches=4), Recorder(), Guards(patience=2)
    batch = {**BATCH, "response_mask": (torch.arange(8) >= 6)[:, None]}
    training = Training(model=rg.Policy("m", pool=rg.Pool("p")), loss=rg.ClippedLoss(), schedule=schedule, guards=guards, name="update")
    guard = UpdateGuard("update", guards)
    metrics = training.learn(Context(engine=engine), guard, batch)
    assert engine.rows == [[6, 7], [6, 7]]
    assert metrics == {"step": 1.5, "first": 1.0}, "the mean over the optimizer steps that were taken"
    assert guard.metrics()["guards/empty_mini_batches"] == 6
    assert guard.metrics()["guards/skipped"] == 0, "a filter may empty several in a row without anything being wrong"
