"""The other end of a channel whose columns are carried apart, as a process that ends or stops in the middle of a transfer."""

import os
import signal
from multiprocessing.connection import Connection

import torch

from rlgraph.channels import HostReader, HostWriter
from rlgraph.channels.remote.transfer import Finish, Gloo

LARGE = torch.arange(4 << 20, dtype=torch.int64)  # 32 MiB, more than the sockets hold


def read(address: str, signal_number: int) -> None:
    """Be a reader that asks for the bytes and gets the signal instead of them."""

    def receive(self: Gloo, memory: torch.Tensor) -> Finish:
        return lambda: os.kill(os.getpid(), signal_number)

    Gloo.receive = receive  # type: ignore[method-assign]
    reader = HostReader("edge", b"key", address, 60)
    signal.pause()
    reader.close()


def write(pipe: Connection, signal_number: int) -> None:
    """Be a writer that gets the signal when its reader waits for the bytes."""

    def send(self: Gloo, memory: torch.Tensor) -> Finish:
        os.kill(os.getpid(), signal_number)
        raise AssertionError

    Gloo.send = send  # type: ignore[method-assign]
    writer = HostWriter("edge", 1, 1, b"key", "127.0.0.1:0", "gloo")
    pipe.send(writer.address)
    writer.put(0, {"x": LARGE}, 60)
    signal.pause()
