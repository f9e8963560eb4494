"""Runs of adapters that learn: a row for each rate."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import adapters_learning

SCRIPT = Path(adapters_learning.__file__)


def run(way: str, lr: float, seed: int, last: float) -> dict[str, Any]:
    return {
        "key": {"way": way, "lr": f"{lr:g}", "seed": seed},
        "settings": {"rank": adapters_learning.RANKS[way], "lr": lr},
        "reward": [0.5] * 5 + [last] * 5,
        "version_bytes": 10**6,
    }


def test_each_rate_has_a_row_of_its_seeds() -> None:
    runs = {
        str(index): run(way, lr, seed, last)
        for index, (way, lr, seed, last) in enumerate(
            [("adapter", 2e-4, 0, 0.6), ("full", 5e-6, 1, 0.8), ("adapter", 5e-5, 0, 0.7), ("full", 5e-6, 0, 1.0)]
        )
    }
    rows = [row.split(" | ") for row in adapters_learning.table(runs).splitlines()[2:]]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("| all weights", "5e-06", "1.000, 0.800"),
        ("| an adapter of rank 32", "5e-05", "0.700"),
        ("| an adapter of rank 32", "0.0002", "0.600"),
    ]


def test_a_setting_in_which_runs_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "lr=1e-4"])
    with pytest.raises(SystemExit, match="lr=1e-4: runs differ in rank, lr, seed, out; use --rates"):
        adapters_learning.main()
