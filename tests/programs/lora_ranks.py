"""Ranks that train an adapter, forked: started by a test, `run_lora`, and what each does, `be_rank`."""

from pathlib import Path
from typing import Any

import torch
from programs.parallel_ranks import assemble_shards, copy_shards
from support.forked_ranks import process_group, run_ranks
from support.tiny import LENGTHS, WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine

from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.values.lora import LoRA
from rlgraph.values.optimizers import AdamW

# A large eps: else Adam makes a whole step of a gradient that is nothing but rounding, and no two ways to sum would agree.
STEP, RANK4 = AdamW(lr=1e-2, eps=1e-3), LoRA(rank=4, alpha=8.0)


def engine_of(folder: Path, rank: int = 0, world: int = 1, **given: Any) -> FsdpEngine:
    given = {"optimizer": STEP, "dtype": torch.float32, "micro_batch_tokens": 32, "adapter": RANK4} | given
    return fsdp_engine(PolicyHead(folder, fused=given.pop("fused", False)), rank=rank, world=world, **given)


def train_adapter(engine: FsdpEngine, stored: Path | None = None) -> dict[str, Any]:
    """Take two steps, save, take a third, and go back to take it again."""
    batch = batch_of(LENGTHS, holes=True)
    found: dict[str, Any] = {"begins": copy_shards(engine), "base": engine.base_scores(batch)}
    found["metrics"] = [engine.update(batch, WeightedLikelihood()) for _ in range(2)]
    found["weights"], found["scores"], found["base after"] = copy_shards(engine), engine.scores(batch), engine.base_scores(batch)
    if stored is not None:
        write = engine.save(stored, 60.0)
        third = engine.update(batch, WeightedLikelihood())  # what is written is the copy of before
        weights = copy_shards(engine)
        write()
        engine.load(stored)
        again = engine.update(batch, WeightedLikelihood())
        same = [torch.equal(a.tensor, b.tensor) for a, b in zip(weights, copy_shards(engine), strict=True)]
        found |= {"resumed": third == again and all(same), "third": third}
    return found


def be_rank(folder: Path, given: dict[str, Any], out: Path, rank: int, world: int) -> None:
    with process_group(out, rank, world):
        engine = engine_of(folder, rank, world, **given)
        torch.save(train_adapter(engine, out / "stored"), out / f"{rank}.pt")
        engine.close()


def run_lora(folder: Path, out: Path, world: int, **given: Any) -> list[dict[str, Any]]:
    """Return what each rank found."""
    return run_ranks(be_rank, world, folder, given, out=out)


def assemble_matrices(ranks: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """The whole matrices that the boxes of all ranks make up."""
    return assemble_shards([rank[what] for rank in ranks])
