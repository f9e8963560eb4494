"""The other end of a host channel, in a process of its own that sleeps once it has done its part."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from support.forked_workers import server

from rlgraph.channels import HostReader, HostWriter

START_S = 180.0  # a process that starts on a busy machine


def be_peer(role: str, address: str, count: int, done: Connection) -> None:
    """Write or read `count` messages at the address."""
    if role == "write":
        writer = HostWriter("edge", 2, 1, b"key", address)
        for step in range(count):
            writer.put(step, {"x": torch.full((1000,), step), "who": ["écrivain"]}, START_S)
    else:
        reader = HostReader("edge", b"key", address, START_S)
        for step in range(count):
            got = reader.take(step, START_S)
            assert got["x"].tolist() == [step] * 1000, got
            del got
            reader.release()
    done.send(None)
    signal.pause()


@contextmanager
def peer(role: str, address: str, count: int) -> Iterator[tuple[Any, Any]]:
    """Start the other end, forked; gives its process, and a pipe that can be read once it has done its part."""
    done, telling = server.Pipe(duplex=False)
    process = server.Process(target=be_peer, args=(role, address, count, telling), daemon=True)
    process.start()
    try:
        yield process, done
    finally:
        process.kill()
        process.join()
        done.close()
        telling.close()
