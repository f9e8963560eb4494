"""The baseline of least variance for each token of a group: returns, weighted by the energy of the path up to the token."""

from dataclasses import dataclass
from typing import Literal

import torch

from rlgraph import settings
from rlgraph.algorithms.groups import Groups, groups_of
from rlgraph.algorithms.inputs import masked, tokenwise
from rlgraph.algorithms.masks import EPSILON, bits, blocks, ends, keep_bits
from rlgraph.algorithms.scans import Packing, discounted_sum, running_sum_
from rlgraph.columns import Columns


@settings.refuse_unknown
@dataclass(frozen=True)
class OptimalTokenBaseline:
    """The rewards G that follow a token, minus a baseline of its own: sum(G W) / sum(W) over the group, at the same position.

        >>> OptimalTokenBaseline().reads
        ('token_rewards', 'response_mask', 'group_ids', 'old_log_probs', 'sum_pi_squared')

    W[t] sums 1 - 2 p + sum(p^2) over the tokens up to t, with p the old probability; `sum_pi_squared` `[B, T]` is the sum over
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
        settings.check(self)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it reads."""
        weights = ("rollout_is_weights",) if self.weighted else ()
        return ("token_rewards", "response_mask", "group_ids", "old_log_probs", "sum_pi_squared", *weights)

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns that it writes."""
        return ("advantages", "returns")

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        where = "OptimalTokenBaseline"
        mask = masked(where, batch)
        groups = groups_of(where, batch, mask)
        rewards, log_probs, squares = (tokenwise(where, batch, name, mask) for name in ("token_rewards", "old_log_probs", "sum_pi_squared"))
        scale = tokenwise(where, batch, "rollout_is_weights", mask) if self.weighted else None
        returns, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
        weighed, weights = rewards.new_zeros(2, len(groups.sizes), mask.shape[1])  # sums of the groups
        last = torch.empty(len(mask), dtype=torch.int32, device=mask.device)
        packings = [(rows, Packing.of(mask[rows]) if self.align == "token" else Packing.still(mask[rows])) for rows in blocks(mask)]
        for rows, packing in packings:
            energy = log_probs[rows].exp().mul_(-2).add_(1).add_(squares[rows])
            if scale is not None:
                energy = energy * scale[rows].square()
            weight = running_sum_(packing.left(energy.to(rewards.dtype)))
            weight = keep_bits(weight, bits(packing.packed, weight))
            following = discounted_sum(packing.left(rewards[rows]), 1.0)
            weights.index_add_(0, groups.index[rows], weight)
            weighed.index_add_(0, groups.index[rows], weight.mul_(following))
            returns[rows] = packing.back(following)
            last[rows] = ends(packing.packed)
        baselines, stops = weighed.div_(weights.add_(EPSILON)), self.stops(last, groups)[:, None]
        places = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
        for rows, packing in packings:
            shared = keep_bits(baselines.index_select(0, groups.index[rows]), bits(places < stops[rows], rewards))
            torch.sub(returns[rows], packing.back(shared), out=advantages[rows])
        return {"advantages": advantages, "returns": returns}

    def stops(self, last: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Compute the position `[B]` at which the baselines of each row stop, from the end `[B]` of the row."""
        # As in verl: empty rows are members of a group in the column variant, and not in the other.
        members = groups.sizes if self.align == "column" else groups.sum((last > 0).long())
        stops = torch.where(members[groups.index] > 1, last, 0)
        if not self.zero_tail:
            return stops
        longest = last == groups.max(last)[groups.index]
        alone = longest & (groups.sum(longest.long()) == 1)[groups.index]
        second = groups.max(torch.where(longest, 0, last))[groups.index]
        return torch.where(alone, stops.minimum(second), stops)
