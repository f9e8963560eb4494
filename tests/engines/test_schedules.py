"""Schedules of the learning rate: the numbers of transformers, per optimizer step, and the same after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import LENGTHS, WeightedLikelihood, batch_of, tiny_llama
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.values.optimizers import RateSchedule

LR = 3e-4
CASES: list[tuple[str, dict[str, Any], RateSchedule]] = [
    ("constant", {}, rg.optim.Constant()),
    ("constant_with_warmup", {"num_warmup_steps": 4}, rg.optim.Constant(warmup_steps=4)),
    ("linear", {"num_warmup_steps": 3, "num_training_steps": 20}, rg.optim.Linear(warmup_steps=3, steps=20)),
    ("cosine", {"num_warmup_steps": 3, "num_training_steps": 20}, rg.optim.Cosine(warmup_steps=3, steps=20)),
    ("cosine", {"num_warmup_steps": 0, "num_training_steps": 7}, rg.optim.Cosine(steps=7)),
    *(
        (
            "warmup_stable_decay",
            {
                "num_warmup_steps": 4,
                "num_training_steps": 20,
                "scheduler_specific_kwargs": {"num_decay_steps": 6, "decay_type": decay, "min_lr_ratio": final},
            },
            rg.optim.WSD(warmup_steps=4, steps=20, decay_steps=6, decay=decay, final=final),  # type: ignore[arg-type]
        )
        for decay in ("cosine", "linear", "1-sqrt")
        for final in (0.0, 0.1)
    ),
]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before:UserWarning")
@pytest.mark.parametrize(("name", "settings", "schedule"), CASES)
def test_a_schedule_has_the_numbers_of_transformers(name: str, settings: dict[str, Any], schedule: RateSchedule) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    theirs = get_scheduler(name, optimizer, **settings)
    ours = rg.AdamW(lr=LR, schedule=schedule)
    for step in range(settings.get("num_training_steps", 20) + 1):
        assert ours.lr_at(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-20)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    "schedule", [rg.optim.Linear(steps=9, final=0.2), rg.optim.Cosine(steps=9, final=0.2), rg.optim.WSD(steps=9, decay_steps=3, final=0.2)]
)
def test_a_rate_ends_at_its_share_and_stays(schedule: RateSchedule) -> None:
    assert schedule(0) == 1
    assert [schedule(step) for step in (9, 10, 1000)] == pytest.approx([0.2] * 3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rg.optim.Cosine(steps=5, warmup_steps=5), r"Cosine\(warmup_steps=5, steps=5\): steps counts all"),
        (lambda: rg.optim.Linear(steps=0), r"Linear\(steps=0\)"),
        (lambda: rg.optim.Linear(steps=9, final=1.5), r"Linear\(final=1.5\)"),
        (lambda: rg.optim.WSD(steps=9, warmup_steps=5, decay_steps=5), "warm-up and decay are part of"),
        (lambda: rg.optim.WSD(steps=9, decay_steps=5, decay="sqrt"), r"WSD\(decay='sqrt'\)"),  # type: ignore[arg-type]
        (lambda: rg.optim.Constant(warmup_steps=-1), r"Constant\(warmup_steps=-1\)"),
        (lambda: rg.AdamW(warmup_steps=3, schedule=rg.optim.Cosine(steps=9)), r"write schedule=rg.optim.Cosine\(warmup_steps=3, …\)"),
        (lambda: rg.AdamW(schedule="cosine"), "schedule"),  # type: ignore[arg-type]
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_where_it_is_declared(make: Any, said: str) -> None:
    with pytest.raises(rg.errors.GraphError, match=said):
        make()


@pytest.mark.parametrize("optimizer", [rg.AdamW, rg.optim.Muon])
def test_a_resumed_trainer_goes_on_with_the_same_rate_and_the_same_bits(optimizer: Any, tmp_path: Path) -> None:
    model, batch = tiny_llama(tmp_path), batch_of(LENGTHS, holes=True)
    settings = optimizer(lr=1e-2, schedule=rg.optim.Cosine(warmup_steps=2, steps=6, final=0.1))

    def engine() -> FsdpEngine:
        return fsdp_engine(PolicyHead(model), optimizer=settings, dtype=torch.float32)

    one, whole = engine(), []
    for step in range(6):
        if step == 3:
            one.save(tmp_path / "stored", 60.0)()
        whole.append(one.update(batch, WeightedLikelihood()))
    bits = {name: tensor.clone() for name, tensor in one.weights().items()}
    one.close()
    again = engine()
    again.load(tmp_path / "stored")
    assert [again.update(batch, WeightedLikelihood()) for _ in range(3)] == whole[3:]
    assert [metrics["actor/lr"] for metrics in whole] == [settings.lr_at(step) for step in range(6)]
    assert all(torch.equal(tensor, bits[name]) for name, tensor in again.weights().items())
    again.close()
