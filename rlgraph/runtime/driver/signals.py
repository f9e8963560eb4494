"""Handle Ctrl-C and SIGTERM: the first signal lets the steps in flight finish, the second stops at once. While Ray starts or workers
end, a signal would leave processes and shared memory behind, so it is held back until this is done.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)
_holding: list[str] = []  # the work for which signals are held back


@contextlib.contextmanager
def hold_signals(doing: str) -> Iterator[Callable[[], bool]]:
    """Hold both signals back during work that must not be interrupted; the first signal is raised again after it.

    `doing` describes the work for the user. The work must end by itself within seconds; the function that the context returns tells it
    whether a signal has come. Signals that the program ignores stay ignored.
    """
    if _holding or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not came:
            print(f"\n{signal.Signals(number).name}: {doing} first", file=sys.stderr, flush=True)
        came.append(number)

    heeded = [number for number in HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {int(number): signal.signal(number, note) for number in heeded}
    _holding.append(doing)
    try:
        yield lambda: bool(came)
    finally:
        _holding.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class Signals:
    """Handles both signals while a job is open in the main thread; elsewhere they keep their handlers."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self.asked: int | None = None  # the signal that asked for an end
        self._busy = busy  # whether there are steps that can be finished
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers. Call it again after each start of Ray, which replaces the handler of SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            before: dict[int, Any] = {int(number): signal.signal(number, self._handle) for number in HANDLED}
            self._before = self._before or before

    def restore(self) -> None:
        """Restore the handlers that the signals had before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None or not self._busy():
            self.restore()
            self.stop(number)
        self.asked = number
        print(f"\n{signal.Signals(number).name}: finishing the steps in flight; once more stops at once", file=sys.stderr, flush=True)

    @staticmethod
    def stop(number: int) -> None:
        """End the program: KeyboardInterrupt for Ctrl-C, otherwise the exit status of the signal."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
