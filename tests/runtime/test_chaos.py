"""Random kills, cuts and freezes on three hosts for half a minute: every step as in an undisturbed run. Longer: benchmarks/chaos.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def test_every_step_of_a_disturbed_run_is_that_of_an_undisturbed_one() -> None:
    command = [sys.executable, str(PROGRAM), "--vector", "--minutes", "0.6", "--seed", "4"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert run.returncode == 0, run.stderr
    [outcome] = [json.loads(line) for line in run.stdout.splitlines()]
    assert outcome["wrong"] == []
    assert outcome["machine"]["cores"] >= 1
    assert outcome["events_in_all"] == sum(outcome["events"].values()) >= 2, "hardly anything happened"
    assert outcome["trainers"] >= 2, "no event led to a restart"
