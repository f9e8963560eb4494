"""Fails the test that leaves something behind in its process, and takes it away: else a later test would fail, and only in some orders.

It looks for a process group of torch, another working folder and silenced logs. What a test itself leaves is told at that test,
what a fixture of a file leaves at the file's last test.
"""

import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


def group() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@dataclass(frozen=True)
class Seen:
    """What the process holds at one moment."""

    group: bool = field(default_factory=group)
    folder: str = field(default_factory=os.getcwd)
    silenced: int = field(default_factory=lambda: logging.root.manager.disable)


def remove_leftovers(*before: Seen) -> list[str]:
    """Bring the process back to the last of the moments, and name what was there at none of them."""
    now, last, left = Seen(), before[-1], []
    if now.group and not any(seen.group for seen in before):
        left.append("a process group: torch.distributed.is_initialized()")
        sys.modules["torch.distributed"].destroy_process_group()
    if all(now.folder != seen.folder for seen in before):
        left.append(f"the working folder {now.folder}")
        os.chdir(last.folder)
    if all(now.silenced != seen.silenced for seen in before):
        left.append(f"logging.disable({now.silenced})")
        logging.disable(last.silenced)
    return left


FILE, TEST = pytest.StashKey[tuple[Path, Seen]](), pytest.StashKey[list[Seen]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Any:
    seen = Seen()
    if FILE not in item.session.stash or item.session.stash[FILE][0] != item.path:
        item.session.stash[FILE] = item.path, seen
    item.stash[TEST] = [seen]
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    item.stash[TEST].append(Seen())  # with what the fixtures hold: those of the file go on
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    left: list[str] = []
    try:
        result = yield
    finally:
        if len(seen := item.stash.get(TEST, [])) == 2:
            left += [f"{item.name} leaves {what}" for what in remove_leftovers(*seen)]
        if FILE in item.session.stash and (nextitem is None or nextitem.path != item.path):
            left += [f"a fixture of {item.path.name} leaves {what}" for what in remove_leftovers(item.session.stash[FILE][1])]
    if left:
        pytest.fail("; ".join(left), pytrace=False)
    return result
