"""An adapter computes what PEFT's does, trains alike on any number of ranks, and leaves its model as it is."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.lora_ranks import RANK4, assemble_matrices, engine_of, run_lora, train_adapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import folder_of
from support.peft_golden import ALPHA, GOLDEN, RANK, TARGETS, loss_of, matrices, tokens
from support.tiny import LENGTHS, WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine

from rlgraph.engines.forward import self_test
from rlgraph.engines.forward.head import PolicyHead, ValueHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.lora import BaseWeights, SavedAdapter, merge_adapter, peft_names, read_adapter, write_config
from rlgraph.errors import DataError, GraphError
from rlgraph.values.lora import CONFIG, FAMILIES, TENSORS, LoRA
from rlgraph.values.optimizers import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make() -> Iterator[Any]:
    engines: list[FsdpEngine] = []

    def build(path: Path, **given: Any) -> FsdpEngine:
        engines.append(engine_of(path, **given))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


class GoldenLoss:
    reads, needs_entropy = (), False

    def __call__(self, log_probs: torch.Tensor, batch: Any, totals: Any, entropy: Any) -> tuple[torch.Tensor, dict[str, float]]:
        return loss_of(log_probs), {}


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    """PEFT's own folder of the golden adapter."""
    golden = load_file(GOLDEN)
    with safe_open(GOLDEN, "pt") as file:
        (tmp_path / CONFIG).write_text(file.metadata()["adapter_config"])
    names = {name.removeprefix("grad."): tuple(tensor.shape) for name, tensor in golden.items() if name.startswith("grad.")}
    save_file(matrices(names), tmp_path / TENSORS)
    return tmp_path


def test_an_adapter_of_peft_gives_pefts_log_probs_gradients_and_merged_weights(make: Any, tied: Path, peft: Path) -> None:
    golden, lora = load_file(GOLDEN), LoRA.load(peft)
    assert (lora.rank, lora.alpha, lora.targets) == (RANK, ALPHA, tuple(sorted(TARGETS)))
    engine = make(tied, adapter=lora, optimizer=AdamW(lr=1e-2, grad_clip=1e9), micro_batch_tokens=1000)
    prompts, responses = tokens()[:, :1], tokens()[:, 1:]
    batch = {"prompts": prompts, "prompt_mask": prompts > 0, "responses": responses, "response_mask": responses > 0}
    torch.testing.assert_close(engine.scores(batch), golden["log_probs"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(engine.base_scores(batch), golden["base"], atol=1e-6, rtol=1e-6)
    before = {name: tensor.clone() for name, tensor in engine.weights().items()}
    engine.update(batch, GoldenLoss())
    state = engine.state()
    errors, norms = [], []
    for name in before:
        gradient, expected = state[f"moments.{name}.exp_avg"].full_tensor() / 0.1, golden[f"grad.base_model.model.{name}"]  # type: ignore[attr-defined]
        errors.append((gradient - expected).norm())
        norms.append(expected.norm())
        assert errors[-1] <= 5e-6 * norms[-1], name
    assert torch.stack(errors).norm() <= 1e-6 * torch.stack(norms).norm()
    whole = BaseWeights(tied).with_adapter(before, lora.scale, torch.float32)
    torch.testing.assert_close(whole["model.layers.1.mlp.down_proj.weight"][:4], golden["merged"], atol=1e-6, rtol=1e-6)


def test_a_folder_is_written_as_peft_reads_it_and_begins_with_the_same_bits(make: Any, tied: Path, tmp_path: Path) -> None:
    engine = make(tied)
    engine.update(batch_of(LENGTHS), WeightedLikelihood())
    weights = {name: tensor.clone() for name, tensor in engine.weights().items()}
    write_config(tmp_path, SavedAdapter.of(RANK4), "base", {name: tuple(t.shape) for name, t in weights.items()})
    save_file(
        {peft: weights[name] for peft, (name, _) in peft_names({n: tuple(t.shape) for n, t in weights.items()}).items()}, tmp_path / TENSORS
    )
    again = make(tied, adapter=LoRA.load(tmp_path))
    assert all(torch.equal(again.weights()[name], tensor) for name, tensor in weights.items())
    assert all(torch.equal(read_adapter(tmp_path)[name], tensor) for name, tensor in weights.items())
    with safe_open(GOLDEN, "pt") as file:
        by_peft = json.loads(file.metadata()["adapter_config"])
    own = json.loads((tmp_path / CONFIG).read_text())
    assert own.keys() <= by_peft.keys()
    assert {name for name in own if own[name] != by_peft[name]} <= {"base_model_name_or_path", "r", "lora_alpha", "target_modules"}


@pytest.mark.parametrize(
    ("entry", "value"),
    [("use_dora", True), ("use_rslora", True), ("rank_pattern", {"q_proj": 4}), ("bias", "all"), ("modules_to_save", ["lm_head"])],
)
def test_an_adapter_that_computes_more_is_refused_by_name(peft: Path, entry: str, value: Any) -> None:
    config = json.loads((peft / CONFIG).read_text())
    (peft / CONFIG).write_text(json.dumps(config | {entry: value}))
    with pytest.raises(DataError, match=entry):
        LoRA.load(peft)


def test_without_an_adapter_log_probs_are_the_bits_of_the_plain_model(make: Any, tied: Path) -> None:
    batch, plain, engine = batch_of(LENGTHS, holes=True), make(tied, adapter=None), make(tied)
    assert torch.equal(engine.scores(batch), plain.scores(batch))  # B begins at 0
    engine.update(batch, WeightedLikelihood())
    assert torch.equal(engine.base_scores(batch), plain.scores(batch))
    assert (engine.scores(batch) - plain.scores(batch)).abs().max() > 0.1


def test_state_shards_and_memory_are_those_of_the_adapter_alone(make: Any, tied: Path) -> None:
    engine = make(tied)
    assert all(".lora_" in name for name in engine.state() if name != "optimizer_steps")
    assert all(".lora_" in shard.name for shard in engine.weight_shards())
    frozen = [p for p in engine._head.parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) == sum(p.numel() for p in PolicyHead(tied).parameters())
    engine.update(batch_of(LENGTHS), WeightedLikelihood())
    assert not any(p.grad is not None for p in frozen)


@pytest.mark.parametrize("given", [{"recompute": True, "fused": True}, {"flat": True}, {"offload": "moments"}], ids=str)
def test_ways_to_save_memory_and_time_give_the_same_step(make: Any, tied: Path, given: dict[str, bool]) -> None:
    plain, other = train_adapter(make(tied)), train_adapter(make(tied, **given))
    assert plain["metrics"][1] == pytest.approx(other["metrics"][1], rel=1e-4)
    for one, two in zip(plain["weights"], other["weights"], strict=True):
        assert torch.allclose(one.tensor, two.tensor, atol=1e-5), one.name


def test_any_number_of_ranks_trains_the_same_adapter_and_reads_the_others_state(make: Any, tied: Path, tmp_path: Path) -> None:
    alone = make(tied)
    one = [train_adapter(alone)]
    two = run_lora(tied, tmp_path / "two", 2)
    sharing = run_lora(tied, tmp_path / "sharing", 2, context_parallel=2, flat=True)
    begins, weights = assemble_matrices(one, "begins"), assemble_matrices(one, "weights")
    for ranks in (two, sharing):
        assert all(torch.equal(tensor, begins[name]) for name, tensor in assemble_matrices(ranks, "begins").items())
        assert assemble_matrices(ranks, "weights").keys() == weights.keys()
        for name, tensor in assemble_matrices(ranks, "weights").items():
            assert torch.allclose(tensor, weights[name], atol=1e-5), name
        assert ranks[0]["resumed"]
        assert ranks[0]["metrics"] == ranks[1]["metrics"]
        torch.testing.assert_close(ranks[0]["scores"], one[0]["scores"], atol=1e-4, rtol=0)
        assert torch.equal(ranks[0]["base"], ranks[0]["base after"])
    alone.load(tmp_path / "two" / "stored")
    kept = assemble_matrices(two, "weights")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in alone.weights().items())
    assert alone.update(batch_of(LENGTHS, holes=True), WeightedLikelihood()) == pytest.approx(two[0]["third"], rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_with_an_adapter_is_the_model_with_merged_weights(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, batch = folder_of(family, tmp_path), self_test._batch()
    engine = fsdp_engine(PolicyHead(folder), optimizer=AdamW(lr=1e-2), dtype=torch.float32, adapter=LoRA(rank=2))
    draw = torch.Generator().manual_seed(0)
    for tensor in engine.weights().values():
        tensor.copy_(0.05 * torch.randn(tensor.shape, generator=draw))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(engine.base_scores(batch), self_test.score_single_rows(plain, batch), atol=1e-4, rtol=0)
    weights = BaseWeights(folder).with_adapter(engine.weights(), 16.0, torch.float32)
    assert len(weights.changed) == 7 * plain.config.num_hidden_layers
    plain.load_state_dict(dict(weights), strict=False)
    torch.testing.assert_close(engine.scores(batch), self_test.score_single_rows(plain, batch), atol=1e-3, rtol=0)
    engine.close()


def test_a_merge_is_rounded_once_and_the_thousandth_has_no_drift(tied: Path) -> None:
    base, draw = BaseWeights(tied), torch.Generator().manual_seed(0)
    name = "model.layers.0.self_attn.q_proj"
    adapters = [
        {f"{name}.lora_A.weight": torch.randn(4, 64, generator=draw), f"{name}.lora_B.weight": torch.randn(64, 4, generator=draw)}
        for _ in range(3)
    ]
    first = base.with_adapter(adapters[0], 2.0, torch.bfloat16)[f"{name}.weight"]
    for adapter in adapters[1:] * 10:
        base.with_adapter(adapter, 2.0, torch.bfloat16)[f"{name}.weight"]
    assert torch.equal(base.with_adapter(adapters[0], 2.0, torch.bfloat16)[f"{name}.weight"], first)
    a, b = adapters[0].values()
    exact = base[f"{name}.weight"].double() + 2.0 * b.double() @ a.double()
    assert torch.equal(first, merge_adapter(base[f"{name}.weight"], a, b, 2.0, torch.float32).to(torch.bfloat16))
    assert (first.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    off = base.with_adapter({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": torch.zeros(64, 4)}, 2.0, torch.float32)
    assert all(torch.equal(off[each], base[each].float()) for each in base)  # the undo is exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(96, 64), (33, 65)])
def test_a_merge_has_the_bits_of_a_sum_into_new_memory_and_leaves_the_base(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    drawn = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=drawn).to(dtype)
    a, b, before = torch.randn(8, shape[1], generator=drawn), torch.randn(shape[0], 8, generator=drawn), base.clone()
    assert torch.equal(merge_adapter(base, a, b, 0.7, dtype), torch.addmm(base.float(), b, a, alpha=0.7).to(dtype))
    assert torch.equal(base, before)


def test_an_adapter_of_another_model_or_of_unknown_targets_is_refused(make: Any, tied: Path) -> None:
    with pytest.raises(DataError, match="belong to different models"):
        BaseWeights(tied).with_adapter({"x.lora_A.weight": torch.zeros(2, 3), "x.lora_B.weight": torch.zeros(3, 2)}, 1.0, torch.float32)
    with pytest.raises(DataError, match="no projection \\['query'\\]"):
        engine_of(tied, adapter=LoRA(rank=2, targets=("q_proj", "query")))
    with pytest.raises(GraphError, match="without a target"):
        LoRA(rank=2, targets=())


class SquaredValues:
    """Half the mean of the squares of what the values lack of 1."""

    reads, needs_entropy = (), False

    def __call__(self, values: torch.Tensor, batch: Any, totals: Any) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.where(batch["response_mask"], (values - 1) ** 2, 0).sum() / (2 * totals.tokens), {}


def gradients(engine: FsdpEngine, batch: Any) -> dict[str, torch.Tensor]:
    """The gradients of a first update, which Adam's first moments are a tenth of."""
    engine.update(batch, SquaredValues())
    state = engine.state()
    return {name: state[f"moments.{name}.exp_avg"].full_tensor() / 0.1 for name in engine.weights()}  # type: ignore[attr-defined]


def test_a_critic_with_an_adapter_has_values_and_gradients_of_the_merged_critic(tied: Path) -> None:
    batch, draw = batch_of(LENGTHS, holes=True), torch.Generator().manual_seed(3)
    given: dict[str, Any] = {"optimizer": AdamW(lr=1e-2, grad_clip=1e9), "dtype": torch.float32}
    engine, plain = (fsdp_engine(ValueHead(tied), adapter=lora, **given) for lora in (RANK4, None))
    weights, whole = engine.weights(), plain.weights()
    assert "score.weight" in weights
    assert all(".lora_" in name for name in weights if name != "score.weight")
    assert torch.equal(engine.scores(batch), torch.zeros_like(engine.scores(batch)))  # a head of 0
    for name in sorted(weights):
        weights[name].copy_(0.1 * torch.randn(weights[name].shape, generator=draw))
    pairs = {name.removesuffix(".lora_A.weight"): weights[name] for name in weights if name.endswith(".lora_A.weight")}
    for name, a in pairs.items():
        whole[f"{name}.weight"].copy_(
            merge_adapter(whole[f"{name}.weight"], a, weights[f"{name}.lora_B.weight"], RANK4.scale, torch.float32)
        )
    whole["score.weight"].copy_(weights["score.weight"])
    torch.testing.assert_close(engine.scores(batch), plain.scores(batch), atol=1e-5, rtol=1e-5)
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    found, expected = gradients(engine, batch), gradients(plain, batch)
    torch.testing.assert_close(found["score.weight"], expected["score.weight"], atol=1e-6, rtol=1e-4)
    for name in pairs:
        of_matrix, b = RANK4.scale * expected[f"{name}.weight"], copies[f"{name}.lora_B.weight"]
        torch.testing.assert_close(found[f"{name}.lora_B.weight"], of_matrix @ copies[f"{name}.lora_A.weight"].t(), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found[f"{name}.lora_A.weight"], b.t() @ of_matrix, atol=1e-6, rtol=1e-4)
    for each in (engine, plain):
        each.close()


def test_a_critic_begins_with_a_policys_adapter(make: Any, tied: Path, peft: Path) -> None:
    policy, critic = make(tied, adapter=LoRA.load(peft)), fsdp_engine(ValueHead(tied), optimizer=AdamW(), adapter=LoRA.load(peft))
    own = {f"model.{name}": tensor for name, tensor in critic.weights().items() if name != "score.weight"}
    assert own.keys() == policy.weights().keys()
    assert all(torch.equal(policy.weights()[name], tensor) for name, tensor in own.items())
    critic.close()
