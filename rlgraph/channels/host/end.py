"""What the two ends of a host channel share."""

import mmap
import threading

from rlgraph.channels.api import End, Meter, Statistics, Stop
from rlgraph.channels.host import protocol
from rlgraph.channels.host.protocol import Failed, Goodbye


class HostEnd:
    """How an end closes, fails and counts. `close` and `fail` may come from another thread."""

    def __init__(self, name: str, role: str, slots: int) -> None:
        self.end = End(name, role)
        self._meter = Meter(slots)
        self._segments: dict[int, mmap.mmap] = {}
        self._stop: Stop | None = None
        self._open = True
        self._lock = threading.Lock()

    def close(self) -> None:
        self._end_with(Goodbye(), Stop("this end"))

    def fail(self, reason: str) -> None:
        self._end_with(Failed(reason[: protocol.MAX_REASON]), Stop("this end", f"failed: {reason}"))

    def statistics(self) -> Statistics:
        return self._meter.statistics()

    def _end_with(self, last: Goodbye | Failed, stop: Stop) -> None:
        with self._lock:
            if self._open:
                self._open, self._stop = False, stop
                self._leave(last)
                self._segments.clear()

    def _leave(self, last: Goodbye | Failed) -> None:
        """Send a last message to the peers, and let go of what the end holds beside the segments."""
        raise NotImplementedError
