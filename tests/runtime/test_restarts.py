"""When a job may start again, and what its first and second signal do."""

import os
import signal

import pytest

from rlgraph.errors import CheckpointError, NodeError, StalenessError, WorkerDied
from rlgraph.runtime.restarts import Restarts
from rlgraph.runtime.signals import Signals


def test_failures_in_a_row_are_counted_and_a_further_checkpoint_makes_them_count_anew() -> None:
    restarts = Restarts(2)
    assert [restarts.allows(WorkerDied("died"), 10, ready=True) for _ in range(3)] == [True, True, False]
    assert restarts.allows(WorkerDied("died"), 20, ready=True)


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
