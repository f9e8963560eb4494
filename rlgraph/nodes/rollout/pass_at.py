"""Metrics of an evaluation: the mean reward, and the probability that at least one of k samples passes."""

from collections.abc import Sequence
from math import comb

import torch


def summary(rewards: torch.Tensor, sources: Sequence[str], passes: float) -> dict[str, float]:
    """Compute `reward/mean@n` and `pass@k` of rewards [N, n], over all N items and, as `source/...`, over those of each source.

    k is 1, 2, 4, ... and n. An empty source gets no metrics of its own.
    """
    found = _of(rewards, passes)
    for source in sorted(set(sources) - {""}):
        rows = torch.tensor([s == source for s in sources])
        found |= {f"{source}/{name}": value for name, value in _of(rewards[rows], passes).items()}
    return found


def _of(rewards: torch.Tensor, passes: float) -> dict[str, float]:
    samples = rewards.shape[1]
    right = (rewards >= passes).sum(-1).tolist()
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
    found = {f"reward/mean@{samples}": rewards.double().mean().item()}
    return found | {f"pass@{k}": sum(pass_at(k, samples, c) for c in right) / len(right) for k in (*powers, samples)}


def pass_at(k: int, samples: int, right: int) -> float:
    """Estimate the probability that at least one of k samples passes, without bias, given that `right` of `samples` passed.

    Source: Chen et al., 2021 (Evaluating Large Language Models Trained on Code), equation 1.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)
