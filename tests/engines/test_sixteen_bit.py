"""Moments of bfloat16: rounding that is right on average, the same bits on a device, on a host and on ranks, and plans that count them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.low_bit_ranks import run_low_bit, settings_of
from support.tiny import LENGTHS, WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp import optimizers
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.optimizers import NAMES, Positions, SixteenBitAdamW, round_stochastically
from rlgraph.engines.fsdp.sharding import local
from rlgraph.errors import CheckpointError, GraphError
from rlgraph.graph.traits import ModelTraits
from rlgraph.plan.estimates import MOMENTS, OPTIMIZER, Workload, fully_sharded_memory
from rlgraph.plan.model_shapes import ModelShape

SETTINGS = settings_of("16bit")


@contextmanager
def engine_of(folder: Path, settings: rg.AdamW = SETTINGS, **given: Any) -> Iterator[FsdpEngine]:
    with closing(fsdp_engine(PolicyHead(folder), optimizer=settings, dtype=torch.float32, **given)) as engine:
        yield engine


def held(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor in engine.state().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def stepped(moments: torch.Tensor, step: int) -> torch.Tensor:
    """Round a matrix at a step, with the noise of the first moment."""
    noise = Positions(moments, step).noise(slice(0, len(moments)))
    return round_stochastically(moments, noise & 0xFFFF)


@pytest.mark.parametrize("number", [1.001, -3e-7, 2.6e-30])
def test_the_mean_of_what_is_rounded_is_the_number(number: float) -> None:
    numbers = torch.full((64, 1024), number)
    found = torch.stack([stepped(numbers, step).float() for step in range(16)])
    below, above = found.min(), found.max()
    assert below < numbers[0, 0] < above
    assert found.unique().numel() == 2
    assert found.double().mean().item() == pytest.approx(numbers[0, 0].item(), rel=0, abs=4 * (above - below).item() * 0.5 / 1024)
    assert torch.equal(stepped(found[0], 3).float(), found[0])  # what is bfloat16 stays


def test_numbers_that_are_none_stay_none_and_infinity_stays() -> None:
    numbers = torch.tensor([float("inf"), -float("inf"), float("nan")])
    found = round_stochastically(numbers, torch.full((3,), 0xFFFF, dtype=torch.int32))
    assert found[0] == float("inf")
    assert found[1] == -float("inf")
    assert found[2].isnan()
    assert round_stochastically(
        torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32), torch.tensor([9], dtype=torch.int32)
    ).isnan()


def test_noise_is_that_of_the_step_and_of_the_position() -> None:
    whole = torch.empty(64, 48)
    noise = [Positions(whole, step).noise(slice(0, 64)) for step in (1, 1, 2)]
    assert torch.equal(noise[0], noise[1])
    assert (noise[0] == noise[2]).float().mean() < 0.01
    assert torch.equal(Positions(whole, 1).noise(slice(5, 9)), noise[0][5:9])
    bits = torch.stack([(noise[0] >> bit) & 1 for bit in range(32)]).float().mean((1, 2))
    assert ((bits - 0.5).abs() < 4 * 0.5 / whole.numel() ** 0.5).all()


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_bits_repeat_on_device_and_host_and_from_checkpoints(
    model: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, batch, found = request.getfixturevalue(model), batch_of(LENGTHS), []
    for turn, on_host in enumerate((False, True, False)):
        if turn == 2:
            monkeypatch.setattr(optimizers, "PIECE", 640)  # and pieces of other sizes
        with engine_of(folder, offload="moments" if on_host else None) as engine:
            metrics = [engine.update(batch, WeightedLikelihood()) for _ in range(2)]
            engine.save(tmp_path / str(turn), 60.0)()
            metrics.append(engine.update(batch, WeightedLikelihood()))
            found.append((metrics, held(engine)))
        with engine_of(folder, offload=None if on_host else "moments") as again:
            again.load(tmp_path / str(turn))
            assert again.update(batch, WeightedLikelihood()) == metrics[-1]
            assert same(held(again), found[0][1])
    assert all(metrics == found[0][0] and same(state, found[0][1]) for metrics, state in found)
    moments = [tensor for name, tensor in found[0][1].items() if name.endswith(NAMES)]
    assert moments
    assert all(moment.dtype == torch.bfloat16 and moment.any() for moment in moments)


def test_checkpoints_of_other_moments_are_refused(tied: Path, tmp_path: Path) -> None:
    for name, settings in (("16", SETTINGS), ("32", rg.AdamW())):
        with engine_of(tied, settings) as engine:
            engine.save(tmp_path / name, 60.0)()
    with engine_of(tied) as engine, pytest.raises(CheckpointError, match=r"of 32 bits: leave out moments='16bit'\.$"):
        engine.load(tmp_path / "32")
    with engine_of(tied, rg.AdamW()) as engine, pytest.raises(CheckpointError, match=r"of 16 bits: write rg.AdamW\(moments='16bit'\)\.$"):
        engine.load(tmp_path / "16")


def test_a_toy_learns_as_well_as_with_float32(tied: Path) -> None:
    """After 60 steps the loss has fallen as far, within 2 % of the fall."""
    losses, batch = [], batch_of(LENGTHS)
    for moments in ("32bit", "16bit"):
        settings = rg.AdamW(lr=2e-3, betas=(0.9, 0.999), moments=moments)  # type: ignore[arg-type]
        with engine_of(tied, settings) as engine:
            losses.append([engine.update(batch, WeightedLikelihood())["actor/pg_loss"] for _ in range(60)])
    fall = losses[0][0] - losses[0][-1]
    assert fall > 0
    assert losses[1][0] == losses[0][0]
    assert abs(losses[1][-1] - losses[0][-1]) < 0.02 * fall


def test_a_second_moment_reaches_its_mean_which_rounding_to_the_nearest_misses() -> None:
    """At a decay of 0.999 a step adds a thousandth, which is less than half of what bfloat16 tells apart."""
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer, nearest = SixteenBitAdamW([weight], rg.AdamW(lr=1e-9)), torch.zeros((), dtype=torch.bfloat16)
    for _ in range(3000):
        weight.grad = torch.ones(64, 64)
        optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    expected = 1 - 0.999**3000
    assert optimizer.state[weight][NAMES[1]].float().mean().item() == pytest.approx(expected, rel=0.01)
    assert nearest.item() < 0.5 * expected


def test_ranks_have_the_bits_of_one(tied: Path, tmp_path: Path) -> None:
    """Equal gradients give equal bits, whatever the cut; a checkpoint of one rank goes on with two."""
    with engine_of(tied) as engine:
        engine.update(batch_of(LENGTHS), WeightedLikelihood())
        engine.save(tmp_path / "one", 60.0)()
        one = held(engine)
    ranks = run_low_bit(tied, "16bit", tmp_path)
    assert [rank["bits"] for rank in ranks] == [[True] * 6] * 2
    for name, tensor in one.items():
        if tensor.dim():
            assert torch.equal(torch.cat([rank["state"][name] for rank in ranks]), tensor), name


def test_plans_count_four_bytes_and_muon_refuses() -> None:
    shape = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=1000)
    sizes = {"itemsize": 2, "workers": 2, "width": 1, "rows": 8, "longest": 64, "usual": 64}
    traits = {bits: ModelTraits(optimizer=rg.AdamW(moments=bits)) for bits in MOMENTS}
    needs = {
        bits: fully_sharded_memory(Workload(shape=shape, **sizes, trained=True, traits=traits[bits])).stays["optimizer"] for bits in MOMENTS
    }
    assert needs["32bit"] == OPTIMIZER * shape.parameters // 2
    assert needs["16bit"] == needs["32bit"] // 2
    with pytest.raises(GraphError, match=r"Muon\(moments='16bit'\): only AdamW's moments have fewer than 32 bits"):
        rg.optim.Muon(moments="16bit")
