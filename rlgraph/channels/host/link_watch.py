"""Ends connections to other hosts on which bytes are under way and nothing is acknowledged. Keep-alive asks only where none are.

`TCP_USER_TIMEOUT` sees this too. But it also ends the connection of a living peer that reads nothing for as long, because it holds its
interpreter or is busy: its window is closed, though its kernel answers.
"""

import contextlib
import os
import socket
import struct
import threading
import time
import weakref

LOST_S = 5  # a host that does not answer for so long is lost, whether it was sent something or not
LOOK_S = 0.5
_UNACKNOWLEDGED_AND_SILENT_MS = struct.Struct("=24xI28xI")  # of `struct tcp_info`: tcpi_unacked, tcpi_last_ack_recv


class LinkWatch:
    """Looks at the connections of a process, on one thread, which ends with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._suspected: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._runs = False

    def add(self, link: socket.socket) -> None:
        """Watch a TCP connection until it is closed."""
        with self._lock:
            self._links.add(link)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="link watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                for link in list(self._links):
                    self._look(link)
                if not self._links:
                    self._runs = False
                    return

    def _look(self, link: socket.socket) -> None:
        """End a link that was lost at the last look too: after a pause of this whole machine, answers come in between two looks."""
        try:
            lost = unanswered(link)
        except OSError:  # it is closed
            self._links.discard(link)
            return
        if not lost:
            self._suspected.discard(link)
        elif link not in self._suspected:
            self._suspected.add(link)
        else:
            self._links.discard(link)
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link, socket.SHUT_RDWR)  # also of a TLS socket, whose own would read on as plain text


def unanswered(link: socket.socket) -> bool:
    """Tell whether bytes are under way and the other host has acknowledged nothing for `LOST_S`. Raises OSError if the link is closed."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKNOWLEDGED_AND_SILENT_MS.size)
    under_way, silent_ms = _UNACKNOWLEDGED_AND_SILENT_MS.unpack(info)
    return under_way > 0 and silent_ms >= LOST_S * 1000


_watch = LinkWatch()


def watch(link: socket.socket) -> None:
    """Watch a TCP connection of this process until it is closed."""
    _watch.add(link)


def _forked() -> None:
    global _watch
    _watch = LinkWatch()


os.register_at_fork(after_in_child=_forked)
