"""Every transport by name: its two ends, and its properties for the plan, the memory estimate, the worker and the tests.

A new transport is one file that defines `open_writer` and `open_reader`, and one line of `TRANSPORTS`; a user's own is one file and a
call of `register`. The file is imported when an end is made, so a plan can name a transport whose library is not installed.
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
    """One way to connect a writer and its readers. `module` defines `open_writer(transport, site)` and `open_reader(transport, site)`.

    `writer_keeps` is the memory in which the writer holds a copy of each slot, `reader_keeps` the memory in which each reader holds
    another: None if messages pass by reference, or if a reader maps the writer's. `carrier` is the library that sends columns on a GPU
    to another host. With `needs_ray` both ends must be workers of one Ray. One that `encrypts` follows `Site.encrypt` between hosts. With
    `passes_on`, `module` defines `open_onward(transport, site)` too: a reader can pass messages on to other readers.
    """

    name: str
    module: str
    reach: Reach
    writer_keeps: Memory | None
    reader_keeps: Memory | None = None
    carrier: Literal["nccl", "gloo"] | None = None
    needs_ray: bool = False
    encrypts: bool = False
    passes_on: bool = False


class Onward(Protocol):
    """Where readers connect to which another reader passes messages on."""

    @property
    def address(self) -> str: ...


@dataclass(frozen=True)
class Site:
    """The address of a channel, and its number of slots and readers, as both ends know them.

    The writer listens at the path `address`, or at a free port of `host` if the transport reaches other hosts; readers then find it at
    the writer's own `address`. Of the readers `local_readers` are on its host, and connect at the path. A reader waits `timeout_s` for the
    writer, and passes messages on to the readers of `onward`. The ends of one process share `here`.
    """

    channel: str
    slots: int
    readers: int
    address: str
    authkey: bytes = field(default=b"", repr=False)
    host: str = ""
    timeout_s: float = 0.0
    here: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    encrypt: bool = False  # what goes between hosts
    local_readers: int = 0
    onward: Onward | None = field(default=None, repr=False, compare=False)


class ListeningWriter(Writer, Protocol):
    """A writer whose `address` tells its readers where to connect."""

    @property
    def address(self) -> str: ...


# If several fit, a plan takes the first that reaches far enough and keeps its slots in the memory of the columns.
TRANSPORTS: Final[Mapping[str, Transport]] = {
    transport.name: transport
    for transport in (
        Transport("local", "rlgraph.channels.local", "process", writer_keeps=None),
        Transport("shm", "rlgraph.channels.host.channel", "host", writer_keeps="host"),
        Transport("peer", "rlgraph.channels.host.channel", "host", writer_keeps="gpu"),
        Transport("tcp", "rlgraph.channels.host.channel", "hosts", writer_keeps="host", reader_keeps="host", encrypts=True, passes_on=True),
        Transport("nccl", "rlgraph.channels.host.channel", "hosts", writer_keeps="gpu", reader_keeps="gpu", carrier="nccl", passes_on=True),
        Transport(
            "gloo", "rlgraph.channels.host.channel", "hosts", writer_keeps="host", reader_keeps="host", carrier="gloo", passes_on=True
        ),
        Transport("ray", "rlgraph.channels.host.ray_channel", "host", writer_keeps="host", reader_keeps="host", needs_ray=True),
        Transport("ray nccl", "rlgraph.channels.host.ray_channel", "host", "gpu", reader_keeps="gpu", carrier="nccl", needs_ray=True),
        Transport("ray gloo", "rlgraph.channels.host.ray_channel", "host", "host", reader_keeps="host", carrier="gloo", needs_ray=True),
    )
}


def register(transport: Transport) -> None:
    """Add a transport of your own under its name, in the process that compiles and launches; workers import its module alone.

    Raises ChannelError where another has that name.

    register(Transport("files", "mine.files", "host", writer_keeps="host"))  # from here on launch(transport="files") takes it
    """
    known = cast(dict[str, Transport], TRANSPORTS)
    if known.setdefault(transport.name, transport) != transport:
        raise ChannelError(f"transport '{transport.name}': there is one of that name; choose another name")


def transport_of(name: str) -> Transport:
    """Look up a transport by its name. Raises ChannelError for an unknown name."""
    if name not in TRANSPORTS:
        raise ChannelError(f"transport '{name}': there is none of that name; choose one of {list(TRANSPORTS)}")
    return TRANSPORTS[name]


def first_choice(reach: Reach, memory: Memory = "host") -> str:
    """Name the transport that a plan takes for readers within this reach and columns in this memory."""
    wanted = None if reach == "process" else memory
    return next(name for name, found in TRANSPORTS.items() if found.reach == reach and found.writer_keeps == wanted)


def open_writer(transport: str | Transport, site: Site) -> ListeningWriter:
    """Make the writing end of a channel. Raises ChannelError for a site on which the transport cannot work.

    writer = open_writer("shm", Site("scores", slots=2, readers=1, address="/tmp/job/scores", authkey=key))
    reader = open_reader("shm", Site("scores", slots=2, readers=1, address=writer.address, authkey=key, timeout_s=10))
    """
    found = transport if isinstance(transport, Transport) else transport_of(transport)
    return cast(ListeningWriter, importlib.import_module(found.module).open_writer(found, site))


def open_onward(transport: str | Transport, site: Site) -> Onward:
    """Listen for readers that a reader will pass messages on to; its `Site.onward` takes what this returns, whose `address` tells where."""
    found = transport if isinstance(transport, Transport) else transport_of(transport)
    return cast(Onward, importlib.import_module(found.module).open_onward(found, site))


def open_reader(transport: str | Transport, site: Site) -> Reader:
    """Make a reading end of a channel, whose writer listens at the site's address.

    Raises ChannelTimeout if none listens in time, ChannelError if it refuses the reader.
    """
    found = transport if isinstance(transport, Transport) else transport_of(transport)
    return cast(Reader, importlib.import_module(found.module).open_reader(found, site))
