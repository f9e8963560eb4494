"""Three hosts with network stacks, clocks and processes of their own: what is lost is named, with host and worker, and a job goes on.

What a case does is in `network_program.py`; all run side by side, since each waits more than it computes.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from support import namespaces
from support.paths import PROGRAMS

pytestmark = [pytest.mark.stage("hosts"), pytest.mark.namespaces, pytest.mark.timeout(900)]  # the first test waits for all cases
PROGRAM = PROGRAMS / "network_program.py"
HOST_0, HOST_1, HOST_2 = (rf"host {n} \(10\.99\.0\.{n + 1}\)" for n in range(3))
POLICY_LOST = rf"^{HOST_2} was lost, with worker 'policy': no answer for [\d.]+ s; it is down, frozen, or cut off from the network"
JUDGE_LOST = rf"^{HOST_1} was lost, with worker 'critic': no answer for"
ENDED = r".*'(judge|rollout) \(tcp\)' ended, and both hosts answer"  # the judge passes the rollout on to the policy
BETWEEN = rf"^the network between {HOST_1}, with 'critic', and {HOST_2}, with 'policy', is cut: {ENDED}"
GENERATORS, TRAINERS = r"'generator\[2\]' and 'generator\[3\]'", r"'policy\[0\]' and 'policy\[1\]'"

NAMED = {
    "worker killed on the driver's host": ("WorkerDied", rf"^worker 'generator' \(process \d+\) on {HOST_0} died while"),
    "worker killed on another host": ("WorkerDied", rf"^worker 'policy' \(process \d+\) on {HOST_2} died while"),
    "host killed": ("WorkerDied", POLICY_LOST),
    "cable of a host": ("WorkerDied", POLICY_LOST),
    "silent cut of the policy's host": ("WorkerDied", POLICY_LOST),
    "silent cut of the judge's host": ("WorkerDied", JUDGE_LOST),
    "silent cut with megabytes under way": ("WorkerDied", POLICY_LOST),
    "cut of the driver": ("WorkerDied", rf"^{HOST_1} and {HOST_2} were lost, .*; no other host answers, so look first at .*{HOST_0}"),
    "cut between two others": ("ChannelBroken", BETWEEN),
    "half open": ("WorkerDied", POLICY_LOST),
    "half open, the other way": ("WorkerDied", POLICY_LOST),
    "half open between two others": ("ChannelBroken", BETWEEN),
    "host frozen": ("WorkerDied", JUDGE_LOST),
    "disk full": ("CheckpointError", r"^the checkpoint of step 25 could not be written by worker 'policy' on .*: OSError: .*No space left"),
}
WITHIN_A_VERSION = {
    "host that passes on killed": ("WorkerDied", rf"^{HOST_1} was lost, with workers {GENERATORS}: "),
    "trainers' host killed": ("WorkerDied", rf"^{HOST_2} was lost, with workers {TRAINERS}: "),
    "worker that passes on killed": ("WorkerDied", rf"^worker 'generator\[0\]' \(process \d+\) on {HOST_0} died while"),
    "worker that passes on killed, on the last host": ("WorkerDied", rf"^worker 'generator\[2\]' \(process \d+\) on {HOST_1} died while"),
    "cut between trainers and one that passes on": (
        "ChannelBroken",
        rf"^the network between {HOST_1}, with {GENERATORS}, and {HOST_2}, with {TRAINERS}, is cut: .*'weights' ended, and both hosts",
    ),
}
SURVIVED = ["slow link", "short cut", "clock jump", "host killed, and back", "silent cut, and back", "host killed, for good"]

PORTS, ENCRYPTED, PASSED_ON, THROUGH_A_TREE = OWN = "ports", "encrypted", "weights passed on", "weights through a tree"


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, Mapping[str, Any]]:
    """Run all cases and return what came of each."""
    command = namespaces.isolate_command([sys.executable, str(PROGRAM), "5", *OWN, *SURVIVED, *NAMED, *WITHIN_A_VERSION])
    run = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    found = {outcome["case"]: outcome for outcome in map(json.loads, filter(lambda line: line.startswith("{"), run.stdout.splitlines()))}
    if missing := {*OWN, *NAMED, *SURVIVED, *WITHIN_A_VERSION} - found.keys():
        pytest.fail(f"no outcome of {sorted(missing)}\n{run.stderr}")
    return found


@pytest.mark.parametrize("case", NAMED)
def test_what_is_lost_is_named_with_its_host_and_its_worker(outcomes: Mapping[str, Mapping[str, Any]], case: str) -> None:
    kind, pattern = NAMED[case]
    outcome = outcomes[case]
    assert outcome.get("kind") == kind, outcome
    assert re.search(pattern, outcome["error"].splitlines()[0]), outcome["error"]


@pytest.mark.parametrize("case", WITHIN_A_VERSION)
def test_what_is_lost_in_the_middle_of_a_version_is_named_and_nothing_is_left(outcomes: Mapping[str, Mapping[str, Any]], case: str) -> None:
    kind, pattern = WITHIN_A_VERSION[case]
    outcome = outcomes[case]
    assert outcome.get("kind") == kind, outcome
    assert re.search(pattern, outcome["error"].splitlines()[0]), outcome["error"]
    assert outcome["seconds"] < 30, outcome
    assert (outcome["workers"], outcome["left"]) == (7, []), outcome


def test_a_version_crosses_each_hosts_link_once_and_arrives_bit_for_bit(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    outcome = outcomes[PASSED_ON]
    assert (outcome["error"], outcome["same"]) == ("", [4.0] * 25), outcome
    assert outcome["versions"] == [0.0, *range(24)], outcome
    assert outcome["shape"] == "chain"
    copies = {host: (received, sent) for host, (received, sent) in outcome["copies"].items()}
    for host in ("1", "2"):  # of the generators, two on each: each gets one copy, and passes half of it on, that of one rank of two
        assert copies[host] == (pytest.approx(1, abs=0.15), pytest.approx(0.5, abs=0.15)), outcome
    assert copies["3"] == (pytest.approx(0, abs=0.02), pytest.approx(1, abs=0.15)), outcome


def test_a_version_comes_once_into_each_of_four_hosts_of_a_tree_and_leaves_the_trainers_twice(
    outcomes: Mapping[str, Mapping[str, Any]],
) -> None:
    outcome = outcomes[THROUGH_A_TREE]
    assert (outcome["error"], outcome["shape"], outcome["same"]) == ("", "tree", [4.0] * 25), outcome
    assert outcome["versions"] == [0.0, *range(24)], outcome
    assert len(set(outcome["on"].values())) == 6, outcome
    for worker, host in outcome["on"].items():  # of two ranks each has half a version, and begins its tree at other hosts
        received, sent = outcome["copies"][str(host)]
        if worker.startswith("generator"):
            assert (received, sent) == (pytest.approx(1, abs=0.15), pytest.approx(0.5, abs=0.15)), outcome
        elif worker.startswith("policy"):
            assert (received, sent) == (pytest.approx(0, abs=0.05), pytest.approx(1, abs=0.15)), outcome


@pytest.mark.parametrize("case", SURVIVED)
def test_a_job_goes_on_with_the_same_bits(outcomes: Mapping[str, Mapping[str, Any]], case: str) -> None:
    outcome = outcomes[case]
    assert (outcome["error"], outcome.get("same")) == ("", True)
    assert outcome.get("restarts", 1) == 1


def test_ranks_of_several_hosts_find_each_other_without_names_and_nothing_listens_beyond_the_plans_addresses(
    outcomes: Mapping[str, Mapping[str, Any]],
) -> None:
    outcome = outcomes[PORTS]
    assert (outcome["ranks"], outcome["given"]) == ([1, 2], 2), outcome
    for host, listening in outcome["ports"].items():
        assert set(listening) == {namespaces.address(int(host))}, outcome
        ranks = int(host) - 1 in outcome["ranks"]
        assert len(listening[namespaces.address(int(host))]) > ranks, "beside the test's own server, no rank listens"


def test_an_encrypted_job_has_the_same_bits_and_names_no_column_on_the_wire(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    outcome = outcomes[ENCRYPTED]
    assert (outcome["error"], outcome.get("same")) == ("", True), outcome
    assert outcome["plain"]["found"] > 0
    assert (outcome["secret"]["found"], outcome["secret"]["bytes"] > 0) == (0, True), outcome
