"""Data-parallel ranks of a trainer, forked: started by a test, `run_ranks`, and what each does, `be_rank`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from forked import server
from tiny import LENGTHS, WeightedLikelihood, batch_of, returns_of
from torch.distributed import distributed_c10d

from rlgraph.algorithms import ValueLoss
from rlgraph.engines.forward.heads import PolicyHead, ValueHead
from rlgraph.engines.fsdp.adamw import AdamW
from rlgraph.engines.fsdp.engine import FsdpEngine

MICRO_BATCH_TOKENS = 16


def run_ranks(kind: str, model: Path, out: Path, world: int) -> list[Any]:
    """Return what each rank saved: of a policy or a critic."""
    ranks = [server.Process(target=be_rank, args=(kind, str(model), out, rank, world), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [0] * world
    return [torch.load(out / f"{rank}.pt") for rank in range(world)]


def refused(*_: object) -> None:
    raise AssertionError("an object of another rank is unpickled")


def be_rank(kind: str, folder: str, out: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    distributed_c10d._tensor_to_object = refused  # type: ignore[assignment]
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    batch = returns_of(batch_of(LENGTHS, holes=True))
    head, loss = (PolicyHead(folder), WeightedLikelihood(entropy=0.1)) if kind == "policy" else (ValueHead(folder), ValueLoss())
    engine = FsdpEngine(
        head,
        optimizer=AdamW(lr=1e-2, eps=1e-3),
        rank=rank,
        world=world,
        dtype=torch.float32,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    scores = engine.scores(batch)
    metrics = [engine.update(batch, loss) for _ in range(2)]
    write = engine.save(out / "stored", 60.0)
    shards = [(shard.name, shard.global_shape, shard.offsets, shard.tensor, shard.replica) for shard in engine.weight_shards()]
    saved = {"scores": scores, "metrics": metrics, "weights": engine.weights(), "shards": shards}
    torch.save(saved, out / f"{rank}.pt")
    engine.update(batch, loss)  # what is written is the copy of before
    write()
    engine.load(out / "stored")
    torch.save(engine.update(batch, loss), out / f"{rank}.resumed.pt")
    engine.close()
    dist.destroy_process_group()


def score_on_ranks(folder: Path, out: Path, world: int, batch_tokens: int, texts: tuple[list[str], list[str]]) -> list[torch.Tensor]:
    """Return the scores of a reward model as each rank found them, and after them the number of batches each has computed."""
    given = str(folder), out, world, batch_tokens, texts
    ranks = [server.Process(target=be_scorer, args=(rank, *given), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [0] * world
    return [torch.load(out / f"{rank}.scores.pt") for rank in range(world)]


def be_scorer(rank: int, folder: str, out: Path, world: int, batch_tokens: int, texts: tuple[list[str], list[str]]) -> None:
    from rlgraph.engines.load import score_engine

    torch.set_num_threads(1)
    place = SimpleNamespace(rank=rank, world=world, rendezvous=f"file://{out}/scorers", listen_fd=-1, device="cpu")
    model = SimpleNamespace(path=folder, dtype="float32", label=None, batch_tokens=batch_tokens)
    engine = score_engine(model, place)
    forward, computed = engine._forward, []
    engine._forward = lambda rows: computed.append(len(rows)) or forward(rows)
    twice = [engine.scores(*texts) for _ in range(2)]
    assert torch.equal(*twice)
    torch.save(torch.cat([twice[0], torch.tensor([len(computed) / 2])]), out / f"{rank}.scores.pt")
