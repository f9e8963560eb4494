"""Messages between the ranks of a model: bytes, which each rank decodes as the type it expects. Nothing from a peer is unpickled."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

T = TypeVar("T")


class RankFailed(Exception):
    """The work of a rank failed; the message is its reason."""


def gathered(mine: bytes, world: int, device: torch.device, group: Any = None) -> list[bytes]:
    """Gather the bytes of all ranks, in their order; every rank of the group calls it."""
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    rows = [torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(rows, torch.nn.functional.pad(own, (0, len(rows[0]) - len(own))), group=group)
    return [bytes(row[: int(size)].cpu().numpy()) for row, size in zip(rows, sizes, strict=True)]


def summed(metrics: list[dict[str, float]], world: int, device: torch.device, group: Any = None) -> dict[str, float]:
    """Sum the metrics of all micro-batches of all ranks of a group, in the order of the ranks: the same bits on every rank."""
    found = [metrics]
    if world > 1:
        own = msgspec.msgpack.encode([[*micro_batch.items()] for micro_batch in metrics])
        ranks = (msgspec.msgpack.decode(rank, type=list[list[tuple[str, float]]]) for rank in gathered(own, world, device, group))
        found = [[dict(micro_batch) for micro_batch in rank] for rank in ranks]
    total: dict[str, float] = {}
    for micro_batch in (micro_batch for rank in found for micro_batch in rank):
        for name, value in micro_batch.items():
            total[name] = total.get(name, 0.0) + value
    return total


def of_all(group: Any, work: Callable[[], T], kind: type[T], reason: Callable[[Exception], str]) -> list[T]:
    """Do a rank's work, and gather what each rank's gave, a value of a type that msgspec knows. A `group` of None is a world of one.

    Raises RankFailed on every rank, with the first reason, where the work of one failed with an OSError, a ValueError or a RuntimeError.
    """
    if group is None:
        return [work()]
    failed, mine = "", b""
    try:
        mine = msgspec.msgpack.encode(work())
    except (OSError, ValueError, RuntimeError) as error:
        failed = reason(error)
    told = gathered(msgspec.msgpack.encode((failed, mine)), dist.get_world_size(group), torch.device("cpu"), group)
    answers = [msgspec.msgpack.decode(answer, type=tuple[str, bytes]) for answer in told]
    failures = [text for text, _ in answers if text]
    if failures:
        raise RankFailed(failures[0])
    return [msgspec.msgpack.decode(answer, type=kind) for _, answer in answers]
