"""Random kills, cuts and freezes on three hosts: every step as in an undisturbed run. For longer: benchmarks/reliability/chaos.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stage("kills"), pytest.mark.namespaces]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "reliability" / "chaos.py"


def outcome(*settings: str, timeout_s: float) -> dict[str, Any]:
    run = subprocess.run([sys.executable, str(PROGRAM), *settings], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert run.returncode == 0, run.stderr
    [found] = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert found["wrong"] == []
    assert found["events_in_all"] == sum(found["events"].values())
    return dict(found)


@pytest.mark.timeout(600)
def test_every_step_of_a_disturbed_run_is_that_of_an_undisturbed_one() -> None:
    found = outcome("--vector", "--minutes", "0.6", "--seed", "4", timeout_s=570)
    assert found["machine"]["cores"] >= 1
    assert found["events_in_all"] >= 2, "hardly anything happened"
    assert found["trainers"] >= 2, "no event led to a restart"


@pytest.mark.stage("chaos")
@pytest.mark.timeout(1500)
def test_minutes_of_events_change_no_bit_of_the_weights_of_a_model() -> None:
    found = outcome("--minutes", "2.5", "--seed", "5", timeout_s=1470)
    assert found["events_in_all"] >= 6, "hardly anything happened"
    assert found["trainers"] >= 3, "hardly an event led to a restart"
