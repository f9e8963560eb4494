"""Accuracy against seconds: where an evaluation stands, which steps count, and how runs of a seed are compared."""

from typing import Any

import pytest

from benchmarks.learning import wall_clock
from benchmarks.report import wall_clock_tables as tables


def line(step: int, seconds: float, accuracy: float | None = None, version: int = 0) -> dict[str, float]:
    """The metrics of a step, with those of an evaluation if it had one."""
    common = {
        "critic/rewards/mean": 0.5,
        "staleness/mean": 1.0,
        "staleness/max": 1.0,
        "response_length/mean": 9.0,
        "response_length/max": 20.0,
    }
    found = {} if accuracy is None else {"val/acc/mean@1": accuracy, "val/version": float(version)}
    return {"step": step, "timing_s/step": seconds, "timing_s/gen": seconds / 2, **common, **found}


LINES = [line(0, 9.0, 0.2), *(line(step, 2.0) for step in range(1, 7)), line(7, 5.0, 0.6, 6), line(8, 3.0)]
ENDED = [9.0, 11.0, 13.0, 15.0, 17.0, 19.0, 21.0, 26.0, 29.0]


def entry(depth: int = 1) -> dict[str, Any]:
    return wall_clock.entry(LINES, ENDED, wall_clock.Settings(depth=depth), "steps")


def test_an_evaluation_stands_where_its_weights_were_there_and_delays_no_step_that_counts() -> None:
    run = entry()
    assert [each[:3] for each in run["accuracy"]] == [[0, 0.0, 0.2], [6, 10.0, 0.6]]  # version 6 is there when step 5 has ended
    assert run["final_accuracy"] == pytest.approx(0.4)
    assert (run["step_s"], run["parts_s"]["gen"], run["steps_s"]) == (2.0, 1.0, [2.0, 2.0, 2.0])  # steps 3 to 5
    assert len(entry(depth=0)["steps_s"]) == 5  # on policy an evaluation delays its own step and the next


def test_runs_are_compared_with_the_time_shared_run_of_their_seed() -> None:
    curves = {
        ("time-shared", 0): [(0, 0.2), (10, 0.6), (20, 0.7)],
        ("time-shared", 1): [(0, 0.2), (10, 0.5), (20, 0.6)],
        ("continuous", 1): [(0, 0.2), (5, 0.6), (9, 0.5)],
    }
    runs = {
        f"{mode}{seed}": entry()
        | {"key": {"mode": mode, "seed": seed}, "predicted_s": 1.5, "final_accuracy": found[-1][1], "step_s": 1.0 + seed}
        | {"accuracy": [[0, time, accuracy, 0.0] for time, accuracy in found]}
        for (mode, seed), found in curves.items()
    }
    shared, continuous = (row.strip("| ").split(" | ") for row in tables.by_mode(runs).splitlines()[2:])
    assert shared[6:10] == ["10, 20", "15, –", "20, 20", "1.00, 1.00"]
    assert (continuous[3], *continuous[6:10]) == ("1.00", "5", "–", "5", "0.25")
    drawn = tables.draw({"runs": runs})
    assert all(text in drawn for text in ("time-shared (2 seeds)", "continuous (1 seed)", "seconds since the first step"))
