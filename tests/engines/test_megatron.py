"""Megatron-Core trains what the trainer "fsdp" does, step by step, however its ranks share the model, and each reads the other's states."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.parallel_ranks import (
    ADAMW,
    Case,
    assemble_shards,
    batch_and_loss,
    check_saved,
    check_training,
    continue_training,
    engine_of,
    run_exporting,
    run_one_process,
)
from support.families import folder_of
from support.tiny import tiny_mixture, tiny_qwen

import rlgraph as rg
from rlgraph.engines.forward import flash4
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.engines.megatron.modules import check_folder
from rlgraph.engines.megatron.spec import TRAINER
from rlgraph.errors import DataError, GraphError
from rlgraph.nodes.training.trained_model import check_whole_vocabulary
from rlgraph.settings import Recompute

pytestmark = pytest.mark.stage("plugins")

installed = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
AFTER_STEPS = {"atol": 1e-5, "rtol": 2e-5}  # in which rounding adds up
GOES_ON = {"rel": 3e-4, "abs": 1e-5}  # the metrics of further ones: with AVX2 alone a norm of gradients was 1.5e-4 off
STEPS = 5
DENSE = ("llama", "qwen2", "qwen3")
CRITIC, SAVING, ODD = ("critic",), ("saving",), ("odd", "odd tied", "odd saving")  # odd is a vocabulary that ranks do not divide
TP, CP, PP = {"tensor_parallel": 2}, {"context_parallel": 2}, {"pipeline_parallel": 2}
EP, EP4 = {"expert_parallel": 2}, {"expert_parallel": 4}
# The world, what its ranks share, and the models: all of them where one thing is shared, some where two or three are.
RANKS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {
    "alone": (1, {}, DENSE + CRITIC + SAVING),
    "dp2": (2, {}, DENSE[:1]),
    "tp2": (2, TP, DENSE + CRITIC + SAVING + ("selective",) + ODD),
    "tp2 × dp2": (4, TP, ("qwen2", "critic")),
    "tp4": (4, {"tensor_parallel": 4}, ("large",)),
    "pp2": (2, PP, DENSE + CRITIC + SAVING),
    "pp2 × dp2": (4, PP, ("qwen3",)),
    "pp4": (4, {"pipeline_parallel": 4}, ("large",)),
    "tp2 × pp2": (4, TP | PP, ("llama", "critic", "odd tied")),
    "cp2": (2, CP, DENSE + CRITIC + SAVING),
    "cp2 × dp2": (4, CP, ("qwen3", "critic")),
    "cp4": (4, {"context_parallel": 4}, ("llama", "large")),
    "tp2 × cp2": (4, TP | CP, ("qwen2", "saving", "odd tied")),
    "tp2 × cp2 × dp2": (8, TP | CP, ("llama",)),
    "cp2 × pp2": (4, CP | PP, ("llama", "saving")),
    "alone, experts": (1, {}, ("moe", "moe critic", "moe saving", "moe selective", "unnormed")),
    "dp2, experts": (2, {}, ("moe",)),
    "ep2": (2, EP, ("moe", "moe critic", "moe saving")),
    "ep2 × dp2": (4, EP, ("moe",)),
    "ep4": (4, EP4, ("moe",)),
    "tp2, experts": (2, TP, ("moe",)),
    "tp2, ep2": (2, TP | EP, ("moe", "moe saving")),
    "tp2 × dp2, experts": (4, TP, ("moe",)),
    "tp2 × dp2, ep2": (4, TP | EP, ("moe",)),
    "tp2 × dp2, ep4": (4, TP | EP4, ("moe",)),
    "pp2, experts": (2, PP, ("moe",)),
    "pp2 × dp2, experts": (4, PP, ("moe",)),
    "ep2 × pp2": (4, EP | PP, ("moe", "moe saving")),
    "tp2 × pp2, experts": (4, TP | PP, ("moe",)),
    "tp2 × pp2, ep2": (4, TP | PP | EP, ("moe",)),
    "cp2, experts": (2, CP, ("moe",)),
    "cp2, ep2": (2, CP | EP, ("moe", "moe saving")),
    "cp2 × dp2, ep4": (4, CP | EP4, ("moe",)),
    "tp2 × cp2, ep4": (4, TP | CP | EP4, ("moe",)),
    "cp2 × pp2, ep2": (4, CP | PP | EP, ("moe",)),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    parent = tmp_path_factory.mktemp("models")
    llama = tiny_model(parent / "llama", hidden=128, tied=False)
    moe = tiny_mixture(parent / "moe")
    found = [
        Case("llama", llama),
        Case("saving", llama, saving=True),
        Case("selective", llama, recompute="selective"),
        Case("large", tiny_model(parent / "large", hidden=256, layers=4)),  # four heads of keys, four layers
        Case("odd", tiny_model(parent / "odd", hidden=128, vocab=289, tied=False)),
        Case("odd tied", tiny_qwen(parent / "odd tied", "qwen3", vocab=301)),
        Case(
            "odd saving", tiny_qwen(parent / "odd saving", "qwen2", vocab=289), saving=True
        ),  # 7 and 8 rows at once, if ranks did not agree
        Case("critic", llama, kind="critic"),
        Case("qwen2", tiny_qwen(parent, "qwen2")),
        Case("qwen3", tiny_qwen(parent, "qwen3")),
        Case("moe", moe),
        Case("moe critic", moe, kind="critic"),
        Case("moe saving", moe, saving=True),
        Case("moe selective", moe, recompute="selective"),
        Case("unnormed", tiny_mixture(parent / "unnormed", norm_topk_prob=False)),
    ]
    return {case.name: replace(case, steps=STEPS) for case in found}


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What the trainer "fsdp" finds in one process with a model, and the folder of its state: computed once for each."""
    return run_one_process(cases, tmp_path_factory.mktemp("states"), lambda engine, case: {"goes on": continue_training(engine, case)})


def _told(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that both trainers have: all but those of the routers of experts."""
    return {name: value for name, value in metrics.items() if not name.startswith("moe/")}


@installed
@pytest.mark.parametrize("ranks", list(RANKS))
def test_megatron_trains_as_fsdp_does_and_each_goes_on_from_the_others_state(
    ranks: str, cases: dict[str, Case], alone: Callable[[str], tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    world, shared, names = RANKS[ranks]
    given = [replace(cases[name], trainer="megatron", begins=alone(name)[1]) for name in names]
    results = run_exporting(given, tmp_path, world, alone(names[0])[0]["weights"], **shared)
    for name in names:
        one, many = alone(name)[0], results[name]
        told = {column: list(map(_told, one[column])) for column in ("metrics", "goes on")}
        check_training({**one, **told}, many, after=AFTER_STEPS, scores_after=AFTER_STEPS)
        if not shared:  # each moment has one owner
            held_by = [sum(shard.tensor.numel() for shard in rank["moments"]) for rank in many]
            assert sum(held_by) == sum(tensor.numel() for tensor in assemble_shards([rank["moments"] for rank in many]).values())
            assert max(held_by) < 1.2 * sum(held_by) / world
        engine = engine_of(cases[name])  # the trainer "fsdp" goes on from what Megatron-Core's ranks saved
        check_saved(engine, tmp_path / "out" / name, many)
        for found, wanted in zip(continue_training(engine, cases[name]), one["goes on"], strict=True):
            assert _told(found) == pytest.approx(_told(wanted), **GOES_ON)
        engine.close()


@installed
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("recompute", "layer", "inside"), [(False, [True], [True]), ("selective", [True], [False, True]), (True, [False, True], [False, True])]
)
def test_what_recomputes_keeps_nothing_in_the_first_pass(
    recompute: Recompute, layer: list[bool], inside: list[bool], cases: dict[str, Case]
) -> None:
    from support.trainer_engines import megatron_engine

    engine = megatron_engine(PolicyHead(cases["llama"].folder), optimizer=ADAMW, dtype=torch.float32, recompute=recompute)
    calls: dict[str, list[bool]] = {"layer": [], "feed-forward": []}
    for module in engine._stage.decoder.layers:
        module.register_forward_hook(lambda *given: calls["layer"].append(torch.is_grad_enabled()))
        module.mlp.register_forward_hook(lambda *given: calls["feed-forward"].append(torch.is_grad_enabled()))
    batch, loss = batch_and_loss("policy")
    engine.scores(batch)
    engine.update(batch, loss)
    layers = len(engine._stage.decoder.layers)
    for name, learning in (("layer", layer), ("feed-forward", inside)):
        assert sorted(calls[name]) == sorted([False] * layers + learning * layers), name
    engine.close()


@installed
def test_attention_is_that_of_other_trainers_flash_attention_4_where_it_is_installed(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bool] = []
    monkeypatch.setattr(flash4, "load", lambda: loaded.append(True))
    engine_of(replace(cases["llama"], trainer="megatron")).close()
    assert loaded


@installed
def test_weights_of_another_model_are_refused(cases: dict[str, Case]) -> None:
    engine = engine_of(replace(cases["moe"], trainer="megatron"))
    with pytest.raises(DataError, match=r"load_weights: missing \['lm_head.weight', .*unknown \['w'\]"):
        engine.load_weights({"w": torch.zeros(1)})
    engine.close()


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("qwen2", {"tensor": 4}, r"Policy\(tensor_parallel=4\): the model has num_key_value_heads=2"),
        ("llama", {"context": 3}, r"Policy\(context_parallel=3\): the model has num_attention_heads=4, .* choose a divisor of 4"),
        ("qwen2", {"tensor": 2, "context": 4}, r"Policy\(tensor_parallel=2 × context_parallel=4\): the model has num_attention_heads=4"),
        ("llama", {"pipeline": 3}, r"Policy\(pipeline_parallel=3\): the model has num_hidden_layers=2"),
        ("moe", {"expert": 3}, r"Policy\(expert_parallel=3\): the model has num_experts=4"),
        ("moe", {"tensor": 4}, r"Policy\(tensor_parallel=4\): the model has num_key_value_heads=2"),
        ("llama", {"expert": 2}, r"Policy\(expert_parallel=2\): the model has no experts; leave out expert_parallel"),
        ("gemma2", {}, r"Policy\(trainer='megatron'\): models of type 'gemma2' cannot be trained with Megatron-Core; .* llama, qwen2"),
        ("biased", {}, r"Policy\(trainer='megatron'\): the model has attention_bias, which is not supported"),
    ],
)
def test_a_model_that_is_not_offered_is_refused(
    name: str, ranks: dict[str, int], said: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    folder = cases[name].folder if name in cases else folder_of("gemma2", tmp_path) if name == "gemma2" else _biased(tmp_path / "biased")
    with pytest.raises(GraphError, match=said):
        check_folder("Policy", folder, **ranks)


@installed
@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (rg.optim.Muon(), r"Policy\(trainer='megatron', optimizer=rg.optim.Muon\(\)\): it only supports AdamW with float32 moments"),
        (rg.AdamW(moments="8bit"), r"optimizer=rg.AdamW\(moments='8bit'\)\): it only supports AdamW with float32 moments"),
    ],
)
def test_an_optimizer_that_is_not_offered_is_refused(optimizer: rg.AdamW, said: str, cases: dict[str, Case]) -> None:
    with pytest.raises(GraphError, match=said):
        TRAINER.check(rg.Policy(str(cases["llama"].folder), pool=rg.Pool("train"), trainer="megatron", optimizer=optimizer))


def test_where_megatron_is_not_installed_the_error_says_how(monkeypatch: pytest.MonkeyPatch, cases: dict[str, Case]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GraphError, match=r"Policy\(trainer='megatron'\): megatron-core is not installed; pip install"):
        TRAINER.check(rg.Policy(str(cases["llama"].folder), pool=rg.Pool("train"), trainer="megatron"))


@installed
def test_several_tokens_at_a_position_are_refused(cases: dict[str, Case]) -> None:
    policy = rg.Policy(str(cases["llama"].folder), pool=rg.Pool("train"), trainer="megatron")
    with pytest.raises(GraphError, match=r"node 'update' needs log-probs of several tokens .* trainer='megatron' does not return"):
        check_whole_vocabulary("update", policy)


def _biased(folder: Path) -> Path:
    tiny_model(folder, hidden=128)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"attention_bias": false', '"attention_bias": true'))
    return folder


@installed
def test_two_splits_in_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlgraph.engines.megatron import modules

    monkeypatch.setattr(modules, "_made", [(2, 1, 1, 1)])
    with pytest.raises(GraphError, match=r"another model in these processes has tensor_parallel=2, .* or use separate processes"):
        modules.MegatronRanks(0, 2, pipeline=2)
