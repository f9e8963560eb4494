"""Every algorithm against verl 0.9.1's own results, values and gradients, on random ragged batches."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlgraph.algorithms as alg
from rlgraph.engines.forward.head import token_scores

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden.npz"
HORIZON = 50
Outputs = dict[str, torch.Tensor | float]


@dataclass(frozen=True)
class Case:
    """One call of verl: on which batch, of what, with which options, and what came out."""

    index: int
    batch: str
    dtype: str
    family: str
    item: str
    options: dict[str, Any]
    scalars: dict[str, float]

    @property
    def name(self) -> str:
        options = "-".join(f"{key}={value}" for key, value in self.options.items() if value is not None)
        return f"{self.item}-{self.batch}-{self.dtype}-{options}"

    def columns(self) -> dict[str, torch.Tensor]:
        prefix = f"{self.batch}/{self.dtype}/"
        return {key.removeprefix(prefix): torch.from_numpy(value) for key, value in _arrays().items() if key.startswith(prefix)}

    def expected(self) -> Outputs:
        prefix = f"{self.index}/"
        arrays = {key.removeprefix(prefix): torch.from_numpy(value) for key, value in _arrays().items() if key.startswith(prefix)}
        return {**self.scalars, **arrays}


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


def load_metadata() -> dict[str, Any]:
    """Return how the golden file was made: versions and seeds, and its cases."""
    return json.loads(_arrays()["about"].tobytes())


def cases(family: str) -> list[Case]:
    return [case for case in (Case(index, **entry) for index, entry in enumerate(load_metadata()["cases"])) if case.family == family]


ESTIMATORS = {
    "grpo": lambda o: alg.GRPO(normalize_std=o["normalize_std"]),
    "grpo_vectorized": lambda o: alg.GRPO(),
    "grpo_passk": lambda o: alg.PassK(normalize_std=o["normalize_std"]),
    "rloo": lambda o: alg.RLOO(),
    "rloo_vectorized": lambda o: alg.RLOO(singleton="zero"),
    "opo": lambda o: alg.OPO(),
    "gpg": lambda o: alg.GPG(),
    "reinforce_plus_plus_baseline": lambda o: alg.ReinforcePlusPlusBaseline(),
    "reinforce_plus_plus": lambda o: alg.ReinforcePlusPlus(gamma=o["gamma"]),
    "gae": lambda o: alg.GAE(gamma=o["gamma"], lam=o["lam"]),
    "remax": lambda o: alg.ReMax(),
    "gdpo": lambda o: alg.GDPO(keys=("accuracy", "format"), weights=tuple(o["weights"]) if o["weights"] else None),
    "optimal_token_baseline": lambda o: alg.OptimalTokenBaseline(zero_tail=o["zero_tail"], weighted=o["weighted"]),
    "tir_optimal_token_baseline": lambda o: alg.OptimalTokenBaseline(align="token", zero_tail=o["zero_tail"], weighted=o["weighted"]),
}


def _clips(o: dict[str, Any]) -> dict[str, float]:
    return {"clip_low": o.get("clip_ratio_low", 0.2), "clip_high": o.get("clip_ratio_high", 0.2)}


def _bounds(o: dict[str, Any]) -> dict[str, float]:
    return {"low": o.get("clip_ratio_low", 0.2), "high": o.get("clip_ratio_high", 0.2), "clip_c": o.get("clip_ratio_c", 3.0)}


def _aggregation(o: dict[str, Any]) -> dict[str, Any]:
    return {"aggregation": o["mode"], "horizon": HORIZON if o["mode"] == "seq-mean-token-sum-norm" else None}


LOSSES = {
    "vanilla": lambda o: alg.ClippedLoss(clip_c=o.get("clip_ratio_c", 3.0), **_clips(o), **_aggregation(o)),
    "gspo": lambda o: alg.GSPO(**_clips(o), **_aggregation(o)),
    "cispo": lambda o: alg.CISPO(**_clips(o), **_aggregation(o)),
    "gpg": lambda o: alg.Reinforce(**_aggregation(o)),
    "geo_mean": lambda o: alg.GMPO(**_clips(o)),
    "sapo": lambda o: alg.SAPO(tau_pos=o.get("tau_pos", 1.0), tau_neg=o.get("tau_neg", 1.05)),
    "dppo_tv": lambda o: alg.DPPO(divergence="tv", **_bounds(o)),
    "dppo_kl": lambda o: alg.DPPO(divergence="kl", **_bounds(o)),
    "dro": lambda o: alg.DRO(beta=o["beta"]),
    "clip_cov": lambda o: alg.ClipCov(fraction=o["clip_cov_ratio"], low=o["clip_cov_lb"], high=o["clip_cov_ub"]),
    "kl_cov": lambda o: alg.KlCov(fraction=o["kl_cov_ratio"], coef=o["ppo_kl_coef"]),
    "bypass_mode": lambda o: alg.loss(o["preset"]),
}


def whole_loss(o: dict[str, Any]) -> alg.ClippedLoss:
    """Return the actor's loss with its entropy bonus and KL term."""
    estimator = {"low_var_kl": "k3", "mse": "k2"}.get(o["estimator"], o["estimator"])
    return alg.ClippedLoss(entropy_coef=0.3, kl_coef=0.2, kl_estimator=estimator, **_aggregation(o))


def correction(o: dict[str, Any]) -> alg.RolloutCorrection:
    """Return the correction that verl's settings mean."""
    if "preset" in o:
        return alg.correction(o["preset"])
    weights = None
    if o.get("rollout_is"):
        level, normalize, threshold = o["rollout_is"], o["rollout_is_batch_normalize"], o["rollout_is_threshold"]
        low, _, high = str(threshold).rpartition("_")
        weights = (
            alg.IcePop(level=level, normalize=normalize, low=float(low), high=float(high))
            if low
            else alg.TruncatedIS(level=level, normalize=normalize, threshold=float(high))
        )
    names = o["rollout_rs"].split(",") if o.get("rollout_rs") else []
    thresholds = str(o.get("rollout_rs_threshold")).split(",")
    return alg.RolloutCorrection(weights, tuple(alg.Rejection.from_verl(n, t) for n, t in zip(names, thresholds, strict=bool(names))))


TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


def named(family: str) -> list:
    return [pytest.param(case, id=case.name) for case in cases(family)]


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


def verl_totals(mask: torch.Tensor) -> alg.Totals:
    """Return the totals that verl's trainer gives its losses: every row counts, whether or not it has a token."""
    return alg.Totals(int(mask.sum()), len(mask))


@pytest.mark.parametrize("case", named("estimators"))
def test_estimator_equals_verl(case: Case) -> None:
    columns = case.columns()
    got = ESTIMATORS[case.item](case.options)(columns)
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
    loss, metrics = LOSSES[case.item](case.options)(log_probs, columns, verl_totals(columns["response_mask"]))
    loss.backward()
    assert log_probs.grad is not None
    assert_close({"loss": loss.detach(), "gradient": log_probs.grad}, case, TOLERANCE[case.dtype])
    if case.item == "bypass_mode":
        # verl divides `actor/...` of this mode by what is kept, and counts a perplexity of 1 for a row without tokens.
        told = {name: value for name, value in metrics.items() if name.startswith("rollout_corr/")}
        empty = not bool(columns["response_mask"].any(-1).all())
        metrics = {
            name: value for name, value in told.items() if not (empty and name.endswith(("_ppl", "ppl_ratio")) and "log" not in name)
        }
        assert metrics.keys() <= case.scalars.keys()
    # gpg has none; verl reports an absolute log-ratio as kl_cov's ppo_kl.
    if case.item not in ("gpg", "kl_cov"):
        assert_close(metrics, case, 1e-6)


@pytest.mark.parametrize("case", named("totals"))
def test_the_whole_loss_on_any_number_of_ranks_equals_verl(case: Case) -> None:
    columns, ranks = case.columns(), case.options["ranks"]
    leaves = [column.clone().requires_grad_() for column in (columns["log_probs"], case.expected()["entropy"])]
    totals = verl_totals(columns["response_mask"])
    loss = torch.zeros(())
    for rank in range(ranks):
        part = {name: column[rank::ranks] for name, column in columns.items() if name != "rollout_is_weights"}
        log_probs, entropy = (leaf[rank::ranks] for leaf in leaves)
        loss = loss + whole_loss(case.options)(log_probs, part, totals, entropy)[0]
    loss.backward()
    got: Outputs = {"loss": loss.detach(), "gradient": leaves[0].grad, "entropy_gradient": leaves[1].grad}
    # verl's trainer gives masks as bools, whose counts of a row's tokens are then float32 and lose what is added to them.
    rough = case.options["mode"] == "seq-mean-token-mean"
    assert_close(got, case, max(TOLERANCE[case.dtype], 1e-8 if rough else 0))


@pytest.mark.parametrize("case", named("entropies"))
def test_the_entropy_of_logits_equals_verl(case: Case) -> None:
    mask = case.columns()["response_mask"]
    logits = case.expected()["logits"].clone().requires_grad_()
    _, entropy = token_scores(logits.flatten(0, 1), torch.zeros(mask.numel(), dtype=torch.int64), entropy=True)
    loss = alg.aggregate(entropy.view_as(mask), mask, verl_totals(mask))
    loss.backward()
    assert_close({"loss": loss.detach(), "gradient": logits.grad}, case, 1e-6)


@pytest.mark.parametrize("case", named("shaping"))
def test_the_penalty_of_long_responses_equals_verl(case: Case) -> None:
    assert_close(alg.OverlongPenalty(**case.options)(case.columns()), case, 1e-6)  # which verl computes in float32


@pytest.mark.parametrize("case", named("value_losses"))
def test_value_loss_equals_verl(case: Case) -> None:
    columns = case.columns()
    values = columns["new_values"].clone().requires_grad_()
    horizon = HORIZON if case.options["mode"] == "seq-mean-token-sum-norm" else None
    loss = alg.ValueLoss(clip=case.options["clip"], aggregation=case.options["mode"], horizon=horizon)
    value, metrics = loss(values, columns, verl_totals(columns["response_mask"]))
    value.backward()
    assert values.grad is not None
    assert_close({"loss": value.detach(), "gradient": values.grad}, case, TOLERANCE[case.dtype])
    assert_close(metrics, case, 1e-6)


@pytest.mark.parametrize("case", named("kl"))
def test_kl_equals_verl(case: Case) -> None:
    columns = case.columns()
    if case.item == "kl_in_reward":
        adaptive = case.options["controller"] == "adaptive"
        control = alg.AdaptiveKL(coef=0.05, target=0.1, horizon=100) if adaptive else alg.FixedKL(0.05)
        names = ("token_rewards", "old_log_probs", "ref_log_probs", "response_mask")
        rewards, kl = alg.penalize_rewards(*(columns[name] for name in names), control.coef, case.options["estimator"])
        got: Outputs = {"token_rewards": rewards, "kl": kl, "next_coef": control.advance(kl, len(rewards)).coef}
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
    found = correction(case.options)
    inputs = [columns[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask")]
    assert bool((found.acceptance_mask(*inputs) == case.expected()["mask"]).all())
    if found.weights is not None:
        assert_close({"weights": found.weights(*inputs)}, case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", named("corrections"))
def test_diagnostics_equal_verl(case: Case) -> None:
    columns = case.columns()
    got = alg.diagnostics(*(columns[n] for n in ("old_log_probs", "rollout_log_probs", "response_mask")), correction(case.options))
    expected = {name for name in case.scalars if name.startswith("rollout_corr/")}
    assert got.keys() == expected
    # verl takes standard deviations as a difference of squares, which in float32 costs it digits.
    rough = {name: value for name, value in got.items() if name.endswith("_std") and case.dtype == "float32"}
    assert_close(rough, case, 5e-6)
    assert_close({name: value for name, value in got.items() if name not in rough}, case, 1e-6)


def test_the_oracle_covers_every_item_in_both_dtypes() -> None:
    families = ("estimators", "policy_losses", "totals", "entropies", "shaping", "value_losses", "kl", "corrections")
    covered = [case for family in families for case in cases(family)]
    assert load_metadata()["verl"] == "0.9.1"
    assert {case.item for case in covered} == {
        *ESTIMATORS,
        *LOSSES,
        "value_loss",
        "kl_penalty",
        "kl_in_reward",
        "correction",
        "ppo_loss",
        "entropy",
        "overlong",
    }
    assert {(case.batch, case.dtype) for case in covered} == {(b, d) for b in load_metadata()["seeds"] for d in TOLERANCE}
