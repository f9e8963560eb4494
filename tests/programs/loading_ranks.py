"""Ranks that load models and tell what they hold, forked: started by a test, `run_ranks`, and what each does, `be_rank`."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.forked_workers import server

from rlgraph.engines.forward.policy_head import PolicyHead
from rlgraph.engines.forward.value_head import ValueHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.sharding import own_box
from rlgraph.engines.hf_models.folder_weights import PieceReader
from rlgraph.engines.optim import AdamW

HEADS = {"policy": PolicyHead, "critic": ValueHead}
Held = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]  # by parameter: whole shape, offsets, this rank's box


def load_shards(kind: str, folder: Path, rank: int, world: int) -> Held:
    """Load a model, and copy the boxes that this rank has of it."""
    engine = FsdpEngine(HEADS[kind](folder), optimizer=AdamW(), rank=rank, world=world, dtype=torch.float32)
    boxes = {name: own_box(name, parameter) for name, parameter in engine.trained().items()}
    found = {name: (box.global_shape, box.offsets, box.tensor.clone()) for name, box in boxes.items()}
    engine.close()
    return found


def run_ranks(models: list[tuple[str, Path]], out: Path, world: int) -> list[dict[tuple[str, str], Held]]:
    """Load each (kind, folder) on every rank, and return what each rank holds."""
    out.mkdir(parents=True)
    ranks = [server.Process(target=be_rank, args=(models, out, rank, world), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
    assert [rank.exitcode for rank in ranks] == [0] * world
    return [torch.load(out / f"{rank}.pt") for rank in range(world)]


def be_rank(models: list[tuple[str, Path]], out: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    found: dict[Any, Held] = {(kind, folder.name): load_shards(kind, folder, rank, world) for kind, folder in models}
    torch.save(found, out / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def load_forever(folder: Path, reading: Any) -> None:
    """Load a model, but stop in the middle of a file, once `reading` is set."""
    read, done = PieceReader._read, []

    def halting(*given: Any) -> Any:
        done.append(1)
        if len(done) > 3:
            reading.set()
            time.sleep(600)
        return read(*given)

    PieceReader._read = halting  # type: ignore[method-assign]
    load_shards("policy", folder, 0, 1)
