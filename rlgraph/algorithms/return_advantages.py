"""Advantages from token rewards: the rewards that follow each token, against a value estimate, a greedy response or the batch.

Tokens outside of the response mask (padding, tool tokens) are skipped: they neither pass rewards on nor add a discount, and their
advantages and returns are 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlgraph import settings
from rlgraph.algorithms.inputs import masked, reasons, rowwise, tokenwise
from rlgraph.algorithms.masks import bits, blocks, count, keep_bits, whiten
from rlgraph.algorithms.scans import Packing, discounted_sum
from rlgraph.columns import Columns
from rlgraph.settings import Fraction


@settings.refuse_unknown
@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation: returns against a critic's values, whitened over the tokens of the batch.

    A[t] = d[t] + gamma lam A[t+1] with d[t] = r[t] + gamma V[t+1] - V[t]; `returns` are A + V before whitening.
    `gamma` discounts rewards, and `lam` trades bias (0) against variance (1). The value after the last token is 0. With `bootstrap` this
    holds only where a response ended by itself: where it was cut off (`finish_reasons`), the value of its last token is used for the
    state after it, for which the critic has none (Pardo et al., 2018, 1712.00378).

        >>> GAE(gamma=1.0, lam=0.95, bootstrap=True).reads
        ('token_rewards', 'values', 'response_mask', 'finish_reasons')

    Raises DataError for a batch of one response token. Source: Schulman et al., 2016, 1506.02438.
    """

    writes: ClassVar[tuple[str, ...]] = ("advantages", "returns")
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    bootstrap: bool = False

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return ("token_rewards", "values", "response_mask", *(("finish_reasons",) if self.bootstrap else ()))

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = masked("GAE", batch)
        rewards, values = (tokenwise("GAE", batch, name, mask) for name in ("token_rewards", "values"))
        returns, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
        cut = reasons("GAE", batch, mask) != 0 if self.bootstrap else None
        for rows in blocks(mask):
            packing = Packing.of(mask[rows])
            expected = packing.left(values[rows])
            errors = packing.left(rewards[rows]) - expected
            errors[:, :-1].add_(expected[:, 1:], alpha=self.gamma)
            if cut is not None:
                last = (count(mask[rows], -1).long() - 1).clamp(min=0)[:, None]  # the value of an empty row is 0 there
                errors.scatter_add_(1, last, self.gamma * expected.gather(1, last) * cut[rows, None])
            ahead = discounted_sum(errors, self.gamma * self.lam)
            returns[rows] = packing.back(ahead + expected)
            advantages[rows] = packing.back(ahead)
        return {"advantages": whiten(advantages, mask, "GAE"), "returns": returns}


@settings.refuse_unknown
@dataclass(frozen=True)
class ReinforcePlusPlus:
    """The discounted rewards that follow each token, whitened over the tokens of the batch; needs neither critic nor groups.

        >>> batch = {"token_rewards": torch.tensor([[0.0, 1.0]]), "response_mask": torch.tensor([[True, True]])}
        >>> ReinforcePlusPlus(gamma=0.5)(batch)["returns"]
        tensor([[0.5000, 1.0000]])

    A reward on a token outside of the response mask is lost. Raises DataError for a batch of one response token.
    Source: Hu, 2025, 2501.03262.
    """

    reads: ClassVar[tuple[str, ...]] = ("token_rewards", "response_mask")
    writes: ClassVar[tuple[str, ...]] = ("advantages", "returns")
    gamma: Fraction = 1.0

    def __post_init__(self) -> None:
        settings.check(self)

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = masked("ReinforcePlusPlus", batch)
        rewards = tokenwise("ReinforcePlusPlus", batch, "token_rewards", mask)
        returns = torch.empty_like(rewards)
        for rows in blocks(mask):
            packing = Packing.of(mask[rows])
            returns[rows] = packing.back(discounted_sum(packing.left(rewards[rows]), self.gamma))
        return {"advantages": whiten(returns, mask, "ReinforcePlusPlus"), "returns": returns}


@dataclass(frozen=True)
class ReMax:
    """The rewards that follow each token, minus the reward of the greedy response to the same prompt, `baseline_rewards` `[B]`.

        >>> batch = {"token_rewards": torch.tensor([[0.0, 1.0]]), "response_mask": torch.tensor([[True, True]])}
        >>> ReMax()({**batch, "baseline_rewards": torch.tensor([0.25])})["advantages"]
        tensor([[0.7500, 0.7500]])

    Source: Li et al., 2023, 2310.10505.
    """

    reads: ClassVar[tuple[str, ...]] = ("token_rewards", "baseline_rewards", "response_mask")
    writes: ClassVar[tuple[str, ...]] = ("advantages", "returns")

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = masked("ReMax", batch)
        rewards = tokenwise("ReMax", batch, "token_rewards", mask)
        baselines = rowwise("ReMax", batch, "baseline_rewards", mask)
        returns, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
        for rows in blocks(mask):
            tokens = bits(mask[rows], rewards)
            following = discounted_sum(keep_bits(rewards[rows], tokens), 1.0)
            keep_bits(following, tokens, out=returns[rows])
            keep_bits(following.sub_(baselines[rows, None]), tokens, out=advantages[rows])
        return {"advantages": advantages, "returns": returns}
