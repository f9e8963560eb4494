"""The critic's engine: values of plain transformers, the step of plain PyTorch, and tokens outside of the mask without effect."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import LENGTHS, batch_of, returns_of
from support.trainer_engines import fsdp_engine

from rlgraph.algorithms import ValueLoss
from rlgraph.algorithms.masks import Totals
from rlgraph.engines.forward.head import ValueHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.errors import DataError
from rlgraph.values.optimizers import AdamW

STEP = AdamW(lr=1e-2, eps=1e-3)
LOSS = ValueLoss()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def scored(tied: Path, tmp_path: Path) -> Path:
    """Return a folder of a reward model: the tiny model with a head for scores."""
    folder = tmp_path / "scored"
    shutil.copytree(tied, folder)
    file = next(folder.glob("*.safetensors"))
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    save_file(load_file(file) | {"score.weight": head}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def make() -> Any:
    engines: list[FsdpEngine] = []

    def build(path: Path, **settings: Any) -> FsdpEngine:
        engines.append(fsdp_engine(ValueHead(path), **{"optimizer": STEP, "dtype": torch.float32} | settings))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def plain_critic(path: Path) -> tuple[Any, torch.nn.Parameter]:
    from transformers import AutoModel

    return AutoModel.from_pretrained(path, dtype=torch.float32).eval(), torch.nn.Parameter(
        load_file(next(path.glob("*.safetensors")))["score.weight"].clone()
    )


def plain_values(model: Any, head: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return values [B, T] the plain way: of the state before each response token, every row by itself, padded on both sides."""
    width = batch["responses"].shape[1]
    tokens = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], torch.ones_like(batch["response_mask"])], dim=1).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    states = model(input_ids=tokens, attention_mask=mask, position_ids=positions).last_hidden_state[:, -width - 1 : -1]
    values: torch.Tensor = states @ head[0]
    return values


def test_values_are_those_of_the_head_over_the_state_before_each_token(make: Any, scored: Path) -> None:
    batch = batch_of(LENGTHS, holes=True)
    expected = torch.where(batch["response_mask"], plain_values(*plain_critic(scored), batch), 0)
    torch.testing.assert_close(make(scored).scores(batch), expected.detach(), atol=1e-4, rtol=0)


def test_values_begin_at_zero_where_the_folder_has_no_head(make: Any, tied: Path) -> None:
    assert not make(tied).scores(batch_of(LENGTHS)).any()


def test_a_head_of_several_numbers_is_refused(tied: Path, tmp_path: Path) -> None:
    folder = tmp_path / "labels"
    shutil.copytree(tied, folder)
    file = next(folder.glob("*.safetensors"))
    save_file(load_file(file) | {"score.weight": torch.zeros(3, 64)}, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"score.weight has shape \(3, 64\); a critic's head is one number over 64"):
        ValueHead(folder)


def test_an_update_is_the_step_of_plain_pytorch(make: Any, scored: Path) -> None:
    batch, engine = returns_of(batch_of(LENGTHS, holes=True)), make(scored)
    model, head = plain_critic(scored)
    optimizer = torch.optim.AdamW([*model.parameters(), head], lr=1e-2, eps=1e-3, weight_decay=0)
    for _ in range(2):
        value, _ = LOSS(plain_values(model, head, batch), batch, Totals.of(batch["response_mask"]))
        optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_([*model.parameters(), head], 1.0)
        optimizer.step()
        metrics = engine.update(batch, LOSS)
        assert metrics["critic/vf_loss"] == pytest.approx(value.item(), rel=1e-5)
        assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    expected = dict(model.named_parameters()) | {"score.weight": head}
    assert engine.weights().keys() == expected.keys()
    for name, tensor in engine.weights().items():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-5, rtol=0)


def test_returns_of_tool_tokens_and_padding_change_no_bit_of_an_update(make: Any, scored: Path) -> None:
    batch = returns_of(batch_of(LENGTHS, holes=True))
    outside = ~batch["response_mask"]
    other = batch | {name: torch.where(outside, float("nan"), batch[name]) for name in ("returns", "values")}
    first, second = make(scored), make(scored)
    assert first.update(batch, LOSS) == second.update(other, LOSS)
    assert all(torch.equal(tensor, second.weights()[name]) for name, tensor in first.weights().items())


def test_the_value_loss_falls(make: Any, tied: Path) -> None:
    batch, engine = returns_of(batch_of(LENGTHS)), make(tied)
    losses = [engine.update(batch, ValueLoss(clip=None))["critic/vf_loss"] for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]
