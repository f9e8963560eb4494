"""Random kills, cuts and freezes on three hosts: every step as in an undisturbed run. For longer: benchmarks/reliability/chaos.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "reliability" / "chaos.py"


@pytest.mark.stage("chaos")
@pytest.mark.namespaces
@pytest.mark.timeout(1500)
def test_minutes_of_events_change_no_bit_of_the_weights_of_a_model() -> None:
    command = [sys.executable, str(PROGRAM), "--minutes", "2.5", "--seed", "5"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1470, check=False)
    assert run.returncode == 0, run.stderr
    [found] = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert found["wrong"] == []
    assert found["events_in_all"] == sum(found["events"].values())
    assert found["events_in_all"] >= 6, "hardly anything happened"
    assert found["trainers"] >= 3, "hardly an event led to a restart"
