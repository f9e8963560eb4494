"""A large embedding is gathered by itself: the bits are those of one gathered with the head."""

from pathlib import Path

import pytest
import torch
from support.forked_ranks import process_group, run_ranks
from support.tiny import LENGTHS, WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine

from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp import sharding
from rlgraph.engines.fsdp.sharding import local
from rlgraph.values.optimizers import AdamW

pytestmark = pytest.mark.stage("ranks")


def be_rank(folder: Path, apart: bool, out: Path, rank: int, world: int) -> None:
    if apart:
        sharding.UNIT_PARAMETERS = 1000
    with process_group(out, rank, world):
        engine = fsdp_engine(PolicyHead(folder), optimizer=AdamW(lr=1e-2), rank=rank, world=world, dtype=torch.float32, recompute=True)
        metrics = [engine.update(batch_of(LENGTHS), WeightedLikelihood()) for _ in range(3)]
        state = {name: local(tensor).clone() for name, tensor in engine.state().items()}
        torch.save({"metrics": metrics, "state": state, "units": [type(unit).__name__ for unit in engine._units]}, out / f"{rank}.pt")
        engine.close()


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_an_embedding_of_its_own_changes_no_bit(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    together, apart = (run_ranks(be_rank, 2, folder, own, out=tmp_path / str(own)) for own in (False, True))
    for one, other in zip(together, apart, strict=True):
        assert "FSDPEmbedding" not in one["units"]
        assert ("FSDPEmbedding" in other["units"]) == (model == "untied")  # what the head shares stays with it
        assert one["metrics"] == other["metrics"]
        assert all(torch.equal(tensor, other["state"][name]) for name, tensor in one["state"].items())
