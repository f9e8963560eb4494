"""Profiles of chosen steps of chosen workers lie in the run's folder and are linked in its report."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import fakes, forked_workers  # noqa: F401 (a way of dispatch)

import rlgraph as rg
from rlgraph.analysis.samples import OPERATORS, TRACE
from rlgraph.errors import PlanError
from rlgraph.plan.plan import Plan
from rlgraph.recording import samples as profiles
from rlgraph.runtime.driver.job import Job


@pytest.fixture(scope="module")
def plan() -> Plan:
    return rg.compile(fakes.vector_loop(1), rg.Cluster(cpus=2))


def recorded(plan: Plan, folder: Path, profile: rg.planning.Profile | None) -> Job:
    assert isinstance(plan.source, rg.Graph)
    with Job(plan.source, plan, dispatch_name="forked", deadline_s=60.0) as job:
        assert len(list(rg.record(job, 6, folder, profile=profile, quiet=True))) == 6
    return job


def calls(path: Path, name: str) -> int:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name") == name for event in events)


def test_a_worker_is_profiled_at_the_steps_asked_for_and_the_report_links_its_files(plan: Plan, tmp_path: Path) -> None:
    recorded(plan, tmp_path, rg.planning.Profile(steps=(2, 4), workers="policy"))
    names = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert names == [f"policy-steps-2-4{OPERATORS}", f"policy-steps-2-4{TRACE}"]
    page = (tmp_path / "run.html").read_text()
    assert re.findall(r'href="(profiles/[^"]*)"', page) == [f"profiles/{name}" for name in names]
    assert calls(tmp_path / "profiles" / names[1], "aten::mul_") == 3, "one in each of the three updates"
    assert "aten::mul_" in (tmp_path / "profiles" / names[0]).read_text()


def test_the_command_line_asks_for_the_profile_of_the_first_run_that_is_recorded(plan: Plan, tmp_path: Path) -> None:
    profiles.ask(rg.planning.Profile((1, 2), "policy"))
    recorded(plan, tmp_path / "a", None)
    recorded(plan, tmp_path / "b", None)
    assert sorted(path.name for path in (tmp_path / "a" / "profiles").iterdir()) == [f"policy-steps-1-2{end}" for end in (OPERATORS, TRACE)]
    assert not (tmp_path / "b" / "profiles").exists()


def test_one_step_of_all_workers(plan: Plan, tmp_path: Path) -> None:
    recorded(plan, tmp_path, rg.planning.Profile(steps=5))
    found = {path.name for path in (tmp_path / "profiles").glob(f"*{TRACE}")}
    assert found == {f"{worker.name}-steps-5-5{TRACE}" for worker in plan.workers}


def test_a_profile_that_cannot_be_written_is_said_and_the_run_goes_on(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file where the folder should be")
    job = recorded(plan, tmp_path, rg.planning.Profile(steps=1, workers="update"))
    assert [re.sub(r":.*", "", text) for text in job.notices] == ["worker 'policy' could not be profiled"]


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"steps": 6}, "the run has 6 steps, 0 to 5"),
        ({"steps": 1, "workers": "trainer"}, "there is no worker 'trainer'; there are"),
        ({"steps": 1, "memory": True}, "has a GPU; only CUDA's memory has a history"),
        ({"steps": (3, 1)}, "the first step comes after the last"),
    ],
)
def test_a_profile_without_effect_is_an_error(plan: Plan, profile: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said):
        rg.planning.Profile(**profile).request(plan, 6, tmp_path)
