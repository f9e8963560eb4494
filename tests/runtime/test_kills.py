"""The benchmark of kills, in short: a run that is killed again and again is, when it is done, the run that was not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stage("kills")

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "reliability" / "kills.py"


def test_a_run_killed_at_random_times_loses_doubles_and_changes_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "here", "--kills", "4", "--seed", "7", "--json", str(figures)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(figures.read_text())["parts"][0]
    assert found["wrong"] == []
    assert found["kills in all"] >= 1
    equal = found["runs that equal the undisturbed one in every bit"]  # at depth 0, and at the next where it was over before all kills
    assert equal["depth 0"] == 1
    assert sum(equal.values()) == found["runs"]
