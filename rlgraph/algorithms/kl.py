"""How far two policies are apart: estimators of the KL divergence for each token, and its coefficient in the reward."""

import torch

from rlgraph.algorithms.inputs import check_choice

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
    value = _value(log_probs, ref_log_probs, estimator.removesuffix("+"))
    if not estimator.endswith("+"):
        return value
    k2 = _value(log_probs, ref_log_probs, "k2")
    return value.detach() + (k2 - k2.detach())


def _value(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str) -> torch.Tensor:
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    safe = difference.clamp(-CLAMP, CLAMP)
    return (torch.expm1(-safe) + safe).clamp(max=10.0)
