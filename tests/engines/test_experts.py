"""The trainer of a mixture of experts: grouped products, the loss that balances experts, metrics, and equal bits."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import folder_of
from support.tiny import WeightedLikelihood, tiny_moe
from support.trainer_engines import fsdp_engine
from torch.utils._python_dispatch import TorchDispatchMode

from rlgraph.engines.forward import self_test
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.errors import GraphError
from rlgraph.values.optimizers import AdamW

COEFFICIENT = 0.3
WAYS: list[dict[str, bool]] = [
    {"shared": False},
    {"shared": True},
    {"flat": True, "shared": False},
    {"flat": True},
    {"recompute": True, "flat": True},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("experts")
    return {name: folder_of(name, parent) for name in ("qwen3_moe", "mixtral", "granitemoe")}


def batch() -> dict[str, torch.Tensor]:
    found = self_test._batch()
    found["advantages"] = torch.randn(found["responses"].shape, generator=torch.Generator().manual_seed(1))
    return found


def updated(folder: Path, **settings: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    engine = fsdp_engine(PolicyHead(folder), optimizer=AdamW(lr=1e-3, grad_clip=1e9), dtype=torch.float32, **settings)
    with closing(engine):
        metrics = engine.update(batch(), WeightedLikelihood())
        return metrics, {name: weight.clone() for name, weight in engine.weights().items()}


@pytest.mark.parametrize(("name", "way"), [*zip(["mixtral", "qwen3_moe"] * 3, WAYS, strict=False)], ids=str)
def test_the_balancing_loss_and_its_gradient_are_those_of_transformers(name: str, way: dict[str, bool], folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    data = batch()
    plain = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32, attn_implementation="eager").eval()
    assert plain.config._experts_implementation == "grouped_mm"
    width = data["prompts"].shape[1]
    keep = torch.cat([data["prompt_mask"], data["response_mask"]], 1)
    ends = keep.flip(1).int().argmax(1)  # padding behind each row; its last token is no input
    keep[torch.arange(len(keep)), keep.shape[1] - 1 - ends] = False
    tokens = torch.cat([data["prompts"], data["responses"]], 1)
    positions = (keep.long().cumsum(1) - 1).clamp(min=0)
    out = plain(input_ids=tokens, attention_mask=keep.long(), position_ids=positions, output_router_logits=True, use_cache=False)
    logs = out.logits[:, width - 1 : -1].log_softmax(-1).gather(-1, data["responses"][..., None])[..., 0]
    likelihood = -(logs * data["advantages"])[data["response_mask"]].sum() / data["response_mask"].sum()
    (likelihood + COEFFICIENT * out.aux_loss).backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm().item()

    metrics, _ = updated(folders[name], load_balance=COEFFICIENT, **way)
    assert metrics["moe/load_balance_loss"] == pytest.approx(out.aux_loss.item(), rel=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(likelihood.item(), rel=1e-4, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)

    layers = torch.stack([torch.bincount(x[keep.flatten()].topk(2, -1)[1].flatten(), minlength=8) for x in out.router_logits])
    shares = layers / layers.sum(1, keepdim=True)
    assert metrics["moe/expert_share_max"] == pytest.approx(shares.max().item(), rel=1e-6)
    assert [metrics[f"moe/expert_share/{expert}"] for expert in range(8)] == pytest.approx(shares.mean(0).tolist(), rel=1e-6)
    tables = torch.stack([x[keep.flatten()].log_softmax(-1) for x in out.router_logits])
    assert metrics["moe/routing_entropy"] == pytest.approx(-(tables.exp() * tables).sum(-1).mean().item(), rel=1e-5)
    assert metrics["moe/dropped_tokens"] == 0


def test_passes_of_any_size_give_the_same_routing(folders: dict[str, Path]) -> None:
    whole, small = (updated(folders["qwen3_moe"], micro_batch_tokens=size)[0] for size in (8192, 80))
    names = [name for name in whole if name.startswith("moe/")]
    assert len(names) == 4 + 8
    assert {name: small[name] for name in names} == pytest.approx({name: whole[name] for name in names}, rel=1e-4, abs=1e-6)


def test_a_balancing_loss_that_cannot_be_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    import rlgraph as rg

    with pytest.raises(GraphError, match="no routers of experts"):
        updated(folder_of("llama", tmp_path), load_balance=0.1)
    with pytest.raises(GraphError, match="does not report which experts it chose"):
        updated(folders["granitemoe"], load_balance=0.1)
    assert not torch.distributed.is_initialized()
    with pytest.raises(GraphError, match="layers that are compiled, or that ranks share, do not report"):
        rg.Policy("tiny", pool=rg.Pool("train"), load_balance=0.1, compiled=True)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "granitemoe"])
def test_weights_are_taken_by_the_names_under_which_they_leave(name: str, folders: dict[str, Path]) -> None:
    with closing(fsdp_engine(PolicyHead(folders[name]), optimizer=AdamW(), dtype=torch.float32)) as engine:
        before = engine.scores(batch())
        doubled = {shard.name: 2 * shard.tensor for shard in engine.weight_shards()}
        engine.load_weights(doubled)
        assert all(torch.equal(shard.tensor, doubled[shard.name]) for shard in engine.weight_shards())
        assert not torch.equal(engine.scores(batch()), before)


class Waits(TorchDispatchMode):
    """Counts the operations after which a GPU's host waits for it, since what comes next depends on numbers, and those that add rows up
    where an index says, which a GPU sorts first.
    """

    KINDS = torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense, torch.ops.aten.bincount, torch.ops.aten.masked_select
    SUMS = torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_, torch.ops.aten._unsafe_index_put

    def __init__(self) -> None:
        super().__init__()
        self.count = self.sums = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        masks = args[1] if packet in (torch.ops.aten.index, torch.ops.aten.index_put) else ()
        self.count += packet in self.KINDS or any(mask is not None and mask.dtype == torch.bool for mask in masks)
        self.sums += packet in self.SUMS and args[0].dim() == 2 and (*args, False)[3] is True  # attention on a CPU has four dims
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_host_waits_no_more_often_for_more_layers_of_experts(recompute: bool, tmp_path: Path) -> None:
    waits, sums = [], []
    for layers in (2, 4):
        head = PolicyHead(tiny_moe(tmp_path / str(layers), layers=layers))
        engine = fsdp_engine(head, optimizer=AdamW(), dtype=torch.float32, flat=True, load_balance=COEFFICIENT, recompute=recompute)
        with closing(engine):
            engine.update(batch(), WeightedLikelihood())  # some things are looked at once
            with Waits() as counted:
                engine.update(batch(), WeightedLikelihood())
        waits.append(counted.count)
        sums.append(counted.sums)
    assert waits[0] == waits[1] > 0
    assert sums[0] == sums[1]
