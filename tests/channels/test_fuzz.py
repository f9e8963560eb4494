"""Whatever a peer sends, a channel answers with an error: no crash, no hang, no code run. More cases: benchmarks/reliability/fuzz.py."""

import time

import pytest
from support import hostile_peer

FINE = {"rejected", "taken as valid", "ChannelBroken", "ChannelClosed", "ChannelTimeout", "ChannelError", "sender refused"}
CASES = 1500


@pytest.mark.parametrize("target", hostile_peer.TARGETS)
def test_malformed_input_is_rejected_without_a_crash_a_hang_or_code_that_runs(target: str) -> None:
    watch = hostile_peer.Watch()
    hostile_peer.attack(target, 20, seed=1)
    since = time.monotonic()
    with watch.watching():
        outcomes = hostile_peer.attack(target, CASES, seed=0)
    assert set(outcomes) <= FINE, outcomes
    assert "LET IN" not in outcomes
    assert outcomes["taken as valid"] < CASES / 2  # the cases are malformed indeed
    assert watch.ran == []
    assert time.monotonic() - since < 60


def test_the_watch_would_notice_code_that_runs() -> None:
    watch = hostile_peer.Watch()
    with watch.watching():
        hostile_peer.pickle.loads(hostile_peer.pickle.dumps(hostile_peer.Bomb))
    assert any("pickle.find_class" in event for event in watch.ran)
