"""The writer's door: lets in the readers that know the key, on a thread that ends with the last of them."""

import os
import threading
from collections.abc import Iterable
from multiprocessing import AuthenticationError

from rlgraph.channels.host import protocol
from rlgraph.channels.host.address import bound, close_listener, is_path, listen
from rlgraph.channels.host.connection import Link
from rlgraph.channels.host.protocol import Failed, Goodbye, Welcome
from rlgraph.channels.remote.relay import relayed
from rlgraph.channels.remote.transfer import Cargo

HANDSHAKE_S = 10.0  # a process that connects and stays silent holds up the others no longer than this


class Door:
    """Links to the readers, in the order in which they came."""

    def __init__(self, channel: str, address: str, authkey: bytes, readers: int, welcome: Welcome, cargo: Cargo | None) -> None:
        self.links: list[Link] = []
        self._channel, self._authkey, self._readers, self._welcome, self._cargo = channel, authkey, readers, welcome, cargo
        self._lock = threading.Lock()
        self._shut = False
        self._listener = listen(channel, address, backlog=readers + 8)
        self.address = address if is_path(address) else bound(self._listener)
        self._bell = os.eventfd(0)  # rung when a reader has come in, for the thread that waits in `put`
        threading.Thread(target=self._admit, name=f"door of {channel}", daemon=True).start()

    @property
    def full(self) -> bool:
        """Whether all readers are in."""
        return len(self.links) == self._readers

    def handles(self) -> list[int]:
        """Return what to wait on: news of the readers, or a new one."""
        return [self._bell, *(link.fileno() for link in self.links)]

    def news(self, handles: Iterable[int]) -> list[Link]:
        """Return the links among the handles that are ready."""
        if self._bell in handles:
            os.eventfd_read(self._bell)
        return [link for link in self.links if link.fileno() in handles]

    def shut(self, last: Goodbye | Failed) -> None:
        """Send a last token to the readers and let nobody in any more."""
        with self._lock:
            if self._shut:
                return
            self._shut = True
            if not self.full:
                close_listener(self._listener, self.address)
        for link in self.links:
            protocol.send(link, last)
            link.close()
        os.eventfd_write(self._bell, 1)  # wakes a thread in `put`
        os.close(self._bell)

    def _admit(self) -> None:
        while not self.full:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._shut:
                    return
                raise
            try:
                link = Link(sock, self._authkey, HANDSHAKE_S, server=True)
            except (AuthenticationError, EOFError, OSError):
                continue  # whoever it was has been told, and the place stays free for a reader
            if not link.local:
                link = relayed(self._channel, link, outward=True, cargo=self._cargo)
            with self._lock:
                if self._shut:
                    link.close()
                    return
                self._enter(link)

    def _enter(self, link: Link) -> None:
        protocol.send(link, self._welcome)
        self.links.append(link)
        if self.full:
            close_listener(self._listener, self.address)
        os.eventfd_write(self._bell, 1)
