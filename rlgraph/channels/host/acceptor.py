"""Accept a writer's readers, those that know the key, on a thread that ends once all have connected."""

import os
import threading
from collections.abc import Iterable
from multiprocessing import AuthenticationError

from rlgraph.channels.host import protocol
from rlgraph.channels.host.address import bound, close_listener, is_path, listen
from rlgraph.channels.host.connection import Connection
from rlgraph.channels.host.protocol import Failed, Goodbye, Welcome
from rlgraph.channels.remote.relay import relayed
from rlgraph.channels.remote.transfer import DeviceBuffers

HANDSHAKE_S = 10.0  # a process that connects and stays silent holds up the others no longer than this


class Acceptor:
    """Listens for the readers; `connections` are those that have connected, in order."""

    def __init__(
        self,
        channel: str,
        address: str,
        authkey: bytes,
        readers: int,
        welcome: Welcome,
        buffers: DeviceBuffers | None,
        *,
        encrypt: bool = False,
    ) -> None:
        self.connections: list[Connection] = []
        self._channel, self._authkey, self._readers, self._welcome, self._buffers = channel, authkey, readers, welcome, buffers
        self._encrypt = encrypt
        self._lock = threading.Lock()
        self._shut = False
        self._listener = listen(channel, address, backlog=readers + 8)
        self.address = address if is_path(address) else bound(self._listener)
        self._bell = os.eventfd(0)  # rung when a reader has connected, for the thread that waits in `put`
        threading.Thread(target=self._admit, name=f"accept {channel}", daemon=True).start()

    @property
    def full(self) -> bool:
        """Whether all readers have connected."""
        return len(self.connections) == self._readers

    def handles(self) -> list[int]:
        """The descriptors to wait on: those of the readers, and the bell that a new one rings."""
        return [self._bell, *(connection.fileno() for connection in self.connections)]

    def news(self, handles: Iterable[int]) -> list[Connection]:
        """The connections whose handles are ready."""
        if self._bell in handles:
            os.eventfd_read(self._bell)
        return [connection for connection in self.connections if connection.fileno() in handles]

    def shut(self, last: Goodbye | Failed) -> None:
        """Send a last message to the readers and accept no more of them."""
        with self._lock:
            if self._shut:
                return
            self._shut = True
            if not self.full:
                close_listener(self._listener, self.address)
        for connection in self.connections:
            protocol.send(connection, last)
            connection.close()
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
                connection = Connection(sock, self._authkey, HANDSHAKE_S, server=True, encrypt=self._encrypt)
            except (AuthenticationError, EOFError, OSError):
                continue  # whoever it was has been told, and the place stays free for a reader
            if not connection.local:
                connection = relayed(self._channel, connection, outward=True, buffers=self._buffers)
            with self._lock:
                if self._shut:
                    connection.close()
                    return
                self._enter(connection)

    def _enter(self, connection: Connection) -> None:
        protocol.send(connection, self._welcome)
        self.connections.append(connection)
        if self.full:
            close_listener(self._listener, self.address)
        os.eventfd_write(self._bell, 1)
