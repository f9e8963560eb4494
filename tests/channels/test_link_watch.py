"""A connection between hosts ends when the other host acknowledges nothing, and not when its process reads nothing."""

import ctypes
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from rlgraph.channels.host import connection
from rlgraph.channels.host.connection import tune

SO_ATTACH_FILTER = 26
PLENTY = 64 * 2**20  # bytes, more than the sockets hold


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection, which is watched impatiently."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        tune(near)
        monkeypatch.setattr(connection, "LOST_S", 0.4)
        monkeypatch.setattr(connection, "LOOK_S", 0.1)
        near.settimeout(60)
        yield near, far


def deafen(link: socket.socket) -> None:
    """Let the kernel drop what arrives at a connection, unanswered, as if the way to it were cut."""
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # return 0: keep no byte
    link.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(drop)))


def test_a_cut_is_seen_while_bytes_are_under_way(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    deafen(far)
    near.sendall(b"a message")
    assert near.recv(1) == b""  # ended by the watch, long before TCP gives up


def test_a_peer_that_reads_nothing_for_long_keeps_its_connection(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    near.settimeout(1.5)  # several times what a lost host gets
    with pytest.raises(TimeoutError):
        near.sendall(bytes(PLENTY))
    far.setblocking(False)
    left = 0
    while left < PLENTY:
        try:
            left += len(far.recv(2**20)) or PLENTY
        except BlockingIOError:
            break
    near.send(b"more")  # raises if the connection was ended


def test_a_closed_connection_is_watched_no_longer() -> None:
    watch = connection.LinkWatch()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        watch.add(link)
    end = time.monotonic() + 60
    while watch._runs and time.monotonic() < end:
        time.sleep(0.05)
    assert not watch._runs
