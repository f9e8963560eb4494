"""The other end of a shared-memory channel, as a process: `peer.py write|read ADDRESS COUNT`, then waits for its end."""

import signal
import sys

import torch

from rlgraph.channels import HostReader, HostWriter

role, address, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "write":
    writer = HostWriter("edge", 2, 1, b"key", address)
    for step in range(count):
        writer.put(step, {"x": torch.full((1000,), step), "who": ["écrivain"]}, 90)
else:
    reader = HostReader("edge", b"key", address, 90)
    for step in range(count):
        got = reader.take(step, 90)
        assert got["x"].tolist() == [step] * 1000, got
        del got
        reader.release()
print("done", flush=True)
signal.pause()
