"""Processes that hold a shared base, forked by a test."""

import os
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.lora import HostBase

BIG = 1 << 20  # numbers of the first weight
NUMBERS = {"one": 1.5, "two": -2.0}  # that each weight is full of
SEGMENT = "memfd:rlgraph base"


def fill_tensor(name: str, out: torch.Tensor) -> None:
    out.fill_(NUMBERS[name])


def mapped_bytes(pid: int) -> dict[str, int]:
    """The bytes of a base that a process has in memory, in all and by its share, and those that are its own."""
    found = {"rss": 0, "pss": 0, "private": 0}
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = SEGMENT in line
        elif ours and (size := re.match(r"(Rss|Pss|Private_Clean|Private_Dirty): +(\d+) kB", line)):
            found[size[1].partition("_")[0].lower()] += int(size[2]) * 1024
    return found


def hold_base(path: Path, there: Connection) -> None:
    """Take a base, touch all of it, say what it takes of memory, and hold it."""
    asked: list[str] = []

    def fill(name: str, out: torch.Tensor) -> None:
        asked.append(name)
        fill_tensor(name, out)

    wanted = {"one": ((BIG,), torch.float32), "two": ((7, 3), torch.float32)}
    held = HostBase(path).take(wanted, fill)
    found: dict[str, Any] = {"sums": [float(held[name].sum()) for name in wanted], "filled": asked}
    there.send(found | mapped_bytes(os.getpid()))
    time.sleep(1000)
