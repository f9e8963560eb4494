"""Every transport by name: its two ends, and what the plan, the memory estimate, the worker and the tests need to know of it.

A new transport is one file, which defines `open_writer` and `open_reader`, and one line of `TRANSPORTS`. Neither is imported before
an end is made, so that a plan knows a transport whose library is not there.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, cast

from rlgraph.channels.api import Reader, Writer
from rlgraph.errors import ChannelError

Reach: TypeAlias = Literal["process", "host", "hosts"]  # how far from the writer its readers may be
Memory: TypeAlias = Literal["host", "gpu"]


@dataclass(frozen=True)
class Transport:
    """One way from a writer to its readers. `module` defines `open_writer(transport, site)` and `open_reader(transport, site)`.

    `writer_keeps` says in which memory the writer holds a copy of each slot, and `reader_keeps` in which each reader holds one more:
    None where messages pass by reference, or a reader maps the writer's. `carrier` is the library that brings columns on a GPU to
    another host. `needs_ray` says that both ends must be workers of one Ray.
    """

    name: str
    module: str
    reach: Reach
    writer_keeps: Memory | None
    reader_keeps: Memory | None = None
    carrier: Literal["nccl", "gloo"] | None = None
    needs_ray: bool = False


@dataclass(frozen=True)
class Site:
    """Where an end is made, as both ends know it, and for how many slots and readers.

    The writer listens at the path `address`, or at a free port of `host` where the transport reaches other hosts, and its `address`
    then says where readers find it. A reader waits `timeout_s` for the writer. `here` is what ends of one process share.
    """

    channel: str
    slots: int
    readers: int
    address: str
    authkey: bytes = field(default=b"", repr=False)
    host: str = ""
    timeout_s: float = 0.0
    here: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


class ListeningWriter(Writer, Protocol):
    """A writer that says where its readers find it."""

    @property
    def address(self) -> str: ...


# Where several fit, a plan takes the first that reaches far enough and keeps its slots where the columns lie.
TRANSPORTS: Final[Mapping[str, Transport]] = {
    transport.name: transport
    for transport in (
        Transport("local", "rlgraph.channels.local", "process", writer_keeps=None),
        Transport("shm", "rlgraph.channels.host.channel", "host", writer_keeps="host"),
        Transport("peer", "rlgraph.channels.host.channel", "host", writer_keeps="gpu"),
        Transport("tcp", "rlgraph.channels.host.channel", "hosts", writer_keeps="host", reader_keeps="host"),
        Transport("nccl", "rlgraph.channels.host.channel", "hosts", writer_keeps="gpu", reader_keeps="gpu", carrier="nccl"),
        Transport("gloo", "rlgraph.channels.host.channel", "hosts", writer_keeps="host", reader_keeps="host", carrier="gloo"),
        Transport("ray", "rlgraph.channels.host.ray_channel", "host", writer_keeps="host", reader_keeps="host", needs_ray=True),
        Transport("ray nccl", "rlgraph.channels.host.ray_devices", "host", "gpu", reader_keeps="gpu", carrier="nccl", needs_ray=True),
        Transport("ray gloo", "rlgraph.channels.host.ray_devices", "host", "host", reader_keeps="host", carrier="gloo", needs_ray=True),
    )
}


def transport_of(name: str) -> Transport:
    """Look a transport up by its name. Raises ChannelError for a name that there is not."""
    if name not in TRANSPORTS:
        raise ChannelError(f"transport '{name}': there is none of that name; choose one of {list(TRANSPORTS)}")
    return TRANSPORTS[name]


def first_choice(reach: Reach, memory: Memory = "host") -> str:
    """Name the transport that a plan takes for readers so far away, and columns in that memory."""
    wanted = None if reach == "process" else memory
    return next(name for name, found in TRANSPORTS.items() if found.reach == reach and found.writer_keeps == wanted)


def open_writer(transport: str, site: Site) -> ListeningWriter:
    """Make the writing end of a channel. Raises ChannelError for a site where the transport cannot work.

    writer = open_writer("shm", Site("scores", slots=2, readers=1, address="/tmp/job/scores", authkey=key))
    reader = open_reader("shm", Site("scores", slots=2, readers=1, address=writer.address, authkey=key, timeout_s=10))
    """
    found = transport_of(transport)
    return cast(ListeningWriter, importlib.import_module(found.module).open_writer(found, site))


def open_reader(transport: str, site: Site) -> Reader:
    """Make a reading end of a channel, whose writer listens at the site's address.

    Raises ChannelTimeout where there is none in time, ChannelError where it refuses the reader.
    """
    found = transport_of(transport)
    return cast(Reader, importlib.import_module(found.module).open_reader(found, site))
