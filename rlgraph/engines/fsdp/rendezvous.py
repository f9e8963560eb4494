"""The rendezvous of the ranks of one model: a file on one host, a socket between hosts."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rlgraph.engines.fsdp.sharding import backends

if TYPE_CHECKING:
    from rlgraph.engines.load import Place

TCP = "tcp://"


def meet(at: str, rank: int, world: int, listen_fd: int = -1) -> None:
    """Join the process group of a model's ranks; blocks until all are there.

    `at` is `file://` and a path, or `tcp://address:port`. There rank 0 listens already, and `listen_fd` is the descriptor of its socket,
    which this call takes over. So no other process can take the port, and rank 0 listens at that address only.
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


def meet_at(place: "Place") -> None:
    """Join the process group of a model's ranks at its place, if it has several."""
    if place.world > 1:
        meet(place.rendezvous, place.rank, place.world, place.listen_fd)


def add_up(tensor: torch.Tensor) -> None:
    """Sum a tensor of the host over the ranks that have met, in place."""
    dist.all_reduce(tensor)
