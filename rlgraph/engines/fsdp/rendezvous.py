"""Where the ranks of one model meet: a file on one host, a socket between hosts."""

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rlgraph.engines.fsdp.sharding import backends

TCP = "tcp://"


def meet(at: str, rank: int, world: int, listen_fd: int = -1) -> None:
    """Join the process group of a model's ranks; blocks until all are there.

    `at` is `file://` and a path, or `tcp://address:port`, at which rank 0 listens already: `listen_fd` is the descriptor of its socket,
    which is used up. So nobody else can take the port, and rank 0 is reached at that address alone.
    """
    if not at.startswith(TCP):
        dist.init_process_group(backends(), init_method=at, rank=rank, world_size=world)
        return
    host, _, port = at.removeprefix(TCP).rpartition(":")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host.strip("[]"),
        int(port),
        world,
        is_master=rank == 0,
        timeout=default_pg_timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd if rank == 0 else None,
    )
    dist.init_process_group(backends(), store=store, rank=rank, world_size=world)
