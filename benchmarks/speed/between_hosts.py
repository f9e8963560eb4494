"""Seconds of one batch of 16 MiB between the hosts of a job, beside a plain socket: rlgraph's channel, in plain and encrypted.

    python benchmarks/speed/between_hosts.py [--rounds 40] [--json PATH]

Two processes of this machine talk over the loopback interface, as two hosts do over a network. All ways are tried in turn, round by
round, so that other work of the machine meets each alike. A hop lasts from before the writer's `put` (the socket's `sendall`) to the
moment at which the reader has all bytes in memory, on the clock that both share. The plain socket sends from memory that is laid out
for sending, and receives into the same memory each time: no copy, no header, no process in between. A stream is `STREAM` batches, one
right after the other, with two slots; the socket's end of it is the last byte of the last one.
"""

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rlgraph.channels import HostReader, HostWriter

BYTES, STREAM, DEADLINE_S, WARM_UP = 16 << 20, 8, 120.0, 3
HERE, KEY = "127.0.0.1", b"key"
WAYS = {"rlgraph": False, "rlgraph, encrypted": True}
SOCKET = "plain socket"


def other_end(control: Connection) -> None:
    """Read what the first process writes, and tell when all of it was there."""
    torch.set_num_threads(1)
    readers = {name: HostReader(name, KEY, address, DEADLINE_S, encrypt=WAYS[name]) for name, address in control.recv().items()}
    plain = socket.create_connection(control.recv())
    memory, steps = memoryview(bytearray(BYTES)), dict.fromkeys(WAYS, 0)
    control.send(None)
    while (asked := control.recv()) is not None:
        name, count = asked
        for _ in range(count):
            if name == SOCKET:
                plain.recv_into(memory, BYTES, socket.MSG_WAITALL)
            else:
                readers[name].take(steps[name], DEADLINE_S)
                readers[name].release()
                steps[name] += 1
        control.send(time.monotonic())
    for reader in readers.values():
        reader.close()
    plain.close()


def measured(rounds: int) -> dict[str, Any]:
    control, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=other_end, args=(there,))
    process.start()
    torch.set_num_threads(1)
    writers = {name: HostWriter(name, 2, 1, KEY, f"{HERE}:0", encrypt=encrypt) for name, encrypt in WAYS.items()}
    control.send({name: writer.address for name, writer in writers.items()})
    with socket.create_server((HERE, 0)) as listener:
        control.send(listener.getsockname())
        plain = listener.accept()[0]
    control.recv()
    batch = torch.arange(BYTES // 4, dtype=torch.int32)
    data, steps = memoryview(batch.numpy().tobytes()), dict.fromkeys(WAYS, 0)

    def send(name: str) -> None:
        if name == SOCKET:
            plain.sendall(data)
        else:
            writers[name].put(steps[name], {"x": batch}, DEADLINE_S)
            steps[name] += 1

    found: dict[str, dict[str, list[float]]] = {name: {"hop": [], "stream": []} for name in (SOCKET, *WAYS)}
    for _ in range(rounds + WARM_UP):
        for name in found:
            for what, count in (("hop", 1), ("stream", STREAM)):
                control.send((name, count))
                time.sleep(0.005)  # the reader waits by then
                since = time.monotonic()
                for _ in range(count):
                    send(name)
                found[name][what].append(control.recv() - since)
    control.send(None)
    process.join()
    for writer in writers.values():
        writer.close()
    plain.close()
    return {name: {what: summary(seconds[WARM_UP:]) for what, seconds in each.items()} for name, each in found.items()}


def summary(seconds: list[float]) -> dict[str, float]:
    kept = sorted(seconds)
    return {"median_s": statistics.median(kept), "p10_s": kept[len(kept) // 10], "p90_s": kept[len(kept) * 9 // 10], "rounds": len(kept)}


def shares(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The speed of each way as a share of the plain socket's, by medians."""
    return {name: {what: found[SOCKET][what]["median_s"] / found[name][what]["median_s"] for what in ("hop", "stream")} for name in WAYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args()
    before = os.getloadavg()
    found = measured(options.rounds)
    share = shares(found)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    table = Table("", "16 MiB", "p10 - p90", f"{STREAM} in a row, each", "share of the socket", title=machine)
    for name, each in found.items():
        hop, stream = each["hop"], each["stream"]
        spread = f"{hop['p10_s'] * 1e3:.1f} - {hop['p90_s'] * 1e3:.1f} ms"
        part = "" if name == SOCKET else f"{share[name]['hop']:.0%}, in a row {share[name]['stream']:.0%}"
        table.add_row(name, f"{hop['median_s'] * 1e3:.1f} ms", spread, f"{stream['median_s'] / STREAM * 1e3:.1f} ms", part)
    Console(width=120).print(table)
    if options.json:
        values = {"machine": machine, "load_before": before, "bytes": BYTES, "stream": STREAM, "ways": found, "share_of_the_socket": share}
        options.json.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
