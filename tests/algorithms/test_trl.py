"""Losses beyond policy gradients, and their gradients, equal those of TRL's own trainers, which tests/oracle/trl_losses.py wrote down."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlgraph.algorithms as alg
from rlgraph.errors import DataError
from rlgraph.nodes.training.update import Part, join_with_losses

FIXTURE = json.loads((Path(__file__).parents[1] / "oracle" / "trl.json").read_text())
CASES = [pytest.param(case, id="-".join([case["name"], *map(str, case["options"].values())])) for case in FIXTURE["cases"]]
EXACT = 1e-9  # both compute in float64
Case = dict[str, Any]


def columns(case: Case) -> dict[str, torch.Tensor]:
    """Read the inputs of a case, numbers in float64."""
    kinds = {name: torch.bool if "mask" in name or name == "labels" else torch.float64 for name in case["inputs"]}
    return {name: torch.tensor(value, dtype=kinds[name]) for name, value in case["inputs"].items()}


def paired(case: Case, scores: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = getattr(alg, case["name"])(**case["options"])
    return loss(scores, given | {"preferences": torch.tensor([1.0, -1.0]).repeat(len(scores) // 2)})[0]


def kto(case: Case, scores: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = {
        "response_mask": torch.cat([given["response_mask"], given["other_mask"]]),
        "ref_log_probs": torch.cat([given["ref_log_probs"], given["other_ref_log_probs"]]),
        "preferences": torch.cat([given["labels"].double() * 2 - 1, torch.zeros(len(scores))]),
    }
    return alg.KTO(**case["options"])(torch.cat([scores, given["other_log_probs"]]), rows)[0]


def supervised(case: Case, scores: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    whole = alg.Totals.of(given["response_mask"])
    totals = alg.Totals(case["options"]["tokens"] or whole.tokens, whole.rows)
    return alg.SFTLoss(dft=case["options"]["dft"])(scores, given, totals)[0]


def reward(case: Case, scores: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = {"response_mask": torch.ones(len(scores), 1).bool(), "preferences": torch.tensor([1.0, -1.0]).repeat(len(scores) // 2)}
    margins = {"margins": given["margins"].repeat_interleave(2)} if case["options"]["margin"] else {}
    return alg.BradleyTerry(center=case["options"]["center"])(scores[:, None], rows | margins)[0]


def divergence_of(beta: float) -> alg.DistillationLoss:
    """The divergence that TRL's beta names."""
    if beta in (0, 1):
        return alg.DistillationLoss(divergence="reverse_kl" if beta else "forward_kl")
    return alg.DistillationLoss(divergence="jsd", beta=beta)


def distilled(case: Case, logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    temperature = case["options"]["temperature"]
    columns = {
        "response_mask": given["response_mask"],
        "teacher_top_ids": torch.arange(logits.shape[-1]).expand(logits.shape),
        "teacher_top_log_probs": (given["teacher"] / temperature).log_softmax(-1),
        "chosen_log_probs": (logits / temperature).log_softmax(-1),
    }
    loss = divergence_of(case["options"]["beta"])
    return loss(torch.zeros(logits.shape[:2]).double(), columns, alg.Totals.of(given["response_mask"]))[0]


def top(case: Case, logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    teacher, ids = given["teacher"].log_softmax(-1).topk(case["options"]["k"], -1)
    columns = {
        "response_mask": given["response_mask"],
        "teacher_top_ids": ids,
        "teacher_top_log_probs": teacher,
        "chosen_log_probs": logits.log_softmax(-1).gather(-1, ids),
    }
    loss = divergence_of(case["options"]["beta"])
    return loss(torch.zeros(logits.shape[:2]).double(), columns, alg.Totals.of(given["response_mask"]))[0]


def shared(case: Case, logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The student's responses, and the examples as a further batch of the update with the weight that the page gives for lambda."""
    share, loss = case["options"]["lambda"], divergence_of(case["options"]["beta"])
    batches = [
        {
            "response_mask": given["response_mask"][rows],
            "teacher_top_ids": torch.arange(logits.shape[-1]).expand(logits[rows].shape),
            "teacher_top_log_probs": given["teacher"][rows].log_softmax(-1),
            "chosen_log_probs": logits[rows].log_softmax(-1),
        }
        for rows in (slice(0, 2), slice(2, 4))
    ]
    batch, mixture = join_with_losses([(columns, loss) for columns in batches], [Part("", "examples", loss, (1 - share) / share, "")])
    totals = alg.Totals.of(torch.as_tensor(batch["response_mask"]))
    return share * mixture(torch.zeros(logits.shape[:2]).double(), batch, totals)[0]


COMPUTE: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    **dict.fromkeys(("DPO", "IPO", "SimPO", "ORPO"), ("log_probs", paired)),
    "KTO": ("log_probs", kto),
    "SFT": ("log_probs", supervised),
    "BradleyTerry": ("scores", reward),
    "GKD": ("student", distilled),
    "GKD top": ("student", top),
    "GKD lambda": ("student", shared),
}
SINGLE = {"ORPO", "GKD top"}  # TRL takes these odds, and these logits, in float32


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0]["name"] in COMPUTE])
def test_loss_and_gradient_are_those_of_trl(case: Case) -> None:
    column, compute = COMPUTE[case["name"]]
    given = columns(case)
    scores = given[column].requires_grad_()
    loss = compute(case, scores, given)
    near = 1e-6 if case["name"] in SINGLE else EXACT
    assert loss.item() == pytest.approx(case["loss"], abs=near)
    (gradient,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"], dtype=torch.float64), atol=near, rtol=near)


def test_the_fixture_has_each_family_with_several_settings() -> None:
    names = [case["name"] for case in FIXTURE["cases"]]
    assert {name: names.count(name) for name in COMPUTE} == {
        **dict.fromkeys(("DPO", "IPO", "SimPO"), 4),
        "ORPO": 3,
        "KTO": 12,
        "SFT": 4,
        "BradleyTerry": 4,
        "GKD": 8,
        "GKD top": 9,
        "GKD lambda": 6,
    }
    kto_cases = [case for case in FIXTURE["cases"] if case["name"] == "KTO"]
    above = [(columns(c)["other_log_probs"] * columns(c)["other_mask"]).sum() for c in kto_cases]
    assert above[0] < above[-1], "z is 0 in some cases and above in others"


PAIR = {"response_mask": torch.ones(4, 2).bool(), "ref_log_probs": torch.zeros(4, 2)}


def test_pairs_without_a_winner_or_a_token_are_left_out_of_the_mean() -> None:
    scores = torch.randn(4, 2)
    alone = {name: column[:2] for name, column in PAIR.items()} | {"preferences": torch.tensor([1.0, -1.0])}
    expected = alg.DPO()(scores[:2], alone)[0]
    tie = PAIR | {"preferences": torch.tensor([1.0, -1.0, 0.0, 0.0])}
    empty = PAIR | {"preferences": torch.tensor([1.0, -1.0, 1.0, -1.0]), "response_mask": torch.tensor([[True] * 2] * 3 + [[False] * 2])}
    for batch in (tie, empty):
        loss, metrics = alg.DPO()(scores, batch)
        torch.testing.assert_close(loss, expected)
        assert metrics["preference/pairs"] == 1


@pytest.mark.parametrize("preferences", [[1.0, 1.0, -1.0, -1.0], [-1.0, 1.0, 1.0, -1.0]])
def test_rows_that_are_no_pairs_are_refused(preferences: list[float]) -> None:
    with pytest.raises(DataError, match="the rows of this mini-batch are not pairs"):
        alg.DPO()(torch.zeros(4, 2), PAIR | {"preferences": torch.tensor(preferences)})


def test_kto_without_mismatched_rows_is_refused() -> None:
    with pytest.raises(DataError, match="this mini-batch has no mismatched row"):
        alg.KTO()(torch.zeros(4, 2), PAIR | {"preferences": torch.tensor([1.0, -1.0, 1.0, 1.0])})


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_the_top_tokens_bound_the_divergence_from_below_and_meet_it_where_they_are_all(divergence: str) -> None:
    draw = torch.Generator().manual_seed(5)
    student, teacher = (torch.randn(1, 3, 9, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    mask = torch.ones(1, 3).bool()
    found = []
    for k in range(1, 10):
        top, ids = teacher.topk(k, -1)
        columns = {"response_mask": mask, "teacher_top_ids": ids, "teacher_top_log_probs": top, "chosen_log_probs": student.gather(-1, ids)}
        loss = alg.DistillationLoss(divergence=divergence)  # type: ignore[arg-type]
        found.append(float(loss(torch.zeros(1, 3), columns, alg.Totals.of(mask))[0]))
    every = columns | {"teacher_top_ids": torch.arange(9).expand(1, 3, 9), "teacher_top_log_probs": teacher, "chosen_log_probs": student}
    whole = float(loss(torch.zeros(1, 3), every, alg.Totals.of(mask))[0])
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found))
    assert 0 < found[0] < whole
    assert found[-1] == pytest.approx(whole, abs=1e-6)
    same = columns | {"chosen_log_probs": columns["teacher_top_log_probs"]}
    assert float(loss(torch.zeros(1, 3), same, alg.Totals.of(mask))[0]) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_the_gradient_is_finite_where_the_top_tokens_hold_all_of_the_probability(divergence: str) -> None:
    student = torch.tensor([[[30.0, 0.0, -5.0]]]).log_softmax(-1)[..., :2].requires_grad_()
    teacher, ids = torch.tensor([[[0.0, -30.0]]]), torch.tensor([[[5, 6]]])
    columns = {
        "response_mask": torch.ones(1, 1).bool(),
        "teacher_top_ids": ids,
        "teacher_top_log_probs": teacher,
        "chosen_log_probs": student,
    }
    loss, _ = alg.DistillationLoss(divergence=divergence)(torch.zeros(1, 1), columns, alg.Totals(1, 1))  # type: ignore[arg-type]
    loss.backward()
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())


def test_the_reverse_kl_joins_the_advantages_of_another_estimator() -> None:
    columns = {
        "response_mask": torch.tensor([[True, True], [True, False]]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0], [-1.0, 7.0]]),
        "teacher_log_probs": torch.tensor([[-2.0, -1.0], [-0.5, 9.0]]),
        "rewards": torch.tensor([1.0, 0.0]),
        "group_ids": torch.tensor([0, 0]),
    }
    alone = alg.TeacherKL(coef=0.5)(columns)["advantages"]
    assert alone.tolist() == [[-0.5, 0.5], [0.25, 0.0]]
    assert alg.TeacherKL(coef=0.5, clip=0.75)(columns)["advantages"].tolist() == [[-0.375, 0.375], [0.25, 0.0]]
    both = alg.TeacherKL(coef=0.5, of=alg.GRPO())(columns)["advantages"]
    torch.testing.assert_close(both, alone + alg.GRPO()(columns)["advantages"])
