"""Moments in host memory: the same bits as on the device, in steps and checkpoints."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import LENGTHS, WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp import optimizers
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.sharding import local
from rlgraph.errors import GraphError
from rlgraph.values.optimizers import AdamW


def engine_of(folder: Path, *, offloaded: bool) -> FsdpEngine:
    optimizer = AdamW(lr=1e-2, weight_decay=0.1, warmup_steps=2)
    return fsdp_engine(PolicyHead(folder), optimizer=optimizer, dtype=torch.float32, offload="moments" if offloaded else None)


def held(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor in engine.state().items()}


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_steps_and_checkpoints_have_the_same_bits(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder, batch, found = request.getfixturevalue(model), batch_of(LENGTHS), []
    for offloaded in (False, True):
        with closing(engine_of(folder, offloaded=offloaded)) as engine:
            metrics = [engine.update(batch, WeightedLikelihood()) for _ in range(3)]
            engine.save(tmp_path / str(offloaded), 60.0)()
            found.append((metrics, held(engine)))
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())
    with closing(engine_of(folder, offloaded=True)) as engine, closing(engine_of(folder, offloaded=False)) as other:
        engine.load(tmp_path / "False")  # what was saved with moments on the device goes on with moments on the host
        assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in held(engine).items())
        other.load(tmp_path / "True")
        assert engine.update(batch, WeightedLikelihood()) == other.update(batch, WeightedLikelihood())
        assert all(torch.equal(tensor, held(other)[name]) for name, tensor in held(engine).items())


def test_a_step_brings_the_moments_of_one_parameter_and_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where what comes to the device is a copy."""
    plain, streamed = (torch.nn.Linear(5, 7) for _ in range(2))
    streamed.load_state_dict(plain.state_dict())
    one = torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0.1, fused=True)
    two: Any = optimizers.HostMomentsAdamW(streamed.parameters(), 1e-2, weight_decay=0.1, fused=True)
    copied = []

    def away(tensor: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        copied.append(tensor.numel())
        return tensor.clone()

    for step in range(3):
        for model in (plain, streamed):
            model.zero_grad()
            model(torch.full((2, 5), float(step))).square().sum().backward()
        one.step()
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", away)
            two.step()
    assert copied == [35, 35, 7, 7] * 3
    for mine, other in zip(streamed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert all(torch.equal(two.state[mine][name], one.state[other][name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_other_moments_than_adamws_are_not_offloaded() -> None:
    with pytest.raises(GraphError, match="only AdamW's moments can be in host memory; leave out one"):
        rg.Policy("tiny", pool=rg.Pool("train"), optimizer=rg.optim.Muon(), offload="moments")


@pytest.mark.parametrize("stay", [False, True])
def test_moments_that_stay_are_where_they_were_while_the_engine_sleeps(stay: bool, tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, of whose memory only the moments' is taken."""
    taken: list[bool] = []
    with closing(fsdp_engine(PolicyHead(tied), optimizer=AdamW(), dtype=torch.float32, offload="never" if stay else None)) as engine:
        engine.update(batch_of(LENGTHS), WeightedLikelihood())
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_device", torch.device("cuda"))
            patched.setattr(torch.cuda, "empty_cache", lambda: taken.append(True))
            patched.setattr(engine._offloaded, "take_off", lambda: 1234)
            assert engine.sleep() == (0 if stay else 1234)
            engine.wake()
        assert taken == [True] * stay
