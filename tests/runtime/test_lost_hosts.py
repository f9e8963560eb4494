"""A host that answers nothing is marked by one call and named; a cut between two others is told from a lost host."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from support import fakes

from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver import hosts as agents
from rlgraph.runtime.driver.hosts import Clock, Hosts, LocalHostAgent, RemoteHostAgent
from rlgraph.runtime.driver.watchdog import connection_error, host_error
from rlgraph.runtime.messages import Failure
from rlgraph.values.pool import Pool

PLAN = compile_plan(fakes.vector_loop(1, middle=lambda rollout: fakes.score_on_pool(Pool("judge"), rollout)), Cluster(cpus=6, hosts=3))
PLACED = {worker.name: worker.host for worker in PLAN.workers}
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


class Host:
    """Another host, whose clock is ahead; it can be made silent."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s, self.up, self.asked = ahead_s, threading.Event(), 0
        self.up.set()

    def __call__(self, method: str, timeout_s: float, *arguments: object) -> Any:
        self.asked += 1
        if not self.up.is_set():
            return None
        return time.monotonic() + self.ahead_s if method == "read_clock" else {}


class Fixed(LocalHostAgent):
    """Answers as it is told."""

    def __init__(self, silent_s: float = 0.0) -> None:
        self.seconds = silent_s

    def answers(self) -> bool:
        return not self.seconds

    def silent_s(self) -> float:
        return self.seconds


def three(*silent_s: float) -> Hosts:
    return Hosts("", tuple(map(Fixed, silent_s)), ADDRESSES, PLACED)


def failure(worker: str, channel: str, host: str) -> Failure:
    return Failure(worker, 3, "node", "ChannelBroken", f"channel '{channel}' broke", "", channel, 0, host)


def test_one_call_without_an_answer_marks_a_host_until_it_gives_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ASK_AGAIN_S", 0.05)
    host = Host()
    agent = RemoteHostAgent(host)
    assert agent.answers()
    assert agent.silent_s() == 0
    host.up.clear()
    assert agent.states(["policy"]) == {}
    assert agent.silent_s() > 0
    assert agent.stacks({"policy": 1}) == {"policy": "(its host does not answer)"}
    host.up.set()
    end = time.monotonic() + 60
    while agent.silent_s() and time.monotonic() < end:
        time.sleep(0.01)
    assert agent.silent_s() == 0
    assert agent.answers()
    agent.sweep()


def test_nobody_waits_for_a_host_that_is_known_to_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ASK_AGAIN_S", 1000.0)
    host = Host()
    agent = RemoteHostAgent(host)
    host.up.clear()
    agent.states(["policy"])
    asked = host.asked
    agent.states(["policy"])
    assert not agent.answers()
    agent.sweep()
    assert host.asked == asked


def test_clocks_of_hosts_are_compared() -> None:
    agent = RemoteHostAgent(Host(ahead_s=1000.0))
    clock = agent.clock()
    assert clock.ahead_s == pytest.approx(-1000.0, abs=5.0)
    assert clock.slack_s >= agents.DRIFT_S
    assert LocalHostAgent.clock(Fixed()) == Clock()
    hosts = Hosts("", (Fixed(), agent), ADDRESSES[:2], {"generator": 0, "policy": 1})
    assert (hosts.clock("policy"), hosts.clock("generator")) == (clock, Clock())
    assert hosts.clock_slack_s == clock.slack_s
    agent.sweep()


def test_a_host_is_lost_after_a_while_of_silence_and_asked_at_once_when_something_ended() -> None:
    hosts = three(0.0, 1.0, agents.SILENT_S + 1)
    assert hosts.lost_hosts() == {2}
    assert hosts.ask_all() == {1, 2}
    assert Hosts("", (Fixed(),), (), {}).ask_all() == frozenset()


LOST: Mapping[str, tuple[tuple[float, ...], str]] = {
    "one": ((0, 0, 8.0), r"^host 2 \(10.0.0.3\) was lost, with worker 'policy': no answer for 8.0 s; it is down, frozen, or cut off"),
    "all others": (
        (0, 8.0, 8.0),
        r"^host 1 \(10.0.0.2\) and host 2 \(10.0.0.3\) were lost, .*; no other host answers, so look first at .*10.0.0.1",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_lost_hosts_are_named_with_their_workers_and_nodes(case: str) -> None:
    silent_s, pattern = LOST[case]
    error = host_error(PLAN, hosts := three(*silent_s), hosts.ask_all(), "\n  worker 'generator': why")
    with pytest.raises(type(error), match=pattern):
        raise error
    assert "'update'" in str(error).splitlines()[1]
    assert str(error).endswith("worker 'generator': why")


def test_a_cut_between_two_hosts_that_answer_names_both_and_their_channels() -> None:
    error = connection_error(
        three(0, 0, 0), [failure("critic", "judge (tcp)", ADDRESSES[2]), failure("policy", "judge (tcp)", ADDRESSES[1])]
    )
    assert str(error).startswith("the network between host 1 (10.0.0.2), with 'critic', and host 2 (10.0.0.3), with 'policy', is cut: ")
    assert "the connection of channel 'judge (tcp)' ended" in str(error)


def test_no_network_is_blamed_on_one_host_or_where_hosts_share_an_address() -> None:
    assert connection_error(three(0, 0, 0), [failure("critic", "judge", "")]) is None
    shared = Hosts("", (Fixed(), Fixed()), ("127.0.0.1", "127.0.0.1"), {"generator": 0, "policy": 1})
    assert connection_error(shared, [failure("policy", "weights", "127.0.0.1")]) is None
