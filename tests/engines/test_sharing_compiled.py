"""Ranks that share matrices, with layers that are compiled, compute what one process computes with layers that are not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs.parallel_ranks import Case, check_training, run_one_process, run_ranks
from support.tiny import tiny_qwen

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import GraphError

pytestmark = pytest.mark.stage("ranks")

FAST = "aot_eager_decomp_partition"  # traces, and decides what to keep, as the usual compiler; runs plain operations
STEPS = 4
RANKS = {"tp2": (2, "llama"), "tp2, norms of heads, selective": (2, "selective"), "tp2 × dp2, recomputing": (4, "recompute")}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    parent = tmp_path_factory.mktemp("models")
    llama = Case("llama", tiny_model(parent / "llama", hidden=128, tied=False), steps=STEPS, compiled=FAST)
    found = [
        llama,
        replace(llama, name="recompute", recompute=True, folder=tiny_model(parent / "one", hidden=128, layers=1)),
        replace(llama, name="selective", recompute="selective", folder=tiny_qwen(parent, "qwen3", layers=1)),
    ]
    return {case.name: case for case in found}


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What one process finds with a model: computed once for each."""
    return run_one_process(cases, tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("ranks", RANKS)
def test_layers_that_ranks_share_train_alike_where_they_are_compiled(
    ranks: str, cases: dict[str, Case], alone: Callable[[str], tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    world, name = RANKS[ranks]
    one, many = alone(name)[0], run_ranks([cases[name]], tmp_path / "out", world, tensor_parallel=2)[name]
    check_training(one, many, least=1e-6)
    assert all(rank["traced"]["breaks"] == 0 and 1 <= rank["traced"]["graphs"] <= 4 for rank in many), many[0]["traced"]
    assert all(rank["goes on"] == rank["goes on again"] for rank in many), "equal updates give equal bits"


def test_a_policy_takes_both_settings_but_none_for_rows_that_ranks_share_as_well() -> None:
    policy = rg.Policy("m", pool=rg.Pool("train", gpus=2), tensor_parallel=2, compiled=True)
    assert (policy.tensor_parallel, policy.compiled) == (2, True)
    with pytest.raises(
        GraphError, match=r"context_parallel=2, compiled=True\): layers whose matrices and rows are both .* leave out compiled"
    ):
        rg.Policy("m", pool=rg.Pool("train", gpus=4), tensor_parallel=2, context_parallel=2, compiled=True)
