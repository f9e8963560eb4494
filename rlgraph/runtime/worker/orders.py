"""How a program asks its warm processes for workers: an order, with the files that travel with it over a socket."""

import os
import socket
import sys
import tempfile
from collections.abc import Sequence

import msgspec

PID_BYTES = 8
MOST_FILES = 5  # of an order: the worker's output, its errors, what it is started with, where its id goes, and where later orders come


class ForkOrder(msgspec.Struct, frozen=True):
    """What a worker is started with; one that `keeps` its engine takes later orders. `spec` is pickled: `path` has what it names."""

    folder: str
    path: tuple[str, ...]
    spec: bytes
    driver: str
    keeps: bool = False


def send_order(to: socket.socket, order: ForkOrder, further: Sequence[int] = ()) -> None:
    """Send an order and the `further` files; the worker writes where this program does. Raises OSError if nobody takes it."""
    with tempfile.TemporaryFile() as given:
        given.write(msgspec.msgpack.encode(order))
        given.flush()
        given.seek(0)
        sys.stdout.flush()
        socket.send_fds(to, [b"1"], [1, 2, given.fileno(), *further])


def receive_order(of: socket.socket) -> list[int]:
    """Wait for an order and return its files; none when the driver has closed its end."""
    message, files, _, _ = socket.recv_fds(of, 1, MOST_FILES)
    return files if message else []


def take_over(files: Sequence[int]) -> ForkOrder:
    """Read the order that came with these files, and write to its output and errors from now on."""
    output, errors, given = files[:3]
    os.dup2(output, 1)
    os.dup2(errors, 2)
    with open(given, "rb") as file:
        order = msgspec.msgpack.decode(file.read(), type=ForkOrder)
    for fd in (output, errors):
        os.close(fd)
    return order
