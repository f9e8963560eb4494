"""Importance weights, rejections, their diagnostics, and proximal policies."""

import math
from typing import Any

import pytest
import torch
from support.ragged_batches import Columns, batch, evaluate

import rlgraph.algorithms as alg
from rlgraph.errors import DataError, GraphError

RATIOS = (0.5, 0.9, 1.0, 1.15, 1.5, 5.0)


def inputs(ratios: tuple[float, ...] = RATIOS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor([ratios]).log() - 3, torch.full((1, len(ratios)), -3.0), torch.ones(1, len(ratios), dtype=torch.bool)


def of(columns: Columns) -> list[torch.Tensor]:
    return [columns[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask")]


def test_the_bounds_of_icepop_are_within() -> None:
    assert alg.IcePop(low=1.0, high=1.0)(*inputs((1.0,))).item() == 1


def test_weights_are_clamped_and_carry_no_gradient() -> None:
    old = torch.tensor([[200.0, -200.0]], requires_grad=True)
    weights = alg.TruncatedIS(threshold=1e30)(old, torch.zeros(1, 2), torch.ones(1, 2).bool())
    assert weights[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert not weights.requires_grad


@pytest.mark.parametrize(("low", "high", "kept"), [(0.6, 1.2, [0.9, 1.0, 1.15]), (None, 1.2, [0.9, 1.0, 1.15]), (None, 1.6, RATIOS[1:5])])
def test_k1_bounds_are_bounds_of_the_ratio(low: float | None, high: float, kept: list[float]) -> None:
    mask = alg.Rejection("token_k1", high, low)(*inputs())
    assert [ratio for ratio, keep in zip(RATIOS, mask[0].tolist(), strict=True) if keep] == list(kept)


def test_settings_of_verl_keep_the_tokens_that_its_code_keeps() -> None:
    mask = alg.Rejection.from_verl("token_k1", "0.6_1.2")(*inputs())
    assert [ratio for ratio, keep in zip(RATIOS, mask[0].tolist(), strict=True) if keep] == [0.9, 1.0, 1.15, 1.5]
    assert alg.Rejection.from_verl("seq_mean_k3", "0.01") == alg.Rejection("seq_mean_k3", 0.01)


@pytest.mark.parametrize(
    ("option", "threshold", "low", "high"),
    [
        ("token_k1", "2_5", 0.2, 0.5),
        ("token_k1", " 0.5_2.0 ", 0.5, 2.0),
        ("seq_sum_k1", 4, 0.25, 4.0),
        ("seq_sum_k1", "1e1", 0.1, 10.0),
        ("seq_max_k2", "25", None, 25.0),
        ("token_k3", 0.01, None, 0.01),
    ],
)
def test_thresholds_are_read_as_verl_reads_them(option: str, threshold: str | float, low: float | None, high: float) -> None:
    assert alg.Rejection.from_verl(option, threshold) == alg.Rejection(option, high, low)


@pytest.mark.parametrize(
    ("option", "threshold"),
    [
        *(("seq_mean_k3", wrong) for wrong in ("2_5", "0.1_0.5", "", "many", "0", -1, True, None, "1,2", "nan", "inf")),
        *(("token_k1", wrong) for wrong in ("0.5_0", "0_2", "2_1", "0.5", "0", "-1_1", "1_2_3", "1_0_2", "_", "0.5_", "nan_2", [0.5, 2])),
    ],
)
def test_thresholds_that_verl_refuses_are_refused_with_the_format(option: str, threshold: Any) -> None:
    form = "'0.5_2.0'" if option == "token_k1" else "one number above 0"
    with pytest.raises(GraphError, match=f"from_verl.'{option}', .*{form}"):
        alg.Rejection.from_verl(option, threshold)


def test_an_option_unknown_to_verl_is_refused_with_the_known_ones() -> None:
    with pytest.raises(GraphError, match=r"statistic is one of .*token_k1"):
        alg.Rejection.from_verl("token_k4", 1.0)


@pytest.mark.parametrize("statistic", alg.STATISTICS)
def test_a_sequence_is_kept_or_rejected_as_a_whole(statistic: str) -> None:
    columns = batch(0, dtype=torch.float32)
    high = 1.1 if statistic.endswith("k1") else 0.003
    kept, mask = alg.Rejection(statistic, high)(*of(columns)), columns["response_mask"]
    assert not (kept & ~mask).any()
    assert kept.any()
    assert (kept != mask).any()
    whole = (kept == mask).all(-1) | ~kept.any(-1)
    assert bool(whole.all()) != statistic.startswith("token")


def test_rejections_are_joined_and_rejected_tokens_weigh_nothing() -> None:
    columns = batch(1)
    low, high = alg.Rejection("token_k2", 0.01), alg.Rejection("seq_max_k3", 0.02)
    correction = alg.RolloutCorrection(alg.TruncatedIS(), (low, high))
    kept = correction.acceptance_mask(*of(columns))
    assert torch.equal(kept, low(*of(columns)) & high(*of(columns)))
    assert torch.equal(correction(*of(columns)), torch.where(kept, alg.TruncatedIS()(*of(columns)), 0.0))
    assert torch.equal(alg.RolloutCorrection(None, (low,))(*of(columns)), low(*of(columns)).double())


def test_a_rejection_counts_in_the_denominator_or_does_not_as_it_is_used() -> None:
    columns = batch(1)
    correction = alg.RolloutCorrection(None, (alg.Rejection("token_k2", 0.003),))
    kept = correction.acceptance_mask(*of(columns))
    before = evaluate(alg.ClippedLoss(), {**columns, "rollout_is_weights": correction(*of(columns))})[0]
    after = evaluate(alg.ClippedLoss(), {**columns, "rollout_is_weights": kept.double(), "response_mask": kept})[0]
    assert 0 < int(kept.sum()) < int(columns["response_mask"].sum())
    assert float(before * columns["response_mask"].sum()) == pytest.approx(float(after * kept.sum()))


@pytest.mark.parametrize("weights", [alg.TruncatedIS(), alg.IcePop(), alg.TruncatedIS(level="sequence", normalize=True)])
def test_nothing_outside_of_the_mask_matters(weights: alg.ImportanceWeights) -> None:
    columns = batch(2)
    mask = columns["response_mask"]
    spoilt = [torch.where(mask, column, float("nan")) for column in of(columns)[:2]]
    correction = alg.RolloutCorrection(weights, (alg.Rejection("seq_mean_k3", 0.01),))
    assert torch.equal(correction(*spoilt, mask), correction(*of(columns)))
    assert not correction(*spoilt, mask)[~mask].any()
    assert alg.diagnostics(*spoilt, mask, correction) == alg.diagnostics(*of(columns), correction)


def test_an_empty_mask_has_neither_weights_nor_diagnostics() -> None:
    old, rollout, mask = inputs()
    correction = alg.RolloutCorrection(alg.TruncatedIS(normalize=True), (alg.Rejection("seq_max_k2", 0.1),))
    assert not correction(old, rollout, ~mask).any()
    assert alg.diagnostics(old, rollout, ~mask, correction) == {}


def test_weights_that_are_all_zero_have_an_effective_sample_size_of_zero() -> None:
    metrics = alg.diagnostics(*inputs((7.0, 8.0)), alg.RolloutCorrection(alg.IcePop(low=0.5, high=2.0, normalize=True)))
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(1)
    assert all(math.isfinite(value) for value in metrics.values())


def test_bypass_equals_the_clipped_loss_against_the_rollout() -> None:
    columns = batch(3)
    against = {key: column for key, column in columns.items() if key != "rollout_is_weights"} | {
        "old_log_probs": columns["rollout_log_probs"]
    }
    assert torch.equal(evaluate(alg.Bypass(), columns)[1], evaluate(alg.ClippedLoss(), against)[1])


def test_bypass_rejections_keep_the_totals_and_are_reported() -> None:
    columns = batch(3)
    everything = alg.Bypass(correction=alg.RolloutCorrection(None, (alg.Rejection("token_k2", 1e-12),)))
    value, gradient, metrics = evaluate(everything, columns)
    assert float(value) == 0
    assert not gradient.any()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1


@pytest.mark.parametrize("name", [name for name in alg.LOSSES if name.startswith("bypass")])
def test_bypass_reports_the_diagnostics_of_the_whole_batch(name: str) -> None:
    columns = batch(3)
    loss = alg.loss(name)
    policies = columns["log_probs"], columns["rollout_log_probs"], columns["response_mask"]
    whole, found = alg.diagnostics(*policies, loss.correction), evaluate(loss, columns)[2]
    told = {key: value for key, value in found.items() if key.startswith("rollout_corr/")}
    assert told == pytest.approx({key: whole[key] for key in told})
    wanted = ["kl", "k3_kl", "chi2_token", "chi2_seq", "training_ppl", "rollout_ppl", "ppl_ratio"]
    wanted += ["rollout_is_mean", "rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low"] if loss.correction.weights else []
    wanted += ["rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"] if loss.correction.rejections else []
    assert {f"rollout_corr/{key}" for key in wanted} <= told.keys()


@pytest.mark.parametrize(("version", "current", "expected"), [(0, 2, -1.25), (1, 2, -1.0), (2, 2, -1.0), (-1, 2, -1.0), (0, 4, -1.375)])
def test_the_proximal_policy_lies_a_version_behind_the_current(version: int, current: int, expected: float) -> None:
    proximal = alg.proximal_log_probs(torch.tensor([[-1.5]]), torch.tensor([[-1.0]]), torch.tensor([[version]]), current)
    assert proximal.item() == pytest.approx(expected)


def test_the_linear_proximal_policy_mixes_probabilities() -> None:
    proximal = alg.proximal_log_probs(torch.tensor([[0.2]]).log(), torch.tensor([[0.4]]).log(), torch.tensor([[0]]), 2, "linear")
    assert proximal.exp().item() == pytest.approx(0.3)


def test_one_version_behind_the_proximal_loss_is_ppo_against_the_rollout() -> None:
    columns = batch(4)
    columns["weight_version"].fill_(3)
    against = {key: column for key, column in columns.items() if key != "rollout_is_weights"} | {
        "old_log_probs": columns["rollout_log_probs"]
    }
    assert torch.allclose(evaluate(alg.ProximalLoss(), columns)[1], evaluate(alg.ClippedLoss(), against)[1])


def test_the_loglinear_ratio_is_a_root_of_the_ratio_to_the_rollout() -> None:
    columns = {name: torch.tensor([[value]]) for name, value in (("log_probs", -1.1), ("rollout_log_probs", -1.0), ("advantages", 1.0))}
    columns |= {"weight_version": torch.zeros(1, 1).int(), "current_version": torch.full((1,), 2), "response_mask": torch.ones(1, 1).bool()}
    value, gradient, _ = evaluate(alg.ProximalLoss(), columns)
    root = math.exp(-0.05)
    assert float(value) == pytest.approx(-root * root, rel=1e-6)  # w r, both the root at two versions
    assert float(gradient) == pytest.approx(-root * root, rel=1e-6)


def test_a_rollout_without_log_probs_cannot_be_interpolated() -> None:
    columns = batch(4)
    columns["rollout_log_probs"][0, 0] = float("-inf")
    with pytest.raises(DataError, match="not finite"):
        evaluate(alg.ProximalLoss(), columns)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: alg.TruncatedIS(level="batch"), "'token', 'sequence'"),
        (lambda: alg.TruncatedIS(threshold=True), "finite number above 0"),
        (lambda: alg.TruncatedIS(threshold=0), "above 0"),
        (lambda: alg.TruncatedIS(normalize="yes"), "True or False"),
        (lambda: alg.IcePop(low=3, high=2), "swap them"),
        (lambda: alg.Rejection("seq_max_k1", 2.0), "'seq_max_k2'"),
        (lambda: alg.Rejection("token_k1", -1.0), "above 0"),
        (lambda: alg.Rejection("token_k2", 1.0, low=0.5), "only k1 has a lower bound"),
        (lambda: alg.Rejection("token_k1", 0.5, low=0.9), "swap them"),
        (lambda: alg.RolloutCorrection(alg.TruncatedIS), "write weights=rg.estimators.TruncatedIS"),
        (lambda: alg.RolloutCorrection(None, alg.Rejection("token_k2", 1.0)), "a tuple"),
        (lambda: alg.RolloutCorrection(None, (alg.Rejection("token_k2", 1.0),) * 2), "twice"),
    ],
)
def test_an_impossible_option_is_refused_when_it_is_given(make: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()


def test_shapes_must_agree_and_masks_be_bool() -> None:
    old, rollout, mask = inputs()
    with pytest.raises(DataError, match=r"proximal_log_probs: .*\[1, 6\].*\[1, 1\]"):
        alg.proximal_log_probs(old, rollout, torch.zeros(1, 1, dtype=torch.int32), 2)
    with pytest.raises(DataError, match=r"\[1, 6\].*\[1, 5\]"):
        alg.TruncatedIS()(old, rollout[:, :-1], mask)
    with pytest.raises(DataError, match="mask is bool"):
        alg.Rejection("token_k2", 0.1)(old, rollout, mask.float())
