"""Accept readers that know the key, for a writer or for a reader that passes messages on; threads end once all have connected."""

import os
import socket
import threading
from collections.abc import Iterable, Sequence
from multiprocessing import AuthenticationError

from rlgraph.channels.host import protocol
from rlgraph.channels.host.connection import Connection, bound, close_listener, is_path, listen
from rlgraph.channels.host.protocol import Failed, Goodbye, Lost, Welcome
from rlgraph.channels.remote.relay import to_reader
from rlgraph.channels.remote.transfer import DeviceBuffers

HANDSHAKE_S = 10.0  # a process that connects and stays silent delays others at most this long


class Acceptor:
    """Listens for the readers at one address or several; `connections` lists the readers that have connected, in order.

    Readers on this host connect at a path. Readers on other hosts connect at a port, each through a relay.
    """

    def __init__(
        self,
        channel: str,
        addresses: Sequence[str],
        authkey: bytes,
        readers: int,
        welcome: Welcome,
        buffers: DeviceBuffers | None,
        *,
        encrypt: bool = False,
    ) -> None:
        self.connections: list[Connection] = []
        self._channel, self._authkey, self._readers, self._welcome, self.buffers = channel, authkey, readers, welcome, buffers
        self._encrypt = encrypt
        self._lock = threading.Lock()
        self._shut = False
        self._listeners = {listen(channel, address, backlog=readers + 8): address for address in addresses}
        self.address = next((bound(listener) for listener, address in self._listeners.items() if not is_path(address)), addresses[0])
        self.bell = os.eventfd(0)  # set when a reader has connected, for the thread that waits for messages
        for listener in self._listeners:
            threading.Thread(target=self._admit, args=[listener], name=f"accept {channel}", daemon=True).start()

    @property
    def full(self) -> bool:
        """Whether all readers have connected."""
        return not self.missing_readers

    @property
    def missing_readers(self) -> int:
        """How many readers have not connected."""
        return self._readers - len(self.connections)

    def handles(self) -> list[int]:
        """The descriptors to wait on: the readers' sockets, and the bell that a new reader sets."""
        return [self.bell, *(connection.fileno() for connection in self.connections)]

    def news(self, handles: Iterable[int]) -> list[Connection]:
        """The connections whose handles are ready."""
        if self.bell in handles:
            self.hush()
        return [connection for connection in self.connections if connection.fileno() in handles]

    def hush(self) -> None:
        """Stop the bell."""
        os.eventfd_read(self.bell)

    def send_last(self, last: Goodbye | Failed | Lost) -> None:
        """Send a last message to the readers and accept no more of them."""
        with self._lock:
            if self._shut:
                return
            self._shut = True
            if not self.full:
                self._close_listeners()
        for connection in self.connections:
            protocol.send(connection, last)
            connection.close()
        os.eventfd_write(self.bell, 1)  # wakes a thread in `put`
        os.close(self.bell)

    def _admit(self, listener: socket.socket) -> None:
        while not self.full:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._shut or self.full:
                    return
                raise
            try:
                connection = Connection(sock, self._authkey, HANDSHAKE_S, server=True, encrypt=self._encrypt)
            except (AuthenticationError, EOFError, OSError):
                continue  # the process has received a refusal, and its place stays free for a reader
            if not connection.local:
                connection = to_reader(self._channel, connection, self.buffers)
            with self._lock:
                if self._shut or self.full:
                    connection.close()
                    return
                self._enter(connection)

    def _enter(self, connection: Connection) -> None:
        protocol.send(connection, self._welcome)
        self.connections.append(connection)
        if self.full:
            self._close_listeners()
        os.eventfd_write(self.bell, 1)

    def _close_listeners(self) -> None:
        for listener, address in self._listeners.items():
            close_listener(listener, address)
