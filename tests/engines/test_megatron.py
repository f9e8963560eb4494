"""Megatron-Core trains what the trainer "fsdp" does, step by step, however its ranks share the model, and each reads the other's states."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import folder_of
from parallel_ranks import Case, assembled, boxes, by_one_process, engine_of, going_on, run_exporting
from tiny import tiny_qwen

import rlgraph as rg
from rlgraph.engines.hf_models.pretrained import byte_tokenizer, tiny_model
from rlgraph.engines.megatron.model_config import check_folder
from rlgraph.engines.megatron.spec import SPEC
from rlgraph.errors import GraphError
from rlgraph.nodes.training.trained_model import check_whole_vocabulary

installed = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
NEAR = {"atol": 5e-6, "rtol": 5e-6}
AFTER_STEPS = {"atol": 1e-5, "rtol": 2e-5}  # ten, in which rounding adds up
STEPS = 10
RANKS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {  # the world, what its ranks share, and the models
    "alone": (1, {}, ("llama", "qwen2", "qwen3", "critic")),
    "dp2": (2, {}, ("llama",)),
    "tp2": (2, {"tensor_parallel": 2}, ("llama", "qwen2", "qwen3", "critic", "saving")),
    "tp2 × dp2": (4, {"tensor_parallel": 2}, ("llama", "critic")),
    "pp2": (2, {"pipeline_parallel": 2}, ("llama", "qwen2", "qwen3", "critic", "saving")),
    "pp2 × dp2": (4, {"pipeline_parallel": 2}, ("llama",)),
    "tp2 × pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}, ("llama", "qwen2", "qwen3", "critic")),
    "alone, experts": (1, {}, ("moe", "unnormed", "moe critic")),
    "ep2": (2, {"expert_parallel": 2}, ("moe", "moe critic")),
    "ep2 × dp2": (4, {"expert_parallel": 2}, ("moe",)),
    "tp2, experts": (2, {"tensor_parallel": 2}, ("moe",)),
    "tp2, ep2": (2, {"tensor_parallel": 2, "expert_parallel": 2}, ("moe",)),
    "ep2 × pp2": (4, {"expert_parallel": 2, "pipeline_parallel": 2}, ("moe",)),
    "tp2 × pp2, ep2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}, ("moe",)),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    parent = tmp_path_factory.mktemp("models")
    llama = tiny_model(parent / "llama", hidden=128, tied=False)
    moe = _experts(parent / "moe")
    found = [
        Case("llama", llama),
        Case("saving", llama, saving=True),
        Case("critic", llama, kind="critic"),
        Case("qwen2", tiny_qwen(parent, "qwen2")),
        Case("qwen3", tiny_qwen(parent, "qwen3")),
        Case("moe", moe),
        Case("moe critic", moe, kind="critic"),
        Case("unnormed", _experts(parent / "unnormed", norm_topk_prob=False)),
    ]
    return {case.name: replace(case, steps=STEPS) for case in found}


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What the trainer "fsdp" finds in one process with a model, and the folder of its state: computed once for each."""
    return by_one_process(cases, tmp_path_factory.mktemp("states"), lambda engine, case: {"goes on": going_on(engine, case)})


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
        assert all(rank["metrics"] == many[0]["metrics"] for rank in many)
        for column in ("metrics", "goes on"):
            for found, wanted in zip(many[0][column], one[column], strict=True):
                assert found == pytest.approx(_told(wanted), rel=1e-4, abs=1e-5)
        for column in ("scores", "squares", "scores after") if "squares" in one else ("scores", "scores after"):
            assert all(torch.equal(rank[column], many[0][column]) for rank in many)
            torch.testing.assert_close(many[0][column], one[column], **(AFTER_STEPS if column == "scores after" else NEAR))
        for held in ("weights", "moments", "weights after", "loaded"):
            whole = assembled([rank[held] for rank in many])
            expected = assembled([one["weights after" if held == "loaded" else held]])
            assert whole.keys() == expected.keys()
            near = {"atol": 0, "rtol": 0} if held in ("weights", "loaded") else AFTER_STEPS if held == "weights after" else NEAR
            for parameter, tensor in whole.items():
                torch.testing.assert_close(tensor, expected[parameter], **near)
        engine = engine_of(cases[name])  # the trainer "fsdp" goes on from what Megatron-Core's ranks saved
        engine.load(tmp_path / "out" / name)
        kept = assembled([rank["weights after"] for rank in many])
        assert all(torch.equal(tensor, kept[parameter]) for parameter, tensor in assembled([boxes(engine)]).items())
        for found, wanted in zip(going_on(engine, cases[name]), one["goes on"], strict=True):
            assert _told(found) == pytest.approx(_told(wanted), rel=1e-4, abs=1e-5)
        engine.close()


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("qwen2", {"tensor": 4}, r"Policy\(tensor_parallel=4\): the model has num_key_value_heads=2"),
        ("llama", {"pipeline": 3}, r"Policy\(pipeline_parallel=3\): the model has num_hidden_layers=2"),
        ("moe", {"expert": 3}, r"Policy\(expert_parallel=3\): the model has num_experts=4"),
        ("moe", {"tensor": 4}, r"Policy\(tensor_parallel=4\): the model has num_key_value_heads=2"),
        ("llama", {"expert": 2}, r"Policy\(expert_parallel=2\): the model has no experts; leave out expert_parallel"),
        ("gemma2", {}, r"Policy\(trainer='megatron'\): models of type 'gemma2' are not trained by Megatron-Core here; .* llama, qwen2"),
        ("biased", {}, r"Policy\(trainer='megatron'\): the model has attention_bias, which is not offered"),
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
        (rg.Muon(), r"Policy\(trainer='megatron', optimizer=rg.Muon\(\)\): it trains with AdamW's moments in float32"),
        (rg.AdamW(moments="8bit"), r"optimizer=rg.AdamW\(moments='8bit'\)\): it trains with AdamW's moments in float32"),
    ],
)
def test_an_optimizer_that_is_not_offered_is_refused(optimizer: rg.AdamW, said: str, cases: dict[str, Case]) -> None:
    with pytest.raises(GraphError, match=said):
        SPEC.check(rg.Policy(str(cases["llama"].folder), pool=rg.Pool("train"), trainer="megatron", optimizer=optimizer))


def test_where_megatron_is_not_installed_the_error_says_how(monkeypatch: pytest.MonkeyPatch, cases: dict[str, Case]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GraphError, match=r"Policy\(trainer='megatron'\): megatron-core is not installed; pip install"):
        SPEC.check(rg.Policy(str(cases["llama"].folder), pool=rg.Pool("train"), trainer="megatron"))


@installed
def test_several_tokens_at_a_position_are_refused(cases: dict[str, Case]) -> None:
    policy = rg.Policy(str(cases["llama"].folder), pool=rg.Pool("train"), trainer="megatron")
    with pytest.raises(GraphError, match=r"node 'update' needs log-probs of several tokens .* trainer='megatron' does not give"):
        check_whole_vocabulary("update", policy)


def _experts(folder: Path, *, norm_topk_prob: bool = True) -> Path:
    """Make a folder with a small random Qwen 3 of four experts, two of which a token takes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = Qwen3MoeConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=norm_topk_prob,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(shape).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _biased(folder: Path) -> Path:
    tiny_model(folder, hidden=128)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"attention_bias": false', '"attention_bias": true'))
    return folder
