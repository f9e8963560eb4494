"""Benchmarks whose runs learn: what stops a run, what a file of results skips, and the tables."""

import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import learning_plots, learning_runs
from benchmarks.lib.learning_runs import Flat, Results, chosen, entry, named
from benchmarks.report import staleness_tables

KEYS = [{"depth": depth, "correction": name, "seed": seed} for seed in (0, 1) for depth in (0, 1) for name in ("disabled", "proximal")]


def line(step: int, seconds: float, **more: float) -> dict[str, float]:
    """The metrics of a step."""
    common = {"critic/rewards/mean": 0.1 * step, "staleness/mean": 1.0, "staleness/max": min(step, 2), "actor/ppo_kl": 0.5}
    return {"step": step, "timing_s/step": seconds, **common, **more}


def evaluated(version: int, accuracy: float) -> dict[str, float]:
    return {"val/version": float(version), "val/acc/mean@4": accuracy, "val/acc/stderr": 0.02}


LINES = [line(0, 30.0, **evaluated(0, 0.1)), line(1, 2.0), line(2, 3.0, **evaluated(2, 0.3)), line(3, 4.0)]


def test_accuracy_is_flat_once_the_last_evaluations_gain_too_little() -> None:
    flat = Flat(least=10, window=2, gain=0.01)
    assert not flat(40, [0.1, 0.2, 0.3, 0.4])
    assert flat(40, [0.1, 0.2, 0.4, 0.4, 0.401, 0.401])
    assert not flat(9, [0.4, 0.4, 0.4, 0.4])
    assert not flat(40, [0.4, 0.4, 0.4])


def test_an_evaluation_stands_where_its_weights_were_there() -> None:
    run = entry(LINES, "steps", Flat(window=1))
    assert run["ended_s"] == [0.0, 2.0, 5.0, 9.0]  # the first step, which warms up, is not counted
    assert run["accuracy"] == [[0, 0.0, 0.1, 0.02], [2, 2.0, 0.3, 0.02]]  # version 2 was published by step 1
    assert (run["final_accuracy"], run["staleness_worst"], run["steps"], run["step_s"]) == (0.3, 2, 4, 3.0)


def test_only_names_some_of_the_runs() -> None:
    assert [named(key) for key in chosen(KEYS, "depth=1,correction=proximal,seed=0")] == ["depth=1,correction=proximal,seed=0"]
    assert len(chosen(KEYS, "seed=1")) == 4
    assert chosen(KEYS, "") == KEYS
    for only in ("depth=3", "proximal", "depth=1,"):
        with pytest.raises(SystemExit, match="there is no such run"):
            chosen(KEYS, only)


def test_runs_that_are_in_the_file_are_skipped_and_other_settings_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "runs.json", {"steps": 4})
    for key in KEYS[:3]:
        results.keep(named(key), {"key": key})
    again = Results(tmp_path / "runs.json", {"steps": 4})
    assert [key for key, _ in learning_runs.runs_left(again, KEYS, minutes=60)] == KEYS[3:]
    assert [key for key, _ in learning_runs.runs_left(again, KEYS, minutes=1)] == []  # too little to begin one
    assert "no time to begin" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"other settings \(there, here\): \{'steps': \(4, 5\)\}"):
        Results(tmp_path / "runs.json", {"steps": 5})
    assert Results(tmp_path / "runs.json", {"steps": 4, "exact": False}).runs  # which the recipe did not have when the file was written
    with pytest.raises(SystemExit, match="'exact': \\(False, True\\)"):
        Results(tmp_path / "runs.json", {"steps": 4, "exact": True})


def test_processes_that_share_a_file_keep_the_runs_of_each_other(tmp_path: Path) -> None:
    one, other = Results(tmp_path / "runs.json", {"steps": 4}), Results(tmp_path / "runs.json", {"steps": 4})
    one.keep("seed=0", {"from": "one"})
    other.keep("seed=1", {"from": "other"})
    assert Results(tmp_path / "runs.json", {"steps": 4}).runs == {"seed=0": {"from": "one"}, "seed=1": {"from": "other"}}


def finished(key: dict[str, Any], accuracy: float) -> dict[str, Any]:
    run = entry([line(0, 1.0, **evaluated(0, 0.1)), line(1, 1.0), line(2, 2.0, **evaluated(2, accuracy))], "flat", Flat(window=1))
    return run | {"key": key, "machine": {"gpus": []}}


def disabled(runs: dict[str, Any]) -> list[list[str]]:
    """The cells of the table's rows without a correction."""
    return [row.split(" | ") for row in learning_plots.staleness_table(runs).splitlines() if row.startswith("| disabled")]


def test_the_table_has_intervals_over_seeds_and_the_seconds_until_as_good_as_depth_0() -> None:
    runs = {named(key): finished(key, 0.5 + 0.1 * int(key["seed"])) for key in KEYS}
    rows = disabled(runs)
    assert len(rows) == 2
    assert rows[0][2:5] == ["2", "0.550", "± 0.635"]  # 12.71 x 0.0707 / sqrt(2)
    assert rows[0][5:7] == ["–", "–"]  # one of the seeds never reaches 0.95 x 0.55
    runs["depth=0,correction=disabled,seed=0"]["final_accuracy"] = 0.3
    assert [cells[5:8] for cells in disabled(runs)] == [["2", "1 s", "1.50 s"]] * 2


def test_runs_that_shared_a_machine_count_the_seconds_of_a_step_alone() -> None:
    runs = {named(key): finished(key, 0.5) for key in KEYS}
    alone = learning_plots.with_seconds_alone(runs, {"depth=1,correction=disabled": 0.25})
    assert [cells[5:8] for cells in disabled(alone)] == [["2", "1 s", "1.50 s"], ["2", "0 s", "0.25 s"]]
    assert alone["depth=1,correction=disabled,seed=1"]["accuracy"][-1][:2] == [2, 0.5]


def test_curves_are_means_where_all_seeds_are() -> None:
    assert learning_plots.mean_curve([([0, 10], [0.0, 1.0]), ([0, 20], [0.0, 1.0])]) == ([0, 10], [0.0, 0.75])
    assert math.isnan(learning_plots.at([0, 1], [0.0, 1.0], 1.5))
    runs = {named(key): finished(key, 0.5) for key in KEYS}
    drawn = learning_plots.draw_staleness(runs)["accuracy"]
    assert drawn == learning_plots.draw_staleness(runs)["accuracy"]
    texts = "".join(ET.fromstring(drawn).itertext())
    assert all(text in texts for text in ("no correction", "proximal", "depth 0", "depth 1", "seconds", "updates"))


def test_the_table_by_updates_has_each_seed_and_the_largest_fall() -> None:
    falling = entry([line(n, 1.0, **evaluated(n, accuracy)) for n, accuracy in enumerate((0.2, 0.96, 0.7))], "steps", Flat(window=1))
    steady = entry([line(n, 1.0, **evaluated(n, accuracy)) for n, accuracy in enumerate((0.2, 0.5, 0.8))], "flat", Flat(window=1))
    keys = [{"depth": 8, "correction": "disabled", "seed": seed} for seed in (0, 1)]
    runs = {named(key): run | {"key": key} for key, run in zip(keys, (falling, steady), strict=True)}
    assert staleness_tables.by_updates(runs).splitlines()[2:] == ["| `disabled` | 8 | 1, – | 0.700, 0.800 | 0.560 | 0.26 |"]
