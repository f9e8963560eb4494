"""The baseline of least variance for each token of a group: returns weighted by the energy of the path so far."""

from dataclasses import dataclass
from typing import Literal

import torch

from rlgraph.algorithms.groups import Groups, groups_of
from rlgraph.algorithms.inputs import check_choice, check_flag, masked, tokenwise
from rlgraph.algorithms.masks import EPSILON, ends, keep
from rlgraph.algorithms.scans import Packing, discounted_sum
from rlgraph.columns import Columns


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Rewards that follow a token less a baseline of its own: sum(G W) / sum(W) over the group, at the same place.

    W[t] sums 1 - 2 p + sum(p^2) over the tokens so far, p being the old probability; `sum_pi_squared` `[B, T]` is the sum over
    the vocabulary. `align="column"` compares tokens in the same column of the batch, `"token"` the n-th response tokens, which
    with tool tokens in between are in different columns (verl's tool-integrated variant). `weighted=True` multiplies W's terms by
    `rollout_is_weights` squared. With `zero_tail` a response that is strictly the longest has no baseline where it is alone.
    A group of one has none at all.

    verl finds the tail in the column variant by counting tokens, which is off where the mask has gaps; here it begins behind the
    last token of the second longest response. As in verl 0.9.1.
    """

    align: Literal["column", "token"] = "column"
    zero_tail: bool = True
    weighted: bool = False

    def __post_init__(self) -> None:
        check_choice("OptimalTokenBaseline", "align", self.align, ("column", "token"))
        check_flag("OptimalTokenBaseline", "zero_tail", self.zero_tail)
        check_flag("OptimalTokenBaseline", "weighted", self.weighted)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it needs."""
        weights = ("rollout_is_weights",) if self.weighted else ()
        return ("token_rewards", "response_mask", "group_ids", "old_log_probs", "sum_pi_squared", *weights)

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns that it gives."""
        return ("advantages", "returns")

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Return `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        where = "OptimalTokenBaseline"
        mask = masked(where, batch)
        groups = groups_of(where, batch, mask)
        returns = keep(discounted_sum(keep(tokenwise(where, batch, "token_rewards", mask), mask), 1.0), mask)
        probabilities = tokenwise(where, batch, "old_log_probs", mask).exp()
        energy = 1 - 2 * probabilities + tokenwise(where, batch, "sum_pi_squared", mask)
        if self.weighted:
            energy = energy * tokenwise(where, batch, "rollout_is_weights", mask).square()
        weights = keep(keep(energy, mask).cumsum(-1), mask)
        if self.align == "column":
            return {"advantages": keep(returns - self.baselines(returns, weights, mask, groups), mask), "returns": returns}
        packing = Packing.of(mask)
        packed = packing.left(returns)
        baselines = self.baselines(packed, packing.left(weights), packing.packed, groups)
        return {"advantages": packing.back(packed - baselines), "returns": returns}

    def baselines(self, returns: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return the baseline of each token `[B, T]` from returns and weights that are 0 outside of the mask."""
        present = mask.any(-1)
        members = groups.sum(present.long())
        shared = (groups.sum(returns * weights) / (groups.sum(weights) + EPSILON)).index_select(0, groups.index)
        # In the column variant verl counts empty rows as members of a group, in the other it does not.
        compared = (groups.sizes if self.align == "column" else members)[groups.index] > 1
        if not self.zero_tail:
            return torch.where(compared[:, None], shared, 0.0)
        last = ends(mask)
        longest = last == groups.max(last)[groups.index]
        alone = longest & (groups.sum(longest.long()) == 1)[groups.index]
        second = groups.max(torch.where(longest, 0, last))[groups.index]
        tail = alone[:, None] & (torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device) >= second[:, None])
        return torch.where(compared[:, None] & ~tail, shared, 0.0)
