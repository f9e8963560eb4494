"""Ranks that train an adapter, forked: started by a test, `run_lora`, and what each does, `be_rank`."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import server
from parallel_ranks import assembled, boxes
from tiny import LENGTHS, WeightedLikelihood, batch_of

from rlgraph.engines.forward.policy_head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.optim import AdamW
from rlgraph.values.lora import LoRA

# A large eps: else Adam makes a whole step of a gradient that is nothing but rounding, and no two ways to sum would agree.
STEP, RANK4 = AdamW(lr=1e-2, eps=1e-3), LoRA(rank=4, alpha=8.0)


def engine_of(folder: Path, rank: int = 0, world: int = 1, **given: Any) -> FsdpEngine:
    given = {"optimizer": STEP, "dtype": torch.float32, "micro_batch_tokens": 32, "adapter": RANK4} | given
    return FsdpEngine(PolicyHead(folder, fused=given.pop("fused", False)), rank=rank, world=world, **given)


def trained(engine: FsdpEngine, stored: Path | None = None) -> dict[str, Any]:
    """Take two steps, save, take a third, and go back to take it again."""
    batch = batch_of(LENGTHS, holes=True)
    found: dict[str, Any] = {"begins": boxes(engine), "base": engine.base_scores(batch)}
    found["metrics"] = [engine.update(batch, WeightedLikelihood()) for _ in range(2)]
    found["weights"], found["scores"], found["base after"] = boxes(engine), engine.scores(batch), engine.base_scores(batch)
    if stored is not None:
        write = engine.save(stored, 60.0)
        third = engine.update(batch, WeightedLikelihood())  # what is written is the copy of before
        weights = boxes(engine)
        write()
        engine.load(stored)
        again = engine.update(batch, WeightedLikelihood())
        same = [torch.equal(a.tensor, b.tensor) for a, b in zip(weights, boxes(engine), strict=True)]
        found |= {"resumed": third == again and all(same), "third": third}
    return found


def be_rank(folder: str, out: Path, rank: int, world: int, given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    engine = engine_of(Path(folder), rank, world, **given)
    torch.save(trained(engine, out / "stored"), out / f"{rank}.pt")
    engine.close()
    dist.destroy_process_group()


def run_lora(folder: Path, out: Path, world: int, **given: Any) -> list[dict[str, Any]]:
    """Return what each rank found."""
    out.mkdir()
    ranks = [server.Process(target=be_rank, args=(str(folder), out, rank, world, given), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [0] * world
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(world)]


def together(ranks: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """The whole matrices that the boxes of all ranks make up."""
    return assembled([rank[what] for rank in ranks])
