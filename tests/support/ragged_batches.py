"""Random ragged batches for property tests, and the objects that every property is tested on."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import rlgraph.algorithms as alg

Columns = dict[str, torch.Tensor]

seeds = st.integers(0, 10_000)
quick = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

ESTIMATORS = {
    "grpo": alg.GRPO(),
    "dr_grpo": alg.GRPO(normalize_std=False),
    "rloo": alg.RLOO(),
    "opo": alg.OPO(),
    "gpg": alg.GPG(),
    "pass_k": alg.PassK(),
    "gdpo": alg.GDPO(keys=("rewards", "baseline_rewards"), weights=(1.0, 0.5)),
    "reinforce_plus_plus_baseline": alg.ReinforcePlusPlusBaseline(),
    "reinforce_plus_plus": alg.ReinforcePlusPlus(gamma=0.9),
    "gae": alg.GAE(gamma=0.99, lam=0.9),
    "gae_unwhitened": alg.GAE(gamma=0.99, lam=0.9, whiten=False),
    "remax": alg.ReMax(),
    "optimal_token_baseline": alg.OptimalTokenBaseline(),
    "tir_optimal_token_baseline": alg.OptimalTokenBaseline(align="token", weighted=True),
}
GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_k", "gdpo", "reinforce_plus_plus_baseline")
LOSSES = {
    "clipped": alg.ClippedLoss(clip_low=0.2, clip_high=0.28),
    "clipped_without_dual": alg.ClippedLoss(clip_c=None),
    "gspo": alg.GSPO(),
    "cispo": alg.CISPO(),
    "reinforce": alg.Reinforce(),
    "gmpo": alg.GMPO(),
    "sapo": alg.SAPO(),
    "dppo_tv": alg.DPPO("tv"),
    "dppo_kl": alg.DPPO("kl"),
    "dro": alg.DRO(beta=0.4),
    "kl_and_entropy": alg.ClippedLoss(kl_coef=0.1, kl_estimator="k3+", entropy_coef=0.01),
    "bypass_clipped": alg.Bypass(alg.ClippedLoss(), alg.RolloutCorrection(None, (alg.Rejection("seq_mean_k2", 0.05),))),
    "bypass_reinforce": alg.loss("bypass_pg_token_icepop"),
    "proximal": alg.ProximalLoss(),
}
COVARIANCE_LOSSES = {"clip_cov": alg.ClipCov(fraction=0.2, low=0.1), "kl_cov": alg.KlCov(fraction=0.2)}
ALL_LOSSES = {**LOSSES, **COVARIANCE_LOSSES}


def batch(seed: int, rows: int = 8, length: int = 9, dtype: torch.dtype = torch.float64, gaps: bool = True) -> Columns:
    """Return every column, with groups of 2 rows or more in mixed order, gaps in the mask, and a row of one token."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype)

    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=g)
    if gaps:
        mask &= torch.rand(rows, length, generator=g) > 0.2
    mask[0], mask[1] = True, torch.arange(length) == 0
    log_probs = -normal(rows, length).abs() - 0.05
    old = (log_probs + 0.3 * normal(rows, length)).clamp(max=-0.01)
    ids = torch.arange(rows) // 2 if rows < 6 else torch.arange(rows) % 3
    return {
        "response_mask": mask,
        "group_ids": ids[torch.randperm(rows, generator=g)],
        "log_probs": log_probs,
        "old_log_probs": old,
        "rollout_log_probs": (old + 0.1 * normal(rows, length)).clamp(max=-0.01),
        "ref_log_probs": log_probs + 0.3 * normal(rows, length),
        "advantages": normal(rows, length),
        "rewards": normal(rows),
        "baseline_rewards": normal(rows),
        "token_rewards": normal(rows, length),
        "values": normal(rows, length),
        "returns": normal(rows, length),
        "rollout_is_weights": normal(rows, length).abs(),
        "sum_pi_squared": old.exp() ** 2 + 0.1 * (1 - old.exp()) ** 2,
        "weight_version": torch.randint(0, 4, (rows, length), generator=g, dtype=torch.int32),
        "current_version": torch.full((rows,), 4, dtype=torch.int32),
        "entropy": normal(rows, length).abs(),
    }


def evaluate(loss: object, columns: Columns, totals: alg.Totals | None = None) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return loss, gradient of the log-probs `[B, T]`, and metrics."""
    log_probs = columns["log_probs"].detach().clone().requires_grad_()
    totals = totals or alg.Totals.of(columns["response_mask"])
    value, metrics = loss(log_probs, columns, totals, columns["entropy"] if loss.needs_entropy else None)
    (gradient,) = torch.autograd.grad(value, log_probs)
    return value.detach(), gradient, metrics


def spoil_masked(columns: Columns) -> Columns:
    """Put NaN where the mask has no token, in every column of its shape."""
    mask = columns["response_mask"]
    return {
        key: torch.where(mask, column, float("nan")) if column.shape == mask.shape and column.is_floating_point() else column
        for key, column in columns.items()
    }
