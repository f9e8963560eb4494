"""Channels of every transport, for tests that hold for all of them."""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from rlgraph.channels import Reader, ShmReader, ShmWriter, Writer, local_channel
from rlgraph.channels.tokens import Kind

Ends: TypeAlias = tuple[Writer, list[Reader]]
MakeShm: TypeAlias = Callable[..., tuple[ShmWriter, list[ShmReader]]]


@pytest.fixture
def make_shm(tmp_path: Path) -> Iterator[MakeShm]:
    numbers, made = itertools.count(), []

    def make(slots: int = 2, readers: int = 1, address: str = "", carrier: Kind | None = None) -> tuple[ShmWriter, list[ShmReader]]:
        writer = ShmWriter("edge", slots, readers, b"key", address or str(tmp_path / str(next(numbers))), carrier)
        made.append(writer)
        for _ in range(readers):
            made.append(ShmReader("edge", b"key", writer.address, 10))
        return writer, made[-readers:]

    yield make
    for end in made:
        end.close()


@pytest.fixture(params=["local", "shm", "tcp", "gloo"])
def make(request: pytest.FixtureRequest, make_shm: MakeShm) -> Callable[..., Ends]:
    """Return a function of (slots, readers) that gives the ends of a new channel called 'edge'."""
    if request.param == "shm":
        return make_shm
    if request.param == "tcp":
        return functools.partial(make_shm, address="127.0.0.1:0")
    if request.param == "gloo":
        return functools.partial(make_shm, address="127.0.0.1:0", carrier="gloo")
    return lambda slots=2, readers=1: local_channel("edge", slots, readers)
