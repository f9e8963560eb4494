"""Ranks of a trainer as forked processes, which meet in a folder and leave there what they find."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.forked_workers import server


@contextmanager
def process_group(out: Path, rank: int, world: int) -> Iterator[None]:
    """Join the group of the ranks that share the folder, with one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


@contextmanager
def forked_ranks(target: Callable[..., None], world: int, *given: Any) -> Iterator[None]:
    """Run `target(*given, rank, world)` on each rank while the block runs, and wait for all at its end."""
    ranks = [server.Process(target=target, args=(*given, rank, world), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    yield
    for rank in ranks:
        rank.join(200)
    assert [rank.exitcode for rank in ranks] == [0] * world


def run_ranks(target: Callable[..., None], world: int, *given: Any, out: Path) -> list[Any]:
    """Run `target(*given, out, rank, world)` on each rank, and return what each saved as `RANK.pt`."""
    out.mkdir(parents=True, exist_ok=True)
    with forked_ranks(target, world, *given, out):
        pass
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(world)]
