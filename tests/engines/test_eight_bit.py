"""Moments of 8 bits: the steps of bitsandbytes to the bit, the same on several ranks, and checkpoints go on with the same bits."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.lora_ranks import RANK4, run_lora
from programs.low_bit_ranks import run_low_bit
from support.tiny import LENGTHS, WeightedLikelihood, batch_of, tiny_qwen
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.api import checked_source
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.optimizers import CODES, SCALES, scales_shape
from rlgraph.engines.fsdp.sharding import local
from rlgraph.errors import CheckpointError, GraphError

pytestmark = pytest.mark.stage("ranks")

installed = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
SETTINGS = rg.AdamW(lr=1e-2, weight_decay=0.1, warmup_steps=2, moments="8bit")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen(tmp_path_factory.mktemp("models"), "qwen3", vocab=320, head=16)


@contextmanager
def engine_of(folder: Path, settings: rg.AdamW = SETTINGS, **given: Any) -> Iterator[FsdpEngine]:
    with closing(fsdp_engine(PolicyHead(folder), optimizer=settings, dtype=torch.float32, **given)) as engine:
        yield engine


def held(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor in engine.state().items()}


@installed
@pytest.mark.parametrize("adapter", [None, rg.LoRA(rank=64)], ids=["whole", "adapter"])
def test_ten_steps_have_the_bits_of_the_librarys_own_optimizer(model: Path, adapter: rg.LoRA | None) -> None:
    from bitsandbytes.optim import AdamW8bit

    with engine_of(model, adapter=adapter) as engine:
        named = engine.trained_parameters()
        theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in engine.weights().items()}
        library: Any = AdamW8bit(theirs.values(), lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay)

        def same_gradients(*_: Any) -> None:
            for name, parameter in named.items():
                assert parameter.grad is not None
                theirs[name].grad = local(parameter.grad).clone()
            library.param_groups[0]["lr"] = engine._optimizer.param_groups[0]["lr"]

        engine._optimizer.register_step_pre_hook(same_gradients)
        for _ in range(10):
            engine.update(batch_of(LENGTHS), WeightedLikelihood())
            library.step()
        state, weights = held(engine), engine.weights()
    eight_bits = 0
    for name, parameter in theirs.items():
        assert torch.equal(weights[name], parameter), name
        found = library.state[parameter]
        small = parameter.numel() < 4096
        eight_bits += not small
        names = ("exp_avg", "exp_avg_sq") if small else CODES
        assert all(
            torch.equal(state[f"moments.{name}.{own}"], found[their]) for own, their in zip(names, ("state1", "state2"), strict=True)
        )
        scales = [] if small else zip(SCALES, ("absmax1", "absmax2"), strict=True)
        assert all(torch.equal(state[f"moments.{name}.{own}"].view(-1), found[their]) for own, their in scales)
    assert eight_bits >= 8


@installed
def test_a_checkpoint_goes_on_with_the_same_bits_and_not_with_other_moments(model: Path, tmp_path: Path) -> None:
    batch = batch_of(LENGTHS)
    with engine_of(model) as engine:
        engine.update(batch, WeightedLikelihood())
        engine.save(tmp_path / "8", 60.0)()
        metrics, weights = engine.update(batch, WeightedLikelihood()), held(engine)
    with engine_of(model) as again:
        again.load(tmp_path / "8")
        assert again.update(batch, WeightedLikelihood()) == metrics
        assert all(torch.equal(tensor, weights[name]) for name, tensor in held(again).items())
    with engine_of(model, rg.AdamW()) as other:
        with pytest.raises(
            CheckpointError, match=r"holds no 'moments.*exp_avg'.*of 8 bits: write rg.AdamW\(moments='8bit'\).*as many ranks as wrote it"
        ):
            other.load(tmp_path / "8")
        other.save(tmp_path / "32", 60.0)()
    with engine_of(model) as engine, pytest.raises(CheckpointError, match=r"exp_avg_8bit'.*of 32 bits: leave out moments='8bit'"):
        engine.load(tmp_path / "32")


@installed
def test_ranks_have_the_blocks_of_one(model: Path, tmp_path: Path) -> None:
    """Equal gradients give the same bits on two ranks, whose checkpoint goes on with one, and the other way around."""
    with engine_of(model) as engine:
        engine.update(batch_of(LENGTHS), WeightedLikelihood())
        engine.save(tmp_path / "one", 60.0)()
    ranks = run_low_bit(model, "8bit", tmp_path)
    assert [rank["bits"] for rank in ranks] == [[True, True, False, True, True, True]] * 2  # one has float32 moments on two ranks
    with engine_of(model) as engine:
        engine.load(tmp_path / "one")
        one = held(engine)
        engine.load(tmp_path / "stored")
        two = held(engine)
    pairs = {name: torch.cat([rank["state"][name] for rank in ranks]) for name in one if one[name].dim()}
    assert sum(name.endswith(CODES) for name in pairs) >= 8
    assert all(torch.equal(tensor, one[name]) for name, tensor in pairs.items())
    assert all(torch.equal(tensor, one[name]) for name, tensor in two.items())


@installed
def test_ranks_train_an_adapter_as_one_does(model: Path, tmp_path: Path) -> None:
    given = {"optimizer": rg.AdamW(lr=1e-2, eps=1e-3, moments="8bit"), "adapter": rg.LoRA(rank=64)}
    one, two = (run_lora(model, tmp_path / str(world), world, **given) for world in (1, 2))
    assert all(rank["resumed"] for rank in (*one, *two))
    assert two[0]["metrics"][1] == pytest.approx(one[0]["metrics"][1], rel=1e-3)


def test_blocks_never_lie_in_two_ranks() -> None:
    assert scales_shape(torch.empty(3, 4096)) == (3, 16)
    assert scales_shape(torch.empty(4096)) == (16, 1)
    assert scales_shape(torch.empty(4, 8, 256)) == (4, 8)
    assert scales_shape(torch.empty(65, 64)) is None  # 65 rows of a quarter of a block


def test_what_moments_of_8_bits_do_not_work_with_is_refused(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    for given, words in (({"offload": "moments"}, "have 32 bits; leave out one"), ({"tensor_parallel": 2}, "split them within blocks")):
        with pytest.raises(GraphError, match=words):
            rg.Policy("tiny", pool=rg.Pool("train"), optimizer=SETTINGS, **given)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"Muon\(moments='8bit'\): only AdamW's moments have fewer than 32 bits"):
        rg.optim.Muon(moments="8bit")
    monkeypatch.setattr("rlgraph.nodes.training.trained_model.is_installed", lambda: False)
    with pytest.raises(GraphError, match=r"bitsandbytes is not installed: pip install 'rlgraph-dataflow\[lowbit\]'"):
        checked_source(compiled(model, SETTINGS))


def test_the_plan_counts_two_bytes_and_the_scales(model: Path) -> None:
    assert planned(model, SETTINGS) / planned(model, rg.AdamW()) == pytest.approx((2 + 8 / 256) / 8, rel=1e-4)
    assert planned(model, SETTINGS, adapter=RANK4) / planned(model, rg.AdamW(), adapter=RANK4) == pytest.approx(0.2539, rel=1e-3)


def planned(model: Path, optimizer: rg.AdamW, **given: Any) -> int:
    plan = compiled(model, optimizer, **given)
    return next(dict(each.parts)["optimizer"] for each in plan.memory if each.pool == "train")


def compiled(model: Path, optimizer: rg.AdamW, **given: Any) -> rg.Plan:
    generator = rg.Generator(str(model), pool=rg.Pool("rollout", gpus=1), sampling=rg.Sampling(max_tokens=8))
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], count=2), group_size=2)
    policy = rg.Policy(str(model), pool=rg.Pool("train", gpus=1), optimizer=optimizer, **given)
    rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], rollout)
    step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    return rg.compile(rg.Graph("memory", step.metrics), rg.Cluster(gpus=2, gpu="H100"))


@installed
def test_its_import_downloads_no_kernels(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("print('asked')\ndef get_kernel(*_, **__): raise ValueError\n")
    code = "from rlgraph.engines.precision import bitsandbytes as b; b().functional; print('between', flush=True); import kernels"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(rg.__file__).parents[1]}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "between\nasked\n"
    assert "Failed to load" not in done.stderr
