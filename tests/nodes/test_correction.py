"""What a correction or a filter leaves of a batch: weights, a second mask that the update trains on, and diagnostics."""

import dataclasses
from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.algorithms import (
    GRPO,
    ClippedLoss,
    IcePop,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    Rejection,
    RolloutCorrection,
    TruncatedIS,
    correction,
)
from rlgraph.columns import Columns
from rlgraph.errors import GraphError
from rlgraph.nodes.base import Context

K3 = Rejection("token_k3", 0.1)
# The second token of the first response, and all of the second response, are further apart than that.
BATCH = {
    "old_log_probs": torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]),
    "rollout_log_probs": torch.tensor([[-1.1, -3.0, -1.0], [-3.0, -3.0, -3.0]]),
    "response_mask": torch.tensor([[True, True, True], [True, True, False]]),
}


def nodes() -> tuple[rg.Output, rg.Output, rg.Output]:
    prompts = rg.prompts([{"prompt": "?"}], count=2)
    rollout = rg.Generator("m", pool=rg.Pool("p")).rollout(prompts, group_size=2)
    return rollout, rg.reward(lambda response_mask: [0.0], rollout), rg.Policy("m", pool=rg.Pool("t")).log_probs(rollout)


def corrected(**settings: Any) -> rg.Output:
    rollout, _, old = nodes()
    return rg.stages.rollout_correction(rollout, old, **settings)


def fire(output: rg.Output, columns: Columns) -> tuple[dict[str, Any], dict[str, float]]:
    fired = output.node.operation.start(Context())(0, columns)
    return fired if isinstance(fired, tuple) else (fired, {})


def test_rejected_tokens_leave_the_mask_and_weights_stay_as_they_are() -> None:
    output = corrected(weights=TruncatedIS(threshold=2.0), rejections=[K3])
    assert output.columns == ("rollout_is_weights", "loss_mask")
    columns, metrics = fire(output, BATCH)
    assert columns["loss_mask"].tolist() == [[True, False, True], [False, False, False]]
    torch.testing.assert_close(columns["rollout_is_weights"], TruncatedIS(threshold=2.0)(*BATCH.values()))
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 5)
    wanted = ("kl", "k3_kl", "training_ppl", "rollout_ppl", "chi2_token", "chi2_seq", "rollout_is_eff_sample_size")
    assert all(f"rollout_corr/{name}" in metrics for name in wanted)


def test_rejected_tokens_that_are_to_count_have_no_weight_instead() -> None:
    output = corrected(rejections=[K3], denominator="all")
    assert output.columns == ("rollout_is_weights",)
    assert fire(output, BATCH)[0]["rollout_is_weights"].tolist() == [[1, 0, 1], [0, 0, 0]]


def test_a_preset_writes_what_it_has() -> None:
    assert corrected(weights=correction("decoupled_token_is")).columns == ("rollout_is_weights",)
    assert corrected(weights=correction("decoupled_k3_rs")).columns == ("loss_mask",)
    assert corrected(weights=correction("decoupled_k3_rs_seq_tis")).columns == ("rollout_is_weights", "loss_mask")
    columns, metrics = fire(corrected(weights=correction("disabled")), BATCH)
    assert torch.equal(columns["rollout_is_weights"], BATCH["response_mask"].float())
    assert "rollout_corr/kl" in metrics


def test_responses_that_were_cut_off_may_be_left_out() -> None:
    rollout, _, _ = nodes()
    output = rg.stages.filter_truncated(rollout)
    reasons = torch.tensor([0, 1], dtype=torch.int8)
    columns, metrics = fire(output, {"finish_reasons": reasons, "response_mask": BATCH["response_mask"]})
    assert columns["loss_mask"].tolist() == [[True, True, True], [False, False, False]]
    assert metrics == {"filter/truncated_fraction": 0.5}
    assert rg.stages.filter_truncated(rollout, output, name="again").node.reads == ("finish_reasons", "loss_mask")


def test_weights_of_the_users_own_get_the_diagnostics_of_the_policies() -> None:
    columns, metrics = fire(corrected(weights=lambda old, rollout, mask: torch.ones_like(old)), BATCH)
    assert torch.equal(columns["rollout_is_weights"], torch.ones(2, 3))
    assert "rollout_corr/kl" in metrics
    assert "rollout_corr/rollout_is_mean" not in metrics


WRONG = {
    "nothing to do": ({}, "has neither weights nor rejections"),
    "a class": ({"weights": TruncatedIS}, "pass a weights object"),
    "both in two places": ({"weights": RolloutCorrection(TruncatedIS()), "rejections": [K3]}, "put both into one"),
    "a denominator without rejections": ({"weights": TruncatedIS(), "denominator": "all"}, "but rejects nothing"),
    "an unknown denominator": ({"rejections": [K3], "denominator": "some"}, "denominator is one of"),
    "no rejection": ({"rejections": ["token_k3"]}, "each a Rejection; item 0 is"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_cannot_be_are_refused_when_declared(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(GraphError, match=message):
        corrected(**settings)


def test_weights_that_are_all_zero_show_in_the_metrics() -> None:
    far = {**BATCH, "rollout_log_probs": BATCH["old_log_probs"] - 9}
    columns, metrics = fire(corrected(weights=IcePop()), far)
    assert not columns["rollout_is_weights"].any()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 1


def filtered(**settings: Any) -> rg.Output:
    rollout, rewards, _ = nodes()
    return rg.stages.filter_groups(rollout, rewards, **settings)


def test_a_filter_leaves_out_groups_of_one_reward_but_for_groups_of_one() -> None:
    columns, metrics = fire(
        filtered(),
        {
            "rewards": torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0]),
            "group_ids": torch.tensor([4, 4, 7, 7, 9]),
            "response_mask": torch.ones(5, 1, dtype=torch.bool),
        },
    )
    assert columns["loss_mask"][:, 0].tolist() == [False, False, True, True, True]
    assert metrics == {"filter/groups_fraction": pytest.approx(1 / 3)}


def test_a_correction_behind_a_filter_keeps_what_both_keep() -> None:
    rollout, rewards, old = nodes()
    mask = rg.stages.filter_groups(rollout, rewards)
    output = rg.stages.rollout_correction(rollout, old, mask, rejections=[K3])
    assert output.node.source_of("loss_mask") is mask.node
    columns, _ = fire(output, {**BATCH, "loss_mask": torch.tensor([[False, True, True], [True, True, False]])})
    assert columns["loss_mask"].tolist() == [[False, False, True], [False, False, False]]


def test_advantages_leave_out_what_is_rejected_and_lose_a_reward_that_lies_there() -> None:
    rollout, rewards, old = nodes()
    mask = rg.stages.rollout_correction(rollout, old, rejections=[K3])
    output = rg.advantages(rollout, rewards, mask, estimator=ReinforcePlusPlus())
    columns = {
        "rewards": torch.tensor([1.0, 1.0]),
        "response_mask": torch.tensor([[True, True], [True, True]]),
        "loss_mask": torch.tensor([[True, True], [True, False]]),
    }
    found = fire(output, columns)[0]
    assert found["returns"].tolist() == [[1, 1], [0, 0]]
    assert found["advantages"][1, 1] == 0


def test_the_update_reads_the_mask_and_every_loss_gets_it_as_its_response_mask() -> None:
    rollout, rewards, old = nodes()
    mask = rg.stages.rollout_correction(rollout, old, rejections=[K3])
    step = rg.Policy("m", pool=rg.Pool("t")).update(
        rollout, old, mask, rg.advantages(rollout, rewards, estimator=GRPO()), loss=ClippedLoss()
    )
    assert "loss_mask" in step.metrics.node.reads
    engine = Recorder()
    columns = {
        **BATCH,
        "loss_mask": BATCH["response_mask"] & (torch.arange(3) < 1),
        "advantages": torch.zeros(2, 3),
        "prompt_mask": torch.ones(2, 1, dtype=torch.bool),
    }
    step.metrics.node.operation.start(Context(engine=engine))(3, columns)
    assert torch.equal(engine.batch["response_mask"], columns["loss_mask"])
    assert engine.batch["current_version"].tolist() == [3, 3]


@dataclasses.dataclass
class Recorder:
    """An engine that keeps the batch it was to train on."""

    batch: dict[str, Any] = dataclasses.field(default_factory=dict)

    def update(self, batch: Columns, *others: object, **settings: object) -> dict[str, float]:
        self.batch = dict(batch)
        return {}


def test_a_token_baseline_may_weigh_by_the_correction() -> None:
    rollout, rewards, _ = nodes()
    old = rg.Policy("m", pool=rg.Pool("t")).log_probs(rollout, sum_pi_squared=True)
    weights = rg.stages.rollout_correction(rollout, old, weights=TruncatedIS())
    output = rg.advantages(rollout, rewards, old, weights, estimator=OptimalTokenBaseline(weighted=True))
    assert {"sum_pi_squared", "rollout_is_weights"} <= set(output.node.reads)
