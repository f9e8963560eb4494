"""Every algorithm against verl 0.9.1's own results, values and gradients, on random ragged batches."""

import pytest
import torch

import rlgraph.algorithms as alg
from tests.algorithms import golden
from tests.algorithms.golden import Case, Outputs

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


def named(family: str) -> list:
    return [pytest.param(case, id=case.name) for case in golden.cases(family)]


def assert_close(got: Outputs, case: Case, tolerance: float, mask: torch.Tensor | None = None) -> None:
    """Compare every output that both sides have, to `tolerance` where values are around 1, relative to the largest where they are more."""
    expected = case.expected()
    shared = expected.keys() & got.keys()
    assert shared or not got
    for name in shared:
        mine, theirs = (torch.as_tensor(side[name], dtype=torch.float64) for side in (got, expected))
        if mask is not None and theirs.shape == mask.shape:
            mine, theirs = mine[mask], theirs[mask]
        scale = max(1.0, float(theirs.abs().amax())) if theirs.numel() else 1.0
        assert mine.shape == theirs.shape
        assert float((mine - theirs).abs().amax() if mine.numel() else 0) <= tolerance * scale, name


@pytest.mark.parametrize("case", named("estimators"))
def test_estimator_equals_verl(case: Case) -> None:
    columns = case.columns()
    got = golden.ESTIMATORS[case.item](case.options)(columns)
    # verl keeps a singleton's deviation, vectorised statistics and GDPO's scores in float32 whatever the batch is.
    single = case.item in ("grpo", "grpo_vectorized", "gdpo")
    tolerance = max(TOLERANCE[case.dtype], 1e-6 if single else 0)
    assert_close(got, case, tolerance, columns["response_mask"])
    assert all(bool((column[~columns["response_mask"]] == 0).all()) for column in got.values())


@pytest.mark.parametrize("case", named("policy_losses"))
def test_policy_loss_equals_verl(case: Case) -> None:
    columns = case.columns()
    if not case.options["weighted"]:
        del columns["rollout_is_weights"]
    log_probs = columns["log_probs"].clone().requires_grad_()
    loss, metrics = golden.LOSSES[case.item](case.options)(log_probs, columns, alg.Totals.of(columns["response_mask"]))
    loss.backward()
    assert log_probs.grad is not None
    assert_close({"loss": loss.detach(), "gradient": log_probs.grad}, case, TOLERANCE[case.dtype])
    # gpg has none; verl reports an absolute log-ratio as kl_cov's ppo_kl, and divides the metrics of its bypass mode by what is kept.
    if case.item not in ("gpg", "kl_cov", "bypass_mode"):
        assert_close(metrics, case, 1e-6)


@pytest.mark.parametrize("case", named("value_losses"))
def test_value_loss_equals_verl(case: Case) -> None:
    columns = case.columns()
    values = columns["new_values"].clone().requires_grad_()
    horizon = golden.HORIZON if case.options["mode"] == "seq-mean-token-sum-norm" else None
    loss = alg.ValueLoss(clip=case.options["clip"], aggregation=case.options["mode"], horizon=horizon)
    value, metrics = loss(values, columns, alg.Totals.of(columns["response_mask"]))
    value.backward()
    assert values.grad is not None
    assert_close({"loss": value.detach(), "gradient": values.grad}, case, TOLERANCE[case.dtype])
    assert_close(metrics, case, 1e-6)


@pytest.mark.parametrize("case", named("kl"))
def test_kl_equals_verl(case: Case) -> None:
    columns = case.columns()
    if case.item == "kl_in_reward":
        control = alg.AdaptiveKL(coef=0.05, target=0.1, horizon=100)
        names = ("token_rewards", "old_log_probs", "ref_log_probs", "response_mask")
        rewards, kl = alg.penalize_rewards(*(columns[name] for name in names), control.coef, case.options["estimator"])
        got: Outputs = {"token_rewards": rewards, "kl": kl, "next_coef": control.updated(kl, len(rewards)).coef}
    else:
        log_probs = columns["log_probs"].clone().requires_grad_()
        value = alg.kl_penalty(log_probs, columns["ref_log_probs"], case.options["estimator"])
        (value * columns["upstream"]).sum().backward()
        assert log_probs.grad is not None
        got = {"value": value.detach(), "gradient": log_probs.grad}
    assert_close(got, case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", named("corrections"))
def test_rollout_correction_equals_verl(case: Case) -> None:
    columns = case.columns()
    correction = golden.correction(case.options)
    inputs = [columns[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask")]
    assert bool((correction.kept(*inputs) == case.expected()["mask"]).all())
    if correction.weights is not None:
        assert_close({"weights": correction.weights(*inputs)}, case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", named("corrections"))
def test_diagnostics_equal_verl(case: Case) -> None:
    columns = case.columns()
    got = alg.diagnostics(*(columns[n] for n in ("old_log_probs", "rollout_log_probs", "response_mask")), golden.correction(case.options))
    expected = {name for name in case.scalars if name.startswith("rollout_corr/")}
    assert got.keys() == expected
    # verl takes standard deviations as a difference of squares, which in float32 costs it digits.
    rough = {name: value for name, value in got.items() if name.endswith("_std") and case.dtype == "float32"}
    assert_close(rough, case, 5e-6)
    assert_close({name: value for name, value in got.items() if name not in rough}, case, 1e-6)


def test_the_oracle_covers_every_item_in_both_dtypes() -> None:
    cases = [case for family in ("estimators", "policy_losses", "value_losses", "kl", "corrections") for case in golden.cases(family)]
    assert golden.about()["verl"] == "0.9.1"
    assert {case.item for case in cases} == {*golden.ESTIMATORS, *golden.LOSSES, "value_loss", "kl_penalty", "kl_in_reward", "correction"}
    assert {(case.batch, case.dtype) for case in cases} == {(b, d) for b in golden.about()["seeds"] for d in TOLERANCE}
