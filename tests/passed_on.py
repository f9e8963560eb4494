"""A channel whose readers are on three hosts, two of which get messages from the first reader."""

from dataclasses import replace

from rlgraph.channels import Reader, Site, Transport, Writer, open_onward, open_reader, open_writer


def passed_on(transport: Transport, path: str, slots: int, readers: int) -> tuple[Writer, list[Reader]]:
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
