"""Metrics of evaluations: verl's own numbers for the bootstrap, arithmetic for the rest."""

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlgraph.nodes.rewards.scoring import Score
from rlgraph.nodes.rollout.evaluation import bootstrap, pass_at, sizes, summary

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "oracle" / "validation.json").read_text(encoding="utf-8"))


def scores(case: dict[str, Any]) -> list[list[Score]]:
    votes = case.get("pred", [None] * len(case["acc"]))
    flat = [Score(-1.0, pred, acc) for acc, pred in zip(case["acc"], votes, strict=True)]
    return [flat[i : i + case["samples"]] for i in range(0, len(flat), case["samples"])]


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_means_and_the_bootstrap_are_bit_for_bit_those_of_verl(name: str) -> None:
    case = GOLDEN["cases"][name]
    found = summary(scores(case), case["sources"], passes=1.0)
    assert case["metrics"].items() <= found.items()
    of_sources = {key for key in found if "/acc/" in key and not key.endswith("stderr")}
    assert of_sources == set(case["metrics"])


def test_the_oracle_has_ties_empty_votes_and_sources() -> None:
    assert GOLDEN["verl"] == "0.9.1"
    cases = GOLDEN["cases"].values()
    assert any("" in case.get("pred", []) for case in cases)
    assert any("maths/acc/maj@32/std" in case["metrics"] for case in cases)
    assert {source for case in cases for source in case["sources"]} == {"maths", "code"}


def test_it_leaves_the_global_random_state_as_it_is() -> None:
    np.random.seed(7)
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    bootstrap([0.0, 1.0, 1.0])
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]


@pytest.mark.parametrize(("answers", "right"), [(4, 1), (8, 3), (32, 1)])
def test_the_bootstraps_best_is_near_its_closed_form_and_below_pass_at_k(answers: int, right: int) -> None:
    found = bootstrap([1.0] * right + [0.0] * (answers - right))
    for k in sizes(answers):
        assert found[f"best@{k}/mean"] == pytest.approx(1 - (1 - right / answers) ** k, abs=0.05)
    assert found[f"best@{answers}/mean"] < pass_at(answers, answers, right) == 1.0


def test_a_majority_that_is_wrong_counts_nothing_and_one_that_is_right_counts_whole() -> None:
    wrong, right = [[Score(float(v == "4"), v) for v in votes] for votes in (["4", "5", "5", "5", "5", "5"], ["4"] * 6)]
    assert summary([right], ["s"], 1.0)["acc/maj@6/mean"] == 1.0
    assert summary([wrong], ["s"], 1.0)["acc/maj@6/mean"] < summary([wrong], ["s"], 1.0)["acc/mean@6"]


def test_without_answers_there_is_no_majority_and_a_response_without_one_votes_for_none() -> None:
    assert not any("maj" in name for name in summary([[Score(1.0), Score(0.0)]], [""], 1.0))
    told = summary([[Score(0.0, ""), Score(0.0, None), Score(1.0, "4")]], [""], 1.0)
    assert told == summary([[Score(0.0, ""), Score(0.0, ""), Score(1.0, "4")]], [""], 1.0)


def test_acc_is_the_scorers_own_or_else_whether_the_reward_passes() -> None:
    found = summary([[Score(-1.0, acc=1.0), Score(0.5)], [Score(2.0), Score(0.0)]], ["", ""], passes=0.5)
    assert (found["acc/mean@2"], found["reward/mean@2"], found["pass@1"]) == (0.75, 0.375, 0.75)


def test_the_standard_error_is_that_of_the_items_means() -> None:
    found = summary([[Score(1.0), Score(1.0)], [Score(0.0), Score(1.0)], [Score(0.0), Score(0.0)]], [""] * 3, 1.0)
    assert found["acc/stderr"] == pytest.approx(np.std([1.0, 0.5, 0.0], ddof=1) / 3**0.5)


@pytest.mark.parametrize(("right", "k"), list(product(range(6), [1, 2, 4, 5])))
def test_pass_at_k_is_the_share_of_draws_of_k_samples_that_hold_a_right_one(right: int, k: int) -> None:
    draws = list(combinations([True] * right + [False] * (5 - right), k))
    assert pass_at(k, 5, right) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_summary_has_powers_of_two_and_all_samples_by_source() -> None:
    rewards = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.5]]
    found = summary([[Score(r) for r in row] for row in rewards], ["a", "b", "a"], passes=1.0)
    assert found["reward/mean@3"] == pytest.approx(3.5 / 9)
    assert {name for name in found if name.startswith("a/pass")} == {"a/pass@1", "a/pass@2", "a/pass@3"}
    assert (found["pass@1"], found["a/pass@3"], found["b/pass@3"]) == (pytest.approx(1 / 3), 1.0, 0.0)
