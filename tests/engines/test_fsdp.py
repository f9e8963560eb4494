"""An update by FSDP2 is the update of plain PyTorch, whatever the ranks, the micro-batches and the padding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs.data_parallel_ranks import run_ranks
from support.tiny import LENGTHS, WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from rlgraph.algorithms import AGGREGATIONS, GMPO, GSPO, Bypass, ClippedLoss, Reinforce, Rejection, RolloutCorrection, TruncatedIS
from rlgraph.algorithms.masks import Totals
from rlgraph.batching.packing import plan_micro_batches
from rlgraph.channels.weights.shards import Assembly, WeightShard
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp import engine as engine_module
from rlgraph.engines.fsdp import sharding
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.optimizers import clip_gradients
from rlgraph.errors import GraphError
from rlgraph.values.optimizers import AdamW

# A large eps: else Adam makes a whole step of a gradient that is nothing but rounding, and no two ways to sum would agree.
STEP = AdamW(lr=1e-2, eps=1e-3)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make() -> Iterator[Any]:
    engines: list[FsdpEngine] = []

    def build(path: Path, **settings: Any) -> FsdpEngine:
        engines.append(fsdp_engine(PolicyHead(path), **{"optimizer": STEP, "dtype": torch.float32} | settings))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def copies(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights().items()}


def plain_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def plain_scores(model: Any, batch: dict[str, torch.Tensor], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies [B, T] the plain way: every row by itself, padded on both sides."""
    width = batch["responses"].shape[1]
    tokens = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], torch.ones_like(batch["response_mask"])], dim=1).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits[:, -width - 1 : -1]
    table = (logits / temperature).log_softmax(-1)
    return table.gather(-1, batch["responses"][..., None])[..., 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("limit", [7, 1000])
def test_sequences_packed_flat_give_the_same_log_probs_and_the_same_step(make: Any, tied: Path, limit: int) -> None:
    batch = batch_of(LENGTHS, holes=True)
    padded, flat = make(tied), make(tied, flat=True, micro_batch_tokens=limit)
    assert torch.allclose(flat.scores(batch), padded.scores(batch), atol=1e-5)
    padded.update(batch, WeightedLikelihood())
    flat.update(batch, WeightedLikelihood())
    for name, weight in copies(padded).items():
        assert torch.allclose(copies(flat)[name], weight, atol=1e-5), name


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_log_probs_equal_those_of_transformers(make: Any, model: str, request: pytest.FixtureRequest) -> None:
    path, batch = request.getfixturevalue(model), batch_of(LENGTHS, holes=True)
    expected = torch.where(batch["response_mask"], plain_scores(plain_model(path), batch)[0], 0)
    torch.testing.assert_close(make(path).scores(batch), expected, atol=1e-5, rtol=0)


def test_log_probs_are_those_at_the_temperature_of_the_sampling(make: Any, tied: Path) -> None:
    batch = batch_of(LENGTHS)
    expected = torch.where(batch["response_mask"], plain_scores(plain_model(tied), batch, 0.5)[0], 0)
    torch.testing.assert_close(make(tied).scores(batch, temperature=0.5), expected, atol=1e-5, rtol=0)


def test_sums_of_squares_are_those_of_the_whole_distribution_and_come_with_the_same_log_probs(make: Any, tied: Path) -> None:
    batch, engine, model = batch_of(LENGTHS, holes=True), make(tied), plain_model(tied)
    log_probs, squares = engine.scores_and_squares(batch, temperature=0.5)
    assert torch.equal(log_probs, engine.scores(batch, temperature=0.5))
    expected = sum(
        plain_scores(model, {**batch, "responses": torch.full_like(batch["responses"], t)}, 0.5)[0][:, :1].exp() ** 2
        for t in range(model.config.vocab_size)
    )
    torch.testing.assert_close(squares[:, :1], expected * batch["response_mask"][:, :1], atol=1e-5, rtol=0)
    assert not squares[~batch["response_mask"]].any()


def test_an_update_without_a_token_leaves_the_weights_as_they_are(make: Any, tied: Path) -> None:
    engine, batch = make(tied), batch_of(LENGTHS)
    before = copies(engine)
    metrics = engine.update({**batch, "response_mask": torch.zeros_like(batch["response_mask"])}, WeightedLikelihood())
    assert metrics["actor/pg_loss"] == 0 == metrics["actor/grad_norm"]
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights().items())


def test_a_batch_without_a_token_moves_no_warm_up(make: Any, tied: Path) -> None:
    engine, batch = make(tied, optimizer=replace(STEP, warmup_steps=4)), batch_of(LENGTHS)
    nothing = {**batch, "response_mask": torch.zeros_like(batch["response_mask"])}
    found = [engine.update(part, WeightedLikelihood())["actor/lr"] for part in (batch, nothing, nothing, batch)]
    assert found == [0.25 * STEP.lr, 0.5 * STEP.lr, 0.5 * STEP.lr, 0.5 * STEP.lr]
    assert int(engine.state()["optimizer_steps"]) == 2


@pytest.mark.parametrize("loss", [GSPO(), GMPO(), ClippedLoss(aggregation="seq-mean-token-sum")])
def test_masked_rows_change_nothing(make: Any, tied: Path, loss: Any) -> None:
    batch = batch_of(LENGTHS)
    batch["old_log_probs"] = make(tied).scores(batch)
    kept = torch.arange(len(LENGTHS)) < len(LENGTHS) // 2
    masked, left = make(tied), make(tied)
    found = masked.update({**batch, "response_mask": batch["response_mask"] & kept[:, None]}, loss)
    alone = left.update({name: column[kept] for name, column in batch.items()}, loss)
    assert found == pytest.approx(alone, rel=1e-5)
    for name, weight in copies(masked).items():
        torch.testing.assert_close(weight, copies(left)[name], atol=1e-7, rtol=0)


@pytest.mark.parametrize("entropy", [0.0, 0.1])
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_an_update_is_the_step_of_plain_pytorch(make: Any, model: str, entropy: float, request: pytest.FixtureRequest) -> None:
    path, batch, loss = request.getfixturevalue(model), batch_of(LENGTHS, holes=True), WeightedLikelihood(entropy)
    plain = plain_model(path)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    engine = make(path, optimizer=replace(STEP, weight_decay=0.1, grad_clip=0.5))
    for _ in range(3):
        scores, entropies = plain_scores(plain, batch)
        value, _ = loss(scores, batch, Totals.of(batch["response_mask"]), entropies if entropy else None)
        optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        metrics = engine.update(batch, loss)
        assert metrics["actor/pg_loss"] == pytest.approx(value.item(), rel=1e-6)
        assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert metrics["actor/tokens"] == pytest.approx(1)
    expected, weights = dict(plain.named_parameters()), engine.weights()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-6, rtol=0)


def test_the_micro_batches_do_not_change_the_step(make: Any, tied: Path) -> None:
    batch = batch_of(LENGTHS, holes=True)
    results = []
    for limit in (1, 40, 10_000):
        engine = make(tied, micro_batch_tokens=limit)
        metrics = engine.update(batch, WeightedLikelihood(entropy=0.1))
        results.append((metrics, copies(engine)))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, results[0][1][name], atol=1e-6, rtol=0)


EVERY_LOSS = {
    **{mode: ClippedLoss(aggregation=mode, horizon=9 if mode.endswith("norm") else None) for mode in AGGREGATIONS},
    "gspo": GSPO(),
    "gmpo": GMPO(),
    "bypass": Bypass(Reinforce(), RolloutCorrection(TruncatedIS(), (Rejection("seq_mean_k1", 1.2),))),
}


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_the_micro_batches_do_not_change_loss_gradient_and_metrics_of_a_loss(make: Any, tied: Path, name: str) -> None:
    batch = batch_of(LENGTHS, holes=True)
    batch["response_mask"][1] = False  # a response of which nothing is trained
    old = make(tied).scores(batch)
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    batch |= {"old_log_probs": old + 0.3 * noise, "rollout_log_probs": old + 0.3 * noise}
    found = [make(tied, micro_batch_tokens=limit).update(batch, EVERY_LOSS[name]) for limit in (10_000, 1, 40)]
    assert found[0]["actor/grad_norm"] > 0
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def test_the_same_updates_give_the_same_bits(make: Any, tied: Path) -> None:
    batch = batch_of(LENGTHS)
    runs = []
    for _ in range(2):
        engine = make(tied, dtype=torch.bfloat16)
        metrics = [engine.update(batch, WeightedLikelihood()) for _ in range(3)]
        runs.append((metrics, copies(engine), engine.scores(batch)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], tensor) for name, tensor in runs[1][1].items())
    assert torch.equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_share_a_unit_take_the_same_step_in_every_bit(
    make: Any, tied: Path, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, runs = batch_of(LENGTHS), []
    for least, units in ((sharding.UNIT_PARAMETERS, 2), (1, 3)):  # two layers and what is around them
        monkeypatch.setattr(sharding, "UNIT_PARAMETERS", least)
        engine = make(tied, dtype=torch.bfloat16, recompute=recompute)
        assert len(engine._units) == units
        metrics = [engine.update(batch, WeightedLikelihood()) for _ in range(2)]
        runs.append((metrics, copies(engine), engine.scores(batch)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], tensor) for name, tensor in runs[1][1].items())
    assert torch.equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_alone_casts_weights_and_moves_gradients_once_an_update_to_the_same_bits(
    make: Any, tied: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    batch, runs, calls = batch_of(LENGTHS), [], list[str]()
    for place, name in ((_fsdp_param_group.FSDPParamGroup, "_to_unsharded"), (_fsdp_param_group, "foreach_reduce")):
        own = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, _own=own, _name=name: calls.append(_name) or _own(*given))
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(engine_module, "set_reshard", lambda units, more: None)
        engine, count = make(tied, dtype=dtype, micro_batch_tokens=16), len(calls)
        metrics = [engine.update(batch, WeightedLikelihood()) for _ in range(2)]
        runs.append((metrics, copies(engine), engine.scores(batch)))
        moved = [calls[count:].count(name) for name in ("_to_unsharded", "foreach_reduce")]
        passes, units = len(plan_micro_batches(batch, 1, 16)[0]), len(engine._units)
        assert passes > 2
        assert moved == ([3 * units, 2 * units] if kept else [(2 * passes + 1) * units, 2 * passes * units])  # and for scores
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], tensor) for name, tensor in runs[1][1].items())
    assert torch.equal(runs[0][2], runs[1][2])


def test_bfloat16_passes_train_float32_weights(make: Any, tied: Path) -> None:
    batch = batch_of(LENGTHS)
    engine = make(tied, dtype=torch.bfloat16, optimizer=AdamW(lr=1e-6))
    before = copies(engine)
    engine.update(batch, WeightedLikelihood())
    for name, tensor in engine.weights().items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, before[name])
        torch.testing.assert_close(tensor, before[name], atol=2e-6, rtol=0)


def test_training_resumes_from_a_state(make: Any, tied: Path) -> None:
    batch, loss = batch_of(LENGTHS), WeightedLikelihood()
    engine, other = make(tied), make(tied)
    engine.update(batch, loss)
    state = {name: tensor.clone() for name, tensor in engine.state().items()}
    expected = engine.update(batch, loss), engine.scores(batch)
    other.update(batch_of(LENGTHS, seed=1), loss)
    other.scores(batch)
    other.load_state(state)
    assert other.update(batch, loss) == expected[0]
    assert torch.equal(other.scores(batch), expected[1])


def test_several_ranks_need_a_process_group(tied: Path) -> None:
    with pytest.raises(GraphError, match="init_process_group"):
        fsdp_engine(PolicyHead(tied), optimizer=AdamW(), rank=0, world=2)


def test_two_ranks_take_the_step_of_one(make: Any, tied: Path, tmp_path: Path) -> None:
    results = run_ranks("policy", tied, tmp_path, 2)
    batch = batch_of(LENGTHS, holes=True)
    engine = make(tied)
    torch.testing.assert_close(results[0]["scores"], engine.scores(batch), atol=1e-5, rtol=0)
    expected = [engine.update(batch, WeightedLikelihood(entropy=0.1)) for _ in range(2)]
    assert results[0]["metrics"] == results[1]["metrics"]
    for found, wanted in zip(results[0]["metrics"], expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    for name, tensor in engine.weights().items():
        rows = torch.cat([result["weights"][name] for result in results])
        torch.testing.assert_close(rows, tensor, atol=1e-6, rtol=0)
    sent = [[WeightShard(*shard) for shard in result["shards"]] for result in results]
    whole = Assembly(sent).assemble([[shard.tensor for shard in shards] for shards in sent])
    assert list(whole) == list(engine.weights()) == [shard.name for shard in engine.weight_shards()]
    assert all(torch.equal(tensor, torch.cat([result["weights"][name] for result in results])) for name, tensor in whole.items())
    resumed = [torch.load(tmp_path / f"{rank}.resumed.pt") for rank in range(2)]
    assert resumed[0] == resumed[1] == pytest.approx(engine.update(batch, WeightedLikelihood(entropy=0.1)), rel=1e-4)
    engine.load(tmp_path / "stored")  # what two ranks wrote, one goes on from
    assert all(torch.equal(tensor, torch.cat([r["weights"][name] for r in results])) for name, tensor in engine.weights().items())
    assert engine.update(batch, WeightedLikelihood(entropy=0.1)) == pytest.approx(resumed[0], rel=1e-4)


@pytest.mark.parametrize(("most", "scale"), [(1.0, 0.2), (10.0, 1.0)])
def test_gradients_over_two_dims_of_ranks_are_scaled_down_to_their_norm_and_never_up(most: float, scale: float, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh, grad = init_device_mesh("cpu", (1, 1)), torch.tensor([3.0, 4.0])
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate(), Replicate()]))
        parameter.grad = distribute_tensor(grad.clone(), mesh, [Replicate(), Replicate()])
        assert clip_gradients([parameter], most) == pytest.approx(5.0)
        torch.testing.assert_close(sharding.local(parameter.grad), scale * grad)
    finally:
        dist.destroy_process_group()
