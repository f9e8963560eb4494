"""Data-parallel ranks of a trainer, forked: started by a test, `run_ranks`, and what each does, `be_rank`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support import forked_ranks
from support.tiny import LENGTHS, WeightedLikelihood, batch_of, returns_of
from support.trainer_engines import fsdp_engine
from torch.distributed import distributed_c10d

from rlgraph.engines.forward.head import PolicyHead
from rlgraph.values.optimizers import AdamW, Muon

MICRO_BATCH_TOKENS = 16


def run_ranks(kind: str, model: Path, out: Path, world: int) -> list[Any]:
    """Return what each rank saved: with "muon" or "flat" as `kind`, of a policy with Muon or with flat passes."""
    return forked_ranks.run_ranks(be_rank, world, kind, model, out=out)


def refused(*_: object) -> None:
    raise AssertionError("an object of another rank is unpickled")


def muon_rows_match() -> bool:
    """Whether this rank's rows of a step of Muon, from equal gradients, have the bits of the step of whole matrices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from rlgraph.engines.fsdp.optimizers import MuonWithAdamW

    class Layers(torch.nn.Module):
        def __init__(self, weights: list[torch.Tensor]) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(weights)

    draw = torch.Generator().manual_seed(0)
    weights, gradients = ([torch.randn(*shape, generator=draw) for shape in ((6, 4), (5, 8), (1, 3))] for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = Layers([weight.clone() for weight in weights])
    cut = Layers([distribute_tensor(weight, mesh, [Shard(0)]) for weight in weights])
    for model in (whole, cut):
        optimizer = MuonWithAdamW(model, Muon(lr=1e-2, weight_decay=0.1))  # type: ignore[arg-type]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if isinstance(parameter, DTensor) else gradient
        for _ in range(2):
            optimizer.step()
    pairs = zip(whole.parameters(), cut.parameters(), strict=True)
    return all(torch.equal(one, many.full_tensor()) for one, many in pairs)  # type: ignore[operator]


def be_rank(kind: str, folder: Path, out: Path, rank: int, world: int) -> None:
    distributed_c10d._tensor_to_object = refused  # type: ignore[assignment]
    with forked_ranks.process_group(out, rank, world):
        batch = returns_of(batch_of(LENGTHS, holes=True))
        loss = WeightedLikelihood(entropy=0.1)
        engine = fsdp_engine(
            PolicyHead(folder),
            optimizer=Muon(lr=1e-2, eps=1e-3, weight_decay=0.1) if kind == "muon" else AdamW(lr=1e-2, eps=1e-3),
            rank=rank,
            world=world,
            dtype=torch.float32,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            flat=kind == "flat",
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
        if kind == "muon":
            torch.save({"bits": muon_rows_match()}, out / f"{rank}.gathered.pt")
        engine.close()


def score_on_ranks(folder: Path, out: Path, world: int, batch_tokens: int, texts: tuple[list[str], list[str]]) -> list[torch.Tensor]:
    """Return the scores of a reward model as each rank found them, and after them the number of batches each has computed."""
    return forked_ranks.run_ranks(be_scorer, world, folder, batch_tokens, texts, out=out)


def be_scorer(folder: Path, batch_tokens: int, texts: tuple[list[str], list[str]], out: Path, rank: int, world: int) -> None:
    from rlgraph.engines.registry import score_engine

    torch.set_num_threads(1)
    place = SimpleNamespace(rank=rank, world=world, rendezvous=f"file://{out}/scorers", listen_fd=-1, device="cpu")
    model = SimpleNamespace(path=str(folder), dtype="float32", label=None, batch_tokens=batch_tokens)
    engine = score_engine(model, place)
    forward, computed = engine._forward, []
    engine._forward = lambda rows: computed.append(len(rows)) or forward(rows)
    twice = [engine.scores(*texts) for _ in range(2)]
    assert torch.equal(*twice)
    torch.save(torch.cat([twice[0], torch.tensor([len(computed) / 2])]), out / f"{rank}.pt")
