"""When a job may start again, and what its first and second signal do."""

import os
import signal
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from support import fakes, forked_workers

import rlgraph as rg
from rlgraph.errors import CheckpointError, DispatchError, NodeError, StalenessError, WorkerDied
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver.job import Job, PoisonPrompts, Restarts
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES
from rlgraph.runtime.driver.signals import Signals
from rlgraph.runtime.worker.activity import Activity, Heartbeat

SUMS = [{"prompt": f"{number} + 1 ="} for number in range(6)]


def test_failures_in_a_row_are_counted_and_a_further_checkpoint_makes_them_count_anew() -> None:
    restarts = Restarts(2)
    assert [restarts.allows(WorkerDied("died"), 10, ready=True) for _ in range(3)] == [True, True, False]
    assert restarts.allows(WorkerDied("died"), 20, ready=True)


def test_a_prompt_is_set_aside_once_it_alone_has_killed_its_worker_twice() -> None:
    scored = rg.reward(lambda response: 0.0, rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts(SUMS, count=2)))
    graph = rg.Graph("sums", scored)
    suspects = PoisonPrompts(graph, rg.compile(graph, Cluster(cpus=2)))
    assert suspects.saw(Heartbeat(1, Activity("fire", "rollout"), 1.0), ()) is None
    assert suspects.probe == ("rollout", 1)
    places = [suspects.saw(Heartbeat(1, Activity("probe", "rollout", prompt=prompt), 1.0), ()) for prompt in (0, 1, 1)]
    assert places[:2] == [None, None], "each killed once"
    assert places[2] is not None


@pytest.mark.parametrize("error", [CheckpointError("no room"), StalenessError("too old")])
def test_an_error_that_would_come_again_ends_the_job(error: Exception) -> None:
    assert not Restarts(5).allows(error, 0, ready=True)


def test_an_engine_that_cannot_be_loaded_is_not_tried_again_but_one_that_was_killed_is() -> None:
    assert not Restarts(5).allows(NodeError("no such model"), 0, ready=False)
    assert Restarts(5).allows(WorkerDied("killed while it was loading"), 0, ready=False)


def test_the_first_signal_asks_for_an_end_and_the_second_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals(lambda: True)
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked == signal.SIGTERM
        assert "finishing the steps in flight; once more stops at once" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_while_nothing_is_in_flight_ends_at_once() -> None:
    signals = Signals(lambda: False)
    signals.install()
    try:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signals.restore()


class LosesRay(forked_workers.Forked):
    """A dispatch whose Ray ends once the workers are ready."""

    started = False

    def start(self, actors: Sequence[Any]) -> None:
        self.started = True

    def death(self, hosts: Collection[int]) -> str:
        return "Ray's raylet on this host ended" if self.started else ""


def test_the_end_of_ray_ends_a_job_whose_workers_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISPATCHES, "loses Ray", LosesRay)
    graph = fakes.vector_loop(1, generate_s=2.0)
    with Job(graph, compile_plan(graph, Cluster(cpus=2)), dispatch_name="loses Ray", deadline_s=60.0) as running:
        pids = list(running.pids.values())
        with pytest.raises(DispatchError, match="Ray's raylet on this host ended"):
            list(running.steps(5))
    assert not any(forked_workers.alive(pid) for pid in pids)
