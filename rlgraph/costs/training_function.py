"""Fit the seconds of training and log-probs to the firings of a run: by tokens, by the host's time for each pass, or by neither."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlgraph.compiler.schedule import Sampled
from rlgraph.costs import outliers
from rlgraph.costs.functions import NodeCost, Setting
from rlgraph.costs.lengths import Array
from rlgraph.costs.regression import explained, fewest, spread, varies

EXPLAINED = 0.3  # tokens set a time if, at most, this share of its variance stays unexplained
FLOORS = 64  # sizes tried for the floor: the largest pass that takes no longer than a smaller one
FINELY = 512  # least seconds of a pass that are tried, with all else known
KNOWN = 2.0  # of the information criterion: evidence "not worth more than a bare mention" (Kass and Raftery, 1995)


@dataclass(frozen=True)
class Share:
    """The work of one rank in a step: its tokens a device, those of each pass where known, and whether it gathered no shards of others."""

    tokens: float
    passes: Array | None = None
    alone: bool = True

    def at_least(self, floor: float) -> float:
        """Sum the tokens, with each pass counted as at least `floor`."""
        return self.tokens if self.passes is None or floor == 0 else float(np.maximum(self.passes, floor).sum())


def share_of(setting: Setting, sampled: Sequence[Sampled]) -> Share:
    """Compute a rank's share of a step's tokens. Rows that were not sampled, as examples beside a rollout, count as those that were."""
    lengths = np.array([[length for s in sampled for length in s.response_tokens]], dtype=float)
    prompts = float(sum(s.prompt_tokens for s in sampled))
    if 0 < lengths.size < setting.rows:
        prompts *= setting.rows / lengths.size
        lengths = np.resize(lengths, (1, int(setting.rows)))  # repeats them
    tokens, alone = (prompts + float(lengths.sum())) / setting.devices, setting.alone
    if setting.passes is None or not lengths.size:
        return Share(tokens, None, alone)
    passes = setting.passes.of_a_rank(lengths, prompts / lengths.size, setting.engines)[0] / setting.width
    return Share(tokens if setting.passes.group == 1 else float(passes.sum()), passes[passes > 0], alone)


def by_passes(setting: Setting, shares: Sequence[Share], seconds: Array, plain: NodeCost) -> NodeCost:
    """Fit the function of the measured ranks, and from runs on other devices the least seconds of a pass with, or without, a sharded
    model. It is `plain` if tokens explain nothing."""
    alone = setting.alone
    own = np.array([share.alone == alone for share in shares])
    cost = _by_tokens(setting, [share for share in shares if share.alone == alone], seconds[own], plain)
    floor = _least(cost, [share for share in shares if share.alone != alone], seconds[~own])
    pass_s, sharded_s = (cost.pass_s, floor) if alone else (floor, cost.pass_s)
    return replace(cost, pass_s=pass_s, sharded_pass_s=sharded_s)


def _by_tokens(setting: Setting, shares: Sequence[Share], seconds: Array, plain: NodeCost) -> NodeCost:
    """Fit seconds by tokens, with a constant part of a step or of a pass if the steps show one; `plain` if tokens explain nothing."""
    tokens = np.array([share.tokens for share in shares])
    if (tokens <= 0).any():
        return plain
    if not varies(tokens):
        slope = outliers.mean(seconds) / float(tokens.mean())
        return NodeCost(token_s=slope, spread=spread(seconds, slope * tokens), measured=setting)
    floor, columns, found = _floor(shares, seconds)
    fitted = explained(columns, found)
    kept = outliers.steady(seconds, fitted)
    if ((seconds - fitted)[kept] ** 2).sum() > EXPLAINED * ((seconds - seconds.mean())[kept] ** 2).sum() and varies(seconds):
        return plain
    token_s = found.get("token", 0.0)
    return NodeCost(
        serial_s=found.get("serial", 0.0),
        token_s=token_s,
        pass_s=token_s * floor,
        spread=spread(seconds, fitted),
        measured=setting,
    )


def _floor(shares: Sequence[Share], seconds: Array) -> tuple[float, dict[str, Array], dict[str, float]]:
    """Fit the function together with a floor: the fewest tokens that a pass counts as, since the host needs that long to launch it.

    A floor is judged by absolute errors (the information criterion of a Laplace distribution), which outliers do not dominate. If a
    constant part of the whole firing explains no more, the floor is preferred: passes are known to have one, firings are not.
    """
    largest = max((float(share.passes.max()) for share in shares if share.passes is not None), default=0.0)
    best: tuple[float, dict[str, Array], dict[str, float]] = 0.0, {}, {}
    least = float("inf")
    for floor in (largest * step / FLOORS for step in range(FLOORS + 1) if largest or not step):
        token = np.array([share.at_least(floor) for share in shares])
        for columns in ({"serial": np.ones_like(seconds), "token": token}, {"token": token}):
            found = fewest(columns, seconds)
            left = float(np.abs(seconds - explained(columns, found)).mean()) + 1e-12 * float(seconds.mean())
            numbers = len(found) + (floor > 0)
            score = 2 * len(seconds) * np.log(left) + numbers * np.log(len(seconds)) - (KNOWN if floor and numbers == 2 else 0.0)
            if score < least - 1e-9:
                least, best = score, (floor, columns, found)
    return best


def _least(cost: NodeCost, shares: Sequence[Share], seconds: Array) -> float:
    """Fit the least seconds of a pass to firings other than those of the fit: those that explain them best, or 0."""
    known = [(share.passes, own_s - cost.serial_s) for share, own_s in zip(shares, seconds, strict=True) if share.passes is not None]
    if not cost.token_s or not known:
        return 0.0

    def error(floor: float) -> float:
        return sum(abs(float(np.maximum(cost.token_s * passes, floor).sum()) - float(own_s)) for passes, own_s in known)

    most = max(max(float(own_s) / len(passes) for passes, own_s in known), 0.0)  # no pass of a firing takes less than the least
    return min((most * step / FINELY for step in range(FINELY + 1)), key=error)
