"""How far two policies are apart: estimators of the KL divergence for each token, and its coefficient in the reward."""

from dataclasses import dataclass, replace

import torch

from rlgraph.algorithms.inputs import check_choice, check_mask, check_number, check_whole
from rlgraph.algorithms.masks import keep, masked_mean

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
CLAMP = 20.0


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """Return an estimate of KL(policy, reference) for each token, from the log-probs `[B, T]` of tokens that the policy sampled.

    k1 is the log-ratio, which has no useful gradient as a loss; abs its magnitude; k2 half its square; k3 = exp(-d) - 1 + d is
    positive and has the expectation of k1. k3 clamps d to [-20, 20] and itself to at most 10. A name that ends in + has the value
    of the estimator and the gradient of k2, which is that of the KL. Source: Schulman, 2020, "Approximating KL divergence".

    Raises GraphError for an unknown estimator.
    """
    check_choice("kl_penalty", "estimator", estimator, KL_ESTIMATORS)
    return kl_of_log_ratio(log_probs - ref_log_probs, estimator)


def kl_of_log_ratio(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return what `kl_penalty` does, from the log of policy over reference."""
    if estimator.endswith("+"):
        k2 = 0.5 * log_ratio.square()
        return kl_of_log_ratio(log_ratio.detach(), estimator[:-1]) + (k2 - k2.detach())
    if estimator == "k1":
        return log_ratio
    if estimator == "abs":
        return log_ratio.abs()
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    safe = (-log_ratio).clamp(-CLAMP, CLAMP)
    return (torch.expm1(safe) - safe).clamp(max=10.0)


@dataclass(frozen=True)
class FixedKL:
    """A coefficient that stays what it is."""

    coef: float = 0.001

    def __post_init__(self) -> None:
        check_number("FixedKL", "coef", self.coef, least=0)

    def updated(self, kl: float, rows: int) -> "FixedKL":
        """Return the coefficient for the next batch: the same."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient that follows the KL: raised where it is above `target`, lowered below, by at most 20 % in `horizon` rows.

    Source: Ziegler et al., 2019, 1909.08593.
    """

    coef: float = 0.001
    target: float = 0.1
    horizon: int = 10_000

    def __post_init__(self) -> None:
        check_number("AdaptiveKL", "coef", self.coef, above=0)
        check_number("AdaptiveKL", "target", self.target, above=0)
        check_whole("AdaptiveKL", "horizon", self.horizon, 1)

    def updated(self, kl: float, rows: int) -> "AdaptiveKL":
        """Return the coefficient for the next batch, after one of `rows` responses whose KL was `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * rows / self.horizon))


@torch.no_grad()
def penalize_rewards(
    token_rewards: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    mask: torch.Tensor,
    coef: float,
    estimator: str = "k1",
) -> tuple[torch.Tensor, float]:
    """Return token rewards `[B, T]` less `coef` times the KL of each token, and the KL: the mean over rows of their token means.

    A batch is shaped with the coefficient from before it: give the KL to `updated` of a controller for the next.
    Source: Ouyang et al., 2022, 2203.02155, equation 2. Raises GraphError for an unknown estimator or a negative coefficient.
    """
    check_number("penalize_rewards", "coef", coef, least=0)
    check_mask("penalize_rewards", mask)
    kl = keep(kl_penalty(old_log_probs, ref_log_probs, estimator), mask)
    return token_rewards - coef * kl, float(masked_mean(kl, mask, -1).sum() / max(len(mask), 1))
