"""Ranks that share matrices or rows of tokens compute what one process does, and move their weights as any other ranks do."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs.parallel_ranks import MUON, Case, check_saved, check_training, engine_of, run_exporting, run_one_process
from support.families import folder_of
from support.tiny import tiny_qwen

from rlgraph.engines.fsdp.parallel import check_folder_parallel, check_parallel
from rlgraph.engines.fsdp.sharding import Ranks
from rlgraph.engines.hf.model_files import text_config
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import GraphError

pytestmark = pytest.mark.stage("ranks")


RANKS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {  # the world, what its ranks share, and the models
    "tp2": (2, {"tensor_parallel": 2}, ("qwen2", "qwen3", "critic", "saving", "selective", "muon")),
    "tp4": (4, {"tensor_parallel": 4}, ("wide",)),
    "cp2": (2, {"context_parallel": 2}, ("qwen2", "critic", "saving", "muon")),
    "cp4": (4, {"context_parallel": 4}, ("qwen3",)),  # of two heads of keys
    "ring 2": (2, {"context_parallel": 2}, ("nine", "nine critic", "nine saving", "nine muon")),
    "ring 3": (3, {"context_parallel": 3}, ("qwen3",)),
    "cp4 (ring 2)": (4, {"context_parallel": 4}, ("fourteen",)),
    "ring 2 × dp2": (4, {"context_parallel": 2}, ("nine critic",)),
    "forced ring 2": (2, {"context_parallel": 2, "ring": 2}, ("llama",)),  # where heads would do
    "tp2 × cp4 (ring 2)": (8, {"tensor_parallel": 2, "context_parallel": 4}, ("twelve",)),
    "tp2 × cp2 × dp2": (8, {"tensor_parallel": 2, "context_parallel": 2}, ("muon",)),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    parent = tmp_path_factory.mktemp("models")
    llama = tiny_model(parent / "llama", hidden=128, tied=False)
    found = [
        Case("llama", llama),
        Case("saving", llama, saving=True),
        Case("selective", llama, recompute="selective"),
        Case("muon", llama, optimizer=MUON),
        Case("critic", llama, kind="critic"),
        Case("wide", tiny_model(parent / "wide", hidden=256)),
        Case("qwen2", tiny_qwen(parent, "qwen2")),
        Case("qwen3", tiny_qwen(parent, "qwen3")),
        Case("twelve", tiny_model(parent / "twelve", hidden=384)),
        Case("fourteen", tiny_qwen(parent, "qwen2", name="fourteen", heads=14, head=16)),  # as Qwen 2 of 0.5B has
    ]
    nine = tiny_qwen(parent, "llama", name="nine", heads=9, key_heads=3, head=16)  # as many as SmolLM2 of 135M has
    found += [Case("nine", nine), Case("nine saving", nine, saving=True), Case("nine muon", nine, optimizer=MUON)]
    found += [Case("nine critic", nine, kind="critic")]
    return {case.name: case for case in found}


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What one process finds with a model, and the folder of its state: computed once for each."""
    return run_one_process(cases, tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_share_a_model_train_it_as_one_process_does(
    ranks: str, cases: dict[str, Case], alone: Callable[[str], tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    world, shared, names = RANKS[ranks]
    given = [replace(cases[name], begins=alone(name)[1]) for name in names]
    results = run_exporting(given, tmp_path, world, alone(names[0])[0]["weights"], **shared)
    for name in names:
        check_training(alone(name)[0], results[name], least=1e-6)
        engine = engine_of(cases[name])
        check_saved(engine, tmp_path / "out" / name, results[name])
        engine.close()


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        (
            "qwen2",
            {"tensor": 4},
            r"Policy\(tensor_parallel=4\): the model has num_key_value_heads=2, which tensor_parallel=4 does not divide",
        ),
        ("nine", {"tensor": 2, "context": 3}, "num_attention_heads=9, which tensor_parallel=2 does not divide"),
        (
            "windows",
            {"context": 8},
            r"Policy\(context_parallel=8\): num_attention_heads=4 is not divisible by the ranks, .* ring attention",
        ),
        ("odd", {"tensor": 2}, "vocab_size=289, which tensor_parallel=2 does not divide.*a divisor of 289"),
        ("gemma2", {"tensor": 2}, "models of type 'gemma2' cannot be split over ranks; supported are llama, qwen2, qwen3"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    name: str, ranks: dict[str, int], said: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    made = {
        "windows": lambda: with_windows(tmp_path),
        "odd": lambda: tiny_model(tmp_path / "odd", vocab=289, hidden=128),
        "gemma2": lambda: folder_of("gemma2", tmp_path),
    }
    folder = cases[name].folder if name in cases else made[name]()
    with pytest.raises(GraphError, match=said):
        check_folder_parallel("Policy", folder, **ranks)


def with_windows(folder: Path) -> Path:
    config = tiny_qwen(folder, "qwen2") / "config.json"
    given = json.loads(config.read_text()) | {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    config.write_text(json.dumps(given | {"sliding_window": 8}))
    return config.parent


def test_a_ring_divides_the_ranks_that_share_a_row(cases: dict[str, Case]) -> None:
    config = text_config(cases["llama"].folder)
    with pytest.raises(GraphError, match="a ring of 3 does not divide context_parallel=4"):
        check_parallel("FsdpEngine", config, context=4, ring=3)
    with pytest.raises(GraphError, match="num_attention_heads=4, which context_parallel=8 does not divide"):
        check_parallel("FsdpEngine", config, context=8, ring=1)


def test_ranks_come_in_whole_groups() -> None:
    with pytest.raises(GraphError, match=r"world=6, tensor_parallel=2, context_parallel=2\): ranks form groups of 4"):
        Ranks("cpu", 0, 6, tensor=2, context=2)
