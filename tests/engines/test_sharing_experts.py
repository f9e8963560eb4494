"""Ranks that share the experts of a mixture compute what one process does, and move their weights as any other ranks do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.parallel_ranks import (
    MUON,
    NEAR,
    Case,
    assemble_shards,
    check_saved,
    check_training,
    continue_training,
    engine_of,
    run_exporting,
    run_one_process,
    run_ranks,
)
from safetensors.torch import load_file, save_file
from support.families import folder_of
from support.tiny import tiny_mixture

import rlgraph as rg
from rlgraph.engines.fsdp.parallel import check_folder_experts
from rlgraph.engines.fsdp.sharding import Ranks
from rlgraph.engines.registry import check_plan
from rlgraph.errors import GraphError

pytestmark = pytest.mark.stage("ranks")

STEPS = 4
RANKS: dict[str, tuple[int, int, tuple[str, ...]]] = {  # the world, the ranks that hold all experts together, and the models
    "ep2": (2, 2, ("qwen3", "again", "padded", "critic", "saving", "selective", "muon", "mixtral", "olmoe", "one-sided")),
    "ep2 × dp2": (4, 2, ("qwen3", "saving", "few")),
    "ep4": (4, 4, ("qwen3",)),
}
Ran = tuple[dict[str, list[dict[str, Any]]], Path]  # what each rank found, by model, and the folder of the states they saved


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    parent = tmp_path_factory.mktemp("models")
    qwen = tiny_mixture(parent / "qwen3")
    found = [
        Case("qwen3", qwen),
        Case("again", qwen),
        Case("padded", qwen, flat=False),
        Case("critic", qwen, kind="critic"),
        Case("saving", qwen, saving=True),
        Case("selective", qwen, recompute="selective"),
        Case("muon", qwen, optimizer=MUON),
        Case("balanced", qwen, load_balance=0.3),
        Case("mixtral", tiny_mixture(parent / "mixtral", "mixtral")),
        Case("olmoe", tiny_mixture(parent / "olmoe", "olmoe")),
        Case("few", tiny_mixture(parent / "few", "olmoe", num_experts=2, num_experts_per_tok=1)),  # two ranks share each by rows
    ]
    return {case.name: replace(case, steps=STEPS) for case in found} | {"one-sided": Case("one-sided", one_sided(parent), steps=1)}


def one_sided(parent: Path) -> Path:
    """Make a mixture whose routers find all experts alike, so that all tokens take the same two: other ranks get no token."""
    folder = tiny_mixture(parent / "one-sided")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: w * 0 if n.endswith("mlp.gate.weight") else w for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What one process finds with a model, and the folder of its state: computed once for each."""
    return run_one_process(cases, tmp_path_factory.mktemp("states"), lambda engine, case: {"goes on": continue_training(engine, case)})


@pytest.fixture(scope="module")
def ran(
    cases: dict[str, Case], alone: Callable[[str], tuple[dict[str, Any], Path]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Ran]:
    """What ranks find: they go on from the states of one process, but "ep4" from those of "ep2"."""
    found: dict[str, Ran] = {}

    def run(ranks: str) -> Ran:
        if ranks not in found:
            world, expert, names = RANKS[ranks]
            saved = run("ep2")[1] if ranks == "ep4" else None
            given = [replace(cases[name], begins=alone(name)[1] if saved is None else saved / name) for name in names]
            folder = tmp_path_factory.mktemp("ranks")
            found[ranks] = run_exporting(given, folder, world, alone(names[0])[0]["weights"], expert_parallel=expert), folder / "out"
        return found[ranks]

    return run


@pytest.mark.parametrize("ranks", list(RANKS))
def test_ranks_that_share_experts_train_them_as_one_process_does(
    ranks: str, cases: dict[str, Case], alone: Callable[[str], tuple[dict[str, Any], Path]], ran: Callable[[str], Ran]
) -> None:
    results, saved = ran(ranks)
    for name in RANKS[ranks][2]:
        one, many = alone(name)[0], results[name]
        before = assemble_shards([rank["weights after"] for rank in ran("ep2")[0][name]]) if ranks == "ep4" else None
        check_training(one, many, loaded=before)
        engine = engine_of(cases[name])
        check_saved(engine, saved / name, many)
        engine.close()


def test_a_rank_whose_experts_no_token_takes_is_one_of_those_compared(ran: Callable[[str], Ran]) -> None:
    metrics = ran("ep2")[0]["one-sided"][0]["metrics"][0]
    shares = [metrics[f"moe/expert_share/{expert}"] for expert in range(4)]
    assert sorted([shares[0] + shares[1], shares[2] + shares[3]]) == [0.0, 1.0]


def test_equal_updates_of_shared_experts_give_equal_bits(ran: Callable[[str], Ran]) -> None:
    results = ran("ep2")[0]
    for one, again in zip(results["qwen3"], results["again"], strict=True):
        assert one["metrics"] == again["metrics"]
        pairs = zip(one["weights after"], again["weights after"], strict=True)
        assert all(torch.equal(first.tensor, second.tensor) for first, second in pairs)


def test_the_balancing_loss_of_ranks_that_share_experts_is_that_of_ranks_that_do_not(cases: dict[str, Case], tmp_path: Path) -> None:
    case = replace(cases["balanced"], steps=2)  # the loss is one of each pass, so one process has another
    apart, together = (run_ranks([case], tmp_path / str(expert), 2, expert_parallel=expert)["balanced"] for expert in (1, 2))
    for found, wanted in zip(together[0]["metrics"], apart[0]["metrics"], strict=True):
        assert wanted["moe/load_balance_loss"] > 1
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for held in ("moments", "weights after"):
        whole, expected = (assemble_shards([rank[held] for rank in many]) for many in (together, apart))
        for parameter, tensor in whole.items():
            torch.testing.assert_close(tensor, expected[parameter], **NEAR)


@pytest.mark.parametrize("ranks", list(RANKS))
def test_a_rank_holds_the_experts_of_its_place_alone(ranks: str, ran: Callable[[str], Ran]) -> None:
    expert = RANKS[ranks][1]
    of_each = [{shard.name for shard in rank["weights"] if ".experts." in shard.name} for rank in ran(ranks)[0]["qwen3"]]
    for rank, names in enumerate(of_each):
        first = rank % expert * (4 // expert)
        assert {int(name.split(".experts.")[1].split(".")[0]) for name in names} <= set(range(first, first + 4 // expert))
    assert len(set[str]().union(*of_each)) == 2 * 4 * 3, "together the ranks hold each matrix of each expert"


@pytest.mark.parametrize(
    ("name", "expert", "said"),
    [
        ("qwen3", 3, r"Policy\(expert_parallel=3\): the model has num_experts=4, which .* does not divide; .* a divisor of 4"),
        ("mixtral", 8, r"Policy\(expert_parallel=8\): the model has num_experts=4"),
        ("llama", 2, r"Policy\(expert_parallel=2\): the model has no experts; leave out expert_parallel"),
        ("granitemoe", 2, "experts of models of type 'granitemoe' cannot be split over ranks; supported are mixtral, olmoe, qwen3_moe"),
    ],
)
def test_a_model_whose_experts_ranks_cannot_share_is_refused(
    name: str, expert: int, said: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    with pytest.raises(GraphError, match=said):
        check_folder_experts("Policy", cases[name].folder if name in cases else folder_of(name, tmp_path), expert)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compiled": True}, r"Policy\(expert_parallel=2, compiled=True\): layers whose experts are split over ranks are not compiled"),
        ({"adapter": rg.LoRA(rank=4)}, "mixtures of experts have no adapters here; leave out expert_parallel"),
        ({"exact": True, "dtype": "float32"}, "expert_parallel=2.*not tested to be exact"),
        ({"optimizer": rg.AdamW(moments="8bit")}, r"moments='8bit'\), expert_parallel=2\): ranks that share experts"),
        ({"data_parallel": 3}, "3 processes have the same layers, of which 2 share experts"),
    ],
)
def test_settings_that_shared_experts_do_not_work_with_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        rg.Policy("m", pool=rg.Pool("train"), expert_parallel=2, **settings)


@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_ranks_that_share_experts_have_passes_of_their_own(name: str, cases: dict[str, Case]) -> None:
    given: dict[str, Any] = {name: 2}
    with pytest.raises(GraphError, match=rf"Policy\(expert_parallel=2, {name}=2\): trainer='fsdp' shares experts .*; leave out {name}"):
        check_plan(rg.Policy(cases["qwen3"].folder, pool=rg.Pool("train"), expert_parallel=2, **given))
    with pytest.raises(GraphError, match="experts are shared in groups of 2 ranks, each with its own micro-batches"):
        Ranks("cpu", 0, 4, expert=2, **{name.split("_")[0]: 2})


def test_ranks_that_share_experts_come_in_whole_groups() -> None:
    with pytest.raises(GraphError, match=r"world=3, .*expert_parallel=2\): experts are shared in groups of 2"):
        Ranks("cpu", 0, 3, expert=2)
