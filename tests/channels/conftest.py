"""Channels of every transport, for tests that hold for all of them."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from support.files_channel import FILES
from support.relay_channels import make_relay_channel

from rlgraph.channels import TRANSPORTS, HostReader, HostWriter, Reader, Site, Writer, open_reader, open_writer
from rlgraph.channels.host.protocol import CarrierName

Ends: TypeAlias = tuple[Writer, list[Reader]]
MakeShm: TypeAlias = Callable[..., tuple[HostWriter, list[HostReader]]]
WITHOUT_GPUS = [
    pytest.param(found, marks=[pytest.mark.ray, pytest.mark.stage("jobs")] if found.needs_ray else [], id=found.name)
    for found in (*TRANSPORTS.values(), FILES)
    if found.writer_keeps != "gpu"
]
PASSED_ON = [
    pytest.param(found, id=f"{found.name}, passed on") for found in TRANSPORTS.values() if found.passes_on and found.writer_keeps != "gpu"
]
ENCRYPTED = [
    pytest.param(found, id=f"{found.name}, encrypted", marks=pytest.mark.openssl) for found in TRANSPORTS.values() if found.encrypts
]


@pytest.fixture
def make_shm(tmp_path: Path) -> Iterator[MakeShm]:
    numbers, made = itertools.count(), []

    def make(
        slots: int = 2, readers: int = 1, address: str = "", carrier: CarrierName | None = None
    ) -> tuple[HostWriter, list[HostReader]]:
        writer = HostWriter("edge", slots, readers, b"key", address or str(tmp_path / str(next(numbers))), carrier)
        made.append(writer)
        for _ in range(readers):
            made.append(HostReader("edge", b"key", writer.address, 10))
        return writer, made[-readers:]

    yield make
    for end in made:
        end.close()


@pytest.fixture(scope="module")
def ray_driver() -> Iterator[dict[str, object]]:
    """Start Ray for ends in this process, and give what they share: an actor that stands for the driver."""
    import ray

    from rlgraph.runtime.driver.ray_cluster import start_ray, stop_ray

    ours = start_ray()
    yield {"an actor": ray.remote(Site).options(num_cpus=0).remote("", 1, 1, "")}
    if ours:
        stop_ray()


@pytest.fixture(params=[*WITHOUT_GPUS, *PASSED_ON, *ENCRYPTED])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Ends]]:
    """Return a function of (slots, readers) that gives the ends of a new channel called 'edge'."""
    numbers, made, here = itertools.count(), [], {}
    if request.param.needs_ray:
        here |= request.getfixturevalue("ray_driver")
    encrypt = "encrypted" in request.node.callspec.id

    def ends(slots: int = 2, readers: int = 1) -> Ends:
        path = str(tmp_path / str(next(numbers)))
        if "passed on" in request.node.callspec.id:
            writer, found = make_relay_channel(request.param, path, slots, readers)
            made.extend([writer, *found])
            return writer, found
        writer = open_writer(request.param, Site("edge", slots, readers, path, b"key", "127.0.0.1", here=here, encrypt=encrypt))
        made.append(writer)
        site = Site("edge", slots, readers, writer.address, b"key", timeout_s=10, here=here, encrypt=encrypt)
        found = [open_reader(request.param, site) for _ in range(readers)]
        made.extend(found)
        return writer, found

    yield ends
    for end in made:
        end.close()
