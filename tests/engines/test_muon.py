"""Muon: the step of torch's own for matrices of layers, AdamW's for the rest, the same on one rank and on several."""

from pathlib import Path

import pytest
import torch
from programs.data_parallel_ranks import run_ranks
from support.tiny import LENGTHS, WeightedLikelihood, batch_of, tiny_llama
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.optimizers import MuonWithAdamW
from rlgraph.errors import CheckpointError

SETTINGS = rg.optim.Muon(lr=1e-2, eps=1e-3, weight_decay=0.1)


def engine_of(model: Path, settings: rg.AdamW = SETTINGS) -> FsdpEngine:
    return fsdp_engine(PolicyHead(model), optimizer=settings, dtype=torch.float32)


@pytest.mark.parametrize(
    "settings", [SETTINGS, rg.optim.Muon(lr=2e-2, eps=1e-3, nesterov=False, momentum=0.8, ns_steps=3, adjust_lr="original")]
)
def test_a_step_is_torchs_muon_for_matrices_of_layers_and_adamw_for_the_rest(
    settings: rg.optim.Muon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's iterations in float32, as ours are on a CPU
    from transformers import AutoModelForCausalLM

    head = PolicyHead(AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path), dtype=torch.float32))
    theirs = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in head.named_parameters()}
    within = {name for name, parameter in theirs.items() if ".layers." in name and parameter.dim() == 2}
    muon = torch.optim.Muon(
        [theirs[name] for name in theirs if name in within],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.ns_steps,
        adjust_lr_fn=settings.adjust_lr,
    )
    rest = [theirs[name] for name in theirs if name not in within]
    adamw = torch.optim.AdamW(rest, settings.lr, settings.betas, settings.eps, settings.weight_decay, fused=True)
    ours = MuonWithAdamW(head, settings)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, parameter in head.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            theirs[name].grad = parameter.grad.clone()
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    assert len(within) == 14
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.stage("ranks")
def test_two_ranks_that_gather_a_matrix_take_the_step_of_one(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    one = engine_of(model)
    batch = batch_of(LENGTHS, holes=True)
    metrics = [one.update(batch, WeightedLikelihood(entropy=0.1)) for _ in range(2)]
    ranks = run_ranks("muon", model, tmp_path, 2)
    for name, tensor in one.weights().items():
        found = torch.cat([rank["weights"][name] for rank in ranks])
        torch.testing.assert_close(found, tensor, atol=2e-4, rtol=0)  # their gradients are other sums, and the iterations are bfloat16
    assert ranks[0]["metrics"][0] == pytest.approx(metrics[0], rel=1e-4)
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    same = torch.load(tmp_path / "0.gathered.pt")
    assert same["bits"], "equal gradients gave other bits on two ranks than on one"
    one.close()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    one = engine_of(model, rg.AdamW())
    one.save(tmp_path / "stored", 60.0)()
    one.close()
    other = engine_of(model)
    with pytest.raises(CheckpointError, match="momentum_buffer'; it is a checkpoint of another model or optimizer"):
        other.load(tmp_path / "stored")
    other.close()


def test_the_plan_counts_one_moment_for_the_matrices_of_layers(tmp_path: Path) -> None:
    def moments(optimizer: rg.AdamW) -> int:
        model = str(tiny_llama(tmp_path))
        rollout = rg.Generator(model, pool=rg.Pool("rollout", gpus=1)).rollout(rg.prompts([{"prompt": "1"}], count=2), group_size=2)
        policy = rg.Policy(model, pool=rg.Pool("train", gpus=1), optimizer=optimizer)
        rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], rollout)
        step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss())
        plan = rg.compile(rg.Graph("memory", step.metrics), rg.Cluster(gpus=2, gpu="H100"))
        return next(dict(each.parts)["optimizer"] for each in plan.memory if each.pool == "train")

    shapes = {name: tensor.shape for name, tensor in PolicyHead(tiny_llama(tmp_path)).named_parameters()}
    matrices = sum(shape.numel() for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    both, one = moments(rg.AdamW()), moments(rg.optim.Muon())
    assert both - one == pytest.approx(4 * matrices, rel=0.05)
