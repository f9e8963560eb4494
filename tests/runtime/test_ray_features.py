"""A Ray that lacks what a launch needs is refused before anything starts; a job of processes does not import Ray."""

import importlib.util
import os
import subprocess
import sys

import pytest
from ray._private import services
from support import fakes
from support.paths import PYTHONPATH

from rlgraph import diagnosis
from rlgraph.api import compile
from rlgraph.errors import PlanError
from rlgraph.notices import here
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.driver.dispatch import chosen_dispatch

PLAN = compile(fakes.vector_loop(1), Cluster(cpus=2))


def test_a_ray_without_compiled_graphs_runs_workers_by_calls_and_a_notice_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    here.forget()
    assert (chosen_dispatch(PLAN, None), here.list_all()) == ("compiled_graph", ())
    assert "with Compiled Graphs; with Direct Transport" in diagnosis.ray_check().found
    monkeypatch.setitem(sys.modules, "ray.dag", None)
    assert chosen_dispatch(PLAN, None) == "calls"
    assert here.list_all()[0].startswith("this Ray has no Compiled Graphs: it starts the loop of each worker by an actor call")
    assert "actors start the loops of workers, without Compiled Graphs" in diagnosis.ray_check().found
    with pytest.raises(PlanError, match=r"launch\(dispatch='compiled_graph'\): this Ray has no Compiled Graphs; leave dispatch= out"):
        PLAN.launch(dispatch="compiled_graph")


def test_a_ray_that_lacks_what_starts_it_is_refused_and_processes_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(services, "ConsolePopen")
    with pytest.raises(PlanError, match=r"lacks ray\._private\.services\.ConsolePopen, with .* pip install 'ray==.*dispatch='processes'"):
        PLAN.launch()
    assert (diagnosis.ray_check().state, chosen_dispatch(PLAN, "processes")) == ("problem", "processes")


def test_a_ray_without_the_channels_of_compiled_graphs_is_refused_for_the_transport_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rlgraph.channels.host.ray_channel", None)
    with pytest.raises(PlanError, match=r"launch\(transport='ray'\): Ray .* lacks the channels of Compiled Graphs; leave transport= out"):
        PLAN.launch(transport="ray")
    PLAN.launch()


def test_a_launch_without_ray_says_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"Ray is not installed; `pip install ray`, or launch\(dispatch='processes'\)"):
        PLAN.launch()
    assert diagnosis.ray_check().found == "not installed: only launch(dispatch='processes') runs jobs"


PROCESSES = """
import sys
import rlgraph as rg
from support import fakes
with rg.compile(fakes.vector_loop(1), rg.Cluster(cpus=2)).launch(dispatch="processes") as job:
    print(len(list(job.steps(2))))
    for pid in job.pids.values():
        print("ray/_raylet" in open(f"/proc/{pid}/maps").read())
print("ray" in sys.modules)
"""


@pytest.mark.stage("jobs")
def test_a_job_of_processes_imports_no_ray() -> None:
    variables = os.environ | {"PYTHONPATH": PYTHONPATH}
    ended = subprocess.run([sys.executable, "-c", PROCESSES], env=variables, capture_output=True, text=True, timeout=250, check=False)
    assert ended.stdout.split() == ["2", *["False"] * 5], ended.stderr
