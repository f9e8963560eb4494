"""Bytes a second of a checkpoint's shard that goes to the driver's host, beside a plain socket copy of the same file with an fsync.

    python benchmarks/prediction/gathering.py [--rounds 15] [--mib 256] [--json PATH]

Two processes of this machine talk over the loopback interface, as two hosts do over a network, and both ways write to the same disk.
They are tried in turn, round by round. Each begins at the worker's first read of the file, which is in memory, and ends when the
worker has the driver's answer that all bytes are on the disk. rlgraph also compares their SHA-256 before it answers.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlgraph.runtime.checkpoint.gathering import CHUNK, DriverFolder, Gatherer
from rlgraph.runtime.messages import Written

HERE, KEY, WARM_UP = "127.0.0.1", b"key", 1
WAYS = {"rlgraph": False, "rlgraph, encrypted": True}
SOCKET = "plain socket and fsync"


def worker(control: Connection, folder: Path, mib: int) -> None:
    """Send a file as often as asked, and tell how long each took."""
    data = os.urandom(1 << 20) * mib
    file = Written("shard", len(data), hashlib.sha256(data).hexdigest())
    (folder / file.path).write_bytes(data)
    os.sync()
    control.send(None)
    addresses, plain_at = control.recv()
    plain = socket.create_connection(plain_at)
    step = 0
    while (name := control.recv()) is not None:
        step += 1
        since = time.monotonic()
        if name == SOCKET:
            memory = memoryview(bytearray(CHUNK))
            with (folder / file.path).open("rb") as opened:
                while count := opened.readinto(memory):
                    plain.sendall(memory[:count])
            plain.recv(1)
        else:
            with DriverFolder(addresses[name], KEY, 60.0, encrypt=WAYS[name]) as driver:
                driver.send(step, folder, [file])
        control.send(time.monotonic() - since)
    plain.close()


def copy(plain: socket.socket, target: Path, size: int) -> None:
    """Write what the socket brings, and answer when it is on the disk."""
    memory, left = memoryview(bytearray(CHUNK)), size
    with target.open("wb", buffering=0) as file:
        while left:
            count = plain.recv_into(memory, min(left, CHUNK), socket.MSG_WAITALL)
            file.write(memory[:count])
            left -= count
        os.fsync(file.fileno())
    plain.sendall(b"k")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def measured(folder: Path, rounds: int, mib: int) -> dict[str, list[float]]:
    (folder / "worker").mkdir()
    context = multiprocessing.get_context("spawn")
    control, there = context.Pipe()
    process = context.Process(target=worker, args=(there, folder / "worker", mib))
    process.start()
    control.recv()
    found: dict[str, list[float]] = {name: [] for name in (SOCKET, *WAYS)}
    taken = {name: folder / name for name in found}
    for target in taken.values():
        target.mkdir()
    gatherers = {name: Gatherer(HERE, KEY, taken[name], "round", None, encrypt=encrypt) for name, encrypt in WAYS.items()}
    with socket.create_server((HERE, 0)) as listener:
        control.send(({name: gatherer.address for name, gatherer in gatherers.items()}, listener.getsockname()))
        plain = listener.accept()[0]
    for _ in range(rounds + WARM_UP):
        for name in found:
            control.send(name)
            if name == SOCKET:
                copy(plain, taken[name] / "shard", mib << 20)
            found[name].append(control.recv())
            for target in taken.values():
                for left in target.iterdir():
                    remove(left)
    control.send(None)
    process.join()
    plain.close()
    for gatherer in gatherers.values():
        gatherer.close()
    return {name: seconds[WARM_UP:] for name, seconds in found.items()}


def summary(seconds: list[float], mib: int) -> dict[str, float]:
    rates = sorted((mib << 20) / each for each in seconds)
    return {
        "median_bytes_s": statistics.median(rates),
        "p10_bytes_s": rates[len(rates) // 10],
        "p90_bytes_s": rates[len(rates) * 9 // 10],
        "rounds": len(rates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="on the disk that is written to")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args()
    before = os.getloadavg()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        seconds = measured(folder, options.rounds, options.mib)
    finally:
        shutil.rmtree(folder)
    ways = {name: summary(each, options.mib) for name, each in seconds.items()}
    share = {name: statistics.median(a / b for a, b in zip(seconds[SOCKET], seconds[name], strict=True)) for name in WAYS}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    table = Table("", f"{options.mib} MiB", "p10 - p90", "share of the socket, round by round", title=machine)
    for name, each in ways.items():
        spread = f"{each['p10_bytes_s'] / 1e6:.0f} - {each['p90_bytes_s'] / 1e6:.0f} MB/s"
        table.add_row(name, f"{each['median_bytes_s'] / 1e6:.0f} MB/s", spread, f"{share[name]:.0%}" if name in share else "")
    Console(width=120).print(table)
    if options.json:
        values: dict[str, Any] = {"machine": machine, "load_before": before, "mib": options.mib, "ways": ways, "share_of_the_socket": share}
        options.json.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
