"""Router replay: a trainer computes with the experts that a batch's columns name, and engines tell those they chose."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import folder_of
from support.forked_ranks import forked_ranks
from support.router_replay import (
    PROMPTS,
    be_replaying_rank,
    copy_with_weights,
    load_model,
    reference,
    replayed_batch,
    routes_of,
    weights_of,
)
from support.tiny import WeightedLikelihood, other_weights, tiny_llama, tiny_moe
from support.trainer_engines import fsdp_engine

from rlgraph.engines.api import Request
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.transformers.engine import TransformersEngine
from rlgraph.errors import DataError, GraphError
from rlgraph.values.optimizers import AdamW
from rlgraph.values.sampling import Sampling

WAYS: list[dict[str, Any]] = [
    {"shared": False},
    {"micro_batch_tokens": 40},  # some passes with shared prompts
    {"flat": True},
    {"recompute": True, "flat": True, "micro_batch_tokens": 16},
    {"recompute": True, "flat": False},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("model"))


def trainer(folder: Path, **settings: Any) -> FsdpEngine:
    given = {"router_replay": True, "dtype": torch.float32, "optimizer": AdamW(lr=1e-2, eps=1e-3, grad_clip=1e9)} | settings
    return fsdp_engine(PolicyHead(folder), **given)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Log-probs, loss and gradients of the reference under the replayed routes."""
    batch, own = replayed_batch(), load_model(model)
    logs = reference(own, batch)
    loss, _ = WeightedLikelihood()(logs, batch, type("Totals", (), {"tokens": int(batch["response_mask"].sum())})(), None)  # type: ignore[arg-type]
    loss.backward()
    return logs.detach(), loss.item(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_log_probs_and_gradients_are_those_of_the_named_experts_in_every_layout(
    way: dict[str, Any], model: Path, expected: tuple[torch.Tensor, float, dict[str, torch.Tensor]]
) -> None:
    logs, loss, gradients = expected
    batch = replayed_batch()
    with closing(trainer(model, **way)) as engine:
        assert torch.allclose(engine.scores(batch), logs, atol=2e-5)
        taken: dict[str, torch.Tensor] = {}

        def guard(metrics: Any) -> bool:
            taken.update({name: p.grad.full_tensor() for name, p in engine.trained_parameters().items() if p.grad is not None})
            return False

        metrics = engine.update(batch, WeightedLikelihood(), guard=guard)
        assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-4)
        named = {name.removeprefix("model."): gradient for name, gradient in gradients.items()}
        for name, gradient in taken.items():
            assert torch.allclose(gradient, named[name.removeprefix("model.")], atol=2e-5), name
        assert any("gate.weight" in name and gradient.abs().max() > 0 for name, gradient in taken.items())


def test_one_other_route_changes_the_log_probs_behind_it_and_no_others(model: Path) -> None:
    batch = replayed_batch(unknown=0.0)
    other = {name: column.clone() for name, column in batch.items()}
    other["routes"][5, 3, 0, 0] = next(expert for expert in range(8) if expert not in batch["routes"][5, 3, 0])
    with closing(trainer(model)) as engine:
        before, after = engine.scores(batch), engine.scores(other)
    differ = ((before - after).abs() > 1e-5).nonzero().tolist()  # several threads add up the rows of an expert in another order
    assert differ
    assert all(row == 5 and column > 3 for row, column in differ)
    assert torch.allclose(after, reference(load_model(model), other).detach(), atol=2e-5)


def test_own_routes_replayed_change_nothing_and_agree(model: Path) -> None:
    batch, own = replayed_batch(), load_model(model)
    for row in range(len(batch["responses"])):
        keep, count = batch["prompt_mask"][row], batch["responses"].shape[1]
        tokens = torch.cat([batch["prompts"][row][keep], batch["responses"][row]]).tolist()
        routes = routes_of(own, tokens).to(torch.int16)
        batch["prompt_routes"][row][keep], batch["routes"][row] = routes[:-count], routes[-count:]
    with closing(trainer(model)) as engine, closing(trainer(model, router_replay=False)) as unreplayed:
        assert torch.allclose(engine.scores(batch), unreplayed.scores(batch), atol=1e-6)
        metrics = engine.update(batch, WeightedLikelihood())
        assert metrics["moe/route_agreement"] == metrics["moe/routes_replayed"] == 1.0
        assert "moe/route_agreement" not in unreplayed.update(batch, WeightedLikelihood())


def test_a_batch_without_routes_is_computed_by_the_own_routers(model: Path) -> None:
    batch = {name: column for name, column in replayed_batch().items() if "routes" not in name}
    with closing(trainer(model)) as engine, closing(trainer(model, router_replay=False)) as unreplayed:
        assert torch.equal(engine.scores(batch), unreplayed.scores(batch))
        metrics = engine.update(batch, WeightedLikelihood())
    assert metrics["moe/routes_replayed"] == 0.0


def test_two_ranks_replay_as_one(model: Path, tmp_path: Path) -> None:
    ranks = forked_ranks(be_replaying_rank, 2, model, tmp_path)
    with ranks, closing(trainer(model, optimizer=AdamW(lr=1e-2, eps=1e-3), shared=False)) as engine:
        batch = replayed_batch()
        scores, metrics, after = engine.scores(batch), engine.update(batch, WeightedLikelihood()), engine.scores(batch)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert torch.allclose(found["scores"], scores, atol=1e-5)
        assert torch.allclose(found["after"], after, atol=1e-4)
        for name in ("moe/route_agreement", "moe/routes_replayed", "actor/grad_norm"):
            assert found["metrics"][name] == pytest.approx(metrics[name], rel=1e-4)


def test_the_engine_of_transformers_tells_the_routes_of_a_forward(model: Path) -> None:
    engine, own = TransformersEngine(model, dtype=torch.float32, routes=True), load_model(model)
    responses = engine.generate(PROMPTS, Sampling(max_tokens=8, ignore_eos=True), list(range(len(PROMPTS))))
    for prompt, response in zip(PROMPTS, responses, strict=True):
        tokens = [*prompt, *response.tokens]
        assert response.routes is not None
        assert response.routes.shape == (len(tokens), 2, 2)
        assert (response.routes[-1] == -1).all()
        assert torch.equal(response.routes[:-1].long(), routes_of(own, tokens)[:-1])


def test_tokens_keep_the_routes_of_the_weights_under_which_they_were_read(model: Path, tmp_path: Path) -> None:
    engine, own = TransformersEngine(model, dtype=torch.float32, routes=True), load_model(model)
    engine.submit(Request("one", PROMPTS[1], Sampling(max_tokens=8, ignore_eos=True), 1))
    for _ in range(4):
        engine.step()
    others = other_weights(weights_of(model), seed=0)
    engine.load_weights(others, running="recompute")
    done: dict[str, Any] = {}
    while not done:
        done = engine.step()
    response = done["one"]
    tokens = [*PROMPTS[1], *response.tokens]
    before, after = (routes_of(of, tokens) for of in (own, load_model(copy_with_weights(model, tmp_path / "others", others))))
    read = len(PROMPTS[1]) + 3
    assert response.versions == [0] * 4 + [1] * 4
    assert not torch.equal(before[read:-1], after[read:-1])
    assert torch.equal(response.routes[:-1].long(), torch.cat([before[:read], after[read:-1]]))


def test_what_cannot_be_replayed_is_refused(model: Path, tmp_path: Path) -> None:
    import rlgraph as rg

    with pytest.raises(GraphError, match="no routers of experts"):
        trainer(tiny_llama(tmp_path))
    with pytest.raises(GraphError, match="no routers of experts"):
        TransformersEngine(tiny_llama(tmp_path), routes=True)
    batch = replayed_batch()
    batch |= {name: batch[name] % 64 for name in ("prompts", "responses")}  # its vocabulary is smaller
    with (
        closing(trainer(folder_of("granitemoe", tmp_path))) as engine,
        pytest.raises(GraphError, match=r"router_replay=True: .* does not report which experts it chose"),
    ):
        engine.scores(batch)
    with closing(trainer(model)) as engine:
        with pytest.raises(DataError, match="has routes of 3 layers, but the trainer's model has 2"):
            engine.scores(replayed_batch(layers=3))
        batch = replayed_batch()
        batch |= {name: column[..., :1] for name, column in batch.items() if "routes" in name}
        with pytest.raises(DataError, match="are 1 experts per token, and the trainer's model has 2"):
            engine.scores(batch)
    pool = rg.Pool("train")
    for setting in ({"compiled": True}, {"tensor_parallel": 2}, {"context_parallel": 2}):
        with pytest.raises(GraphError, match="routers of layers that are compiled, or that ranks share"):
            rg.Policy("tiny", pool=pool, router_replay=True, **setting)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"router_replay=True\): 'megatron' has no such setting"):
        rg.Policy("tiny", pool=pool, router_replay=True, trainer="megatron")
    with pytest.raises(GraphError, match=r"routes=True\): 'sglang' has no such setting"):
        rg.Generator("tiny", pool=pool, routes=True, engine="sglang")
    with pytest.raises(GraphError, match="only engines of one GPU that decode one token per step report routes"):
        rg.Generator("tiny", pool=pool, routes=True, tensor_parallel=2)
