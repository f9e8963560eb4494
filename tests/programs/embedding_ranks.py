"""Two ranks of a model whose embedding is a unit of its own, or not, forked."""

from pathlib import Path

import torch
import torch.distributed as dist
from support.forked_workers import server
from support.tiny import LENGTHS, WeightedLikelihood, batch_of

from rlgraph.engines.forward.policy_head import PolicyHead
from rlgraph.engines.fsdp import sharding
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.sharding import local
from rlgraph.engines.optim import AdamW


def be_rank(folder: str, out: Path, rank: int, apart: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    if apart:
        sharding.UNIT_PARAMETERS = 1000
    engine = FsdpEngine(PolicyHead(folder), optimizer=AdamW(lr=1e-2), rank=rank, world=2, dtype=torch.float32, recompute=True)
    metrics = [engine.update(batch_of(LENGTHS), WeightedLikelihood()) for _ in range(3)]
    state = {name: local(tensor).clone() for name, tensor in engine.state().items()}
    torch.save({"metrics": metrics, "state": state, "units": [type(unit).__name__ for unit in engine._units]}, out / f"{rank}.pt")
    engine.close()
    dist.destroy_process_group()


def run_ranks(folder: Path, out: Path, *, apart: bool) -> list[dict[str, object]]:
    """Return what each rank found."""
    out.mkdir()
    ranks = [server.Process(target=be_rank, args=(str(folder), out, rank, apart), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]
