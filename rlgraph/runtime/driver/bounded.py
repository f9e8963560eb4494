"""Deadlines for calls that have none."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from rlgraph.errors import ChannelTimeout

log = logging.getLogger("rlgraph.dispatch")

RAY_S = 180  # for what Ray does at once, unless it hangs; it may start a process for it, on a busy machine

T = TypeVar("T")


def bounded(what: str, work: Callable[[], None], seconds: float) -> None:
    """Run a call of Ray that has no deadline, and go on without it if it hangs: the processes that are left are killed next."""
    thread = threading.Thread(target=work, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        log.error("%s did not come within %g s; the job goes on without it", what, seconds)


def within(otherwise: str, work: Callable[[], T]) -> T:
    """Run a call of Ray that has no deadline and that the job needs. Raises what the call raises, ChannelTimeout if it hangs."""
    done: list[T] = []
    failed: list[BaseException] = []

    def do() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            failed.append(error)

    thread = threading.Thread(target=do, name=otherwise, daemon=True)
    thread.start()
    thread.join(RAY_S)
    if failed:
        raise failed[0]
    if not done:
        raise ChannelTimeout(f"{otherwise} within {RAY_S:g} s: Ray hangs; look at its logs, or start it anew")
    return done[0]
