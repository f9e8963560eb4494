"""Bounded channels between the workers of a plan: one writer, its readers, a fixed number of slots, deadlines."""

from rlgraph.channels.api import TRANSPORTS, Reader, Site, Statistics, Transport, Writer, open_onward, open_reader, open_writer
from rlgraph.channels.host.channel import HostReader, HostWriter
from rlgraph.channels.local import local_channel

__all__ = [
    "TRANSPORTS",
    "HostReader",
    "HostWriter",
    "Reader",
    "Site",
    "Statistics",
    "Transport",
    "Writer",
    "local_channel",
    "open_onward",
    "open_reader",
    "open_writer",
]
