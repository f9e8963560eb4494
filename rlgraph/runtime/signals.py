"""Ctrl-C and SIGTERM: the first lets the steps in flight finish, the second stops at once."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Handles both signals while a job is open, where that is in the main thread; else they do what they did before."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self.asked: int | None = None  # the signal that asked for an end
        self._busy = busy  # whether there are steps that can be finished
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals; again after each start of Ray, which takes SIGTERM for itself."""
        if threading.current_thread() is threading.main_thread():
            before: dict[int, Any] = {int(number): signal.signal(number, self._handle) for number in HANDLED}
            self._before = self._before or before

    def restore(self) -> None:
        """Give the signals back to whoever had them before."""
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
        """End the program as the signal asks for."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
