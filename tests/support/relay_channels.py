"""Channels whose readers pass messages on to each other: on three hosts, or by any route."""

from collections.abc import Mapping
from dataclasses import replace

from rlgraph.channels import Reader, Site, Transport, Writer, open_onward, open_reader, open_writer


def make_relay_channel(transport: Transport, path: str, slots: int, readers: int) -> tuple[Writer, list[Reader]]:
    """Make a channel whose first reader, on another host, passes messages on: to the second on its own host, to the third on a next one.

    Any more are on the writer's host.
    """
    local = max(readers - 3, 0)
    writer = open_writer(transport, Site("edge", slots, min(readers, 1) + local, path, b"key", "127.0.0.1", local_readers=local))
    site = Site("edge", slots, 1, writer.address, b"key", timeout_s=10)
    if readers == 1:
        return writer, [open_reader(transport, site)]
    onward = open_onward(transport, Site("edge", slots, min(readers - 1, 2), f"{path}+", b"key", "127.0.0.1", local_readers=1))
    where = [f"{path}+", onward.address, *[path] * local][: readers - 1]
    return writer, [
        open_reader(transport, replace(site, onward=onward)),
        *(open_reader(transport, replace(site, address=at)) for at in where),
    ]


def make_routed_channel(
    transport: Transport, path: str, slots: int, writer: str, route: Mapping[str, str], hosts: Mapping[str, int]
) -> tuple[Writer, Mapping[str, Reader]]:
    """Make a channel whose readers get messages as a route says: over a port between hosts, and over a path on one."""

    def listening(feeder: str) -> Site:
        fed = [reader for reader, by in route.items() if by == feeder]
        local = sum(hosts[reader] == hosts[feeder] for reader in fed)
        return Site("edge", slots, len(fed), f"{path}.{feeder}", b"key", "127.0.0.1", local_readers=local)

    made = open_writer(transport, listening(writer))
    onward = {one: open_onward(transport, listening(one)) for one in set(route.values()) - {writer}}
    ports = {writer: made.address, **{one: acceptor.address for one, acceptor in onward.items()}}
    readers = {}
    for reader, feeder in route.items():
        address = f"{path}.{feeder}" if hosts[reader] == hosts[feeder] else ports[feeder]
        readers[reader] = open_reader(transport, Site("edge", slots, 1, address, b"key", timeout_s=10, onward=onward.get(reader)))
    return made, readers
