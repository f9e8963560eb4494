"""What training and log-probs take, from the firings of a run: by tokens, by what the host takes for each pass, or by neither."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlgraph.compiler.schedule import Sampled
from rlgraph.costs import outliers
from rlgraph.costs.functions import NodeCost, Setting
from rlgraph.costs.lengths import Array
from rlgraph.costs.regression import explained, fewest, spread, varies

EXPLAINED = 0.3  # tokens set a time if, at most, this share of its variance stays unexplained
FLOORS = 64  # sizes tried of the largest pass that takes no longer than any smaller one
FINELY = 512  # seconds tried of a pass, where all else is known
KNOWN = 2.0  # of the information criterion: evidence "not worth more than a bare mention" (Kass and Raftery, 1995)


@dataclass(frozen=True)
class Share:
    """What one rank computed in a step: tokens a device, those of each of its passes, where they are known, and whether it was alone."""

    tokens: float
    passes: Array | None = None
    alone: bool = True

    def at_least(self, floor: float) -> float:
        """Return the tokens if each pass counts as `floor` at least."""
        return self.tokens if self.passes is None or floor == 0 else float(np.maximum(self.passes, floor).sum())


def share_of(setting: Setting, sampled: Sequence[Sampled]) -> Share:
    """Return a rank's share of what was sampled for a step."""
    lengths = np.array([[length for s in sampled for length in s.response_tokens]], dtype=float)
    prompts = float(sum(s.prompt_tokens for s in sampled))
    tokens, alone = (prompts + float(lengths.sum())) / setting.devices, setting.engines == 1
    if setting.passes is None or not lengths.size:
        return Share(tokens, None, alone)
    passes = setting.passes.of_a_rank(lengths, prompts / lengths.size, setting.engines)[0] / setting.width
    return Share(tokens, passes[passes > 0], alone)


def by_passes(setting: Setting, shares: Sequence[Share], seconds: Array, plain: NodeCost) -> NodeCost:
    """Return the law of the ranks measured, and beside it what a pass takes at least where the model is sharded, or is not, as runs
    on other devices show. It is `plain` where tokens explain nothing."""
    alone = setting.engines == 1
    own = np.array([share.alone == alone for share in shares])
    cost = _by_tokens(setting, [share for share in shares if share.alone == alone], seconds[own], plain)
    floor = _least(cost, [share for share in shares if share.alone != alone], seconds[~own])
    pass_s, sharded_s = (cost.pass_s, floor) if alone else (floor, cost.pass_s)
    return replace(cost, pass_s=pass_s, sharded_pass_s=sharded_s)


def _by_tokens(setting: Setting, shares: Sequence[Share], seconds: Array, plain: NodeCost) -> NodeCost:
    """Seconds by tokens, with a constant part where the steps show one, or one of each pass; `plain` where tokens explain nothing."""
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
    """Return how many tokens a pass counts as at least, because the host takes as long to launch it, and the law with it.

    What a floor explains is judged by the absolute errors (the information criterion of a Laplace distribution), which stalls do
    not rule. Where a constant part of the whole firing explains no more than it, the passes are known to have one, the firing is not.
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
    """Return the seconds that a pass takes at least where the law was not found: those that explain these firings best, or 0."""
    known = [(share.passes, own_s - cost.serial_s) for share, own_s in zip(shares, seconds, strict=True) if share.passes is not None]
    if not cost.token_s or not known:
        return 0.0

    def error(floor: float) -> float:
        return sum(abs(float(np.maximum(cost.token_s * passes, floor).sum()) - float(own_s)) for passes, own_s in known)

    most = max(max(float(own_s) / len(passes) for passes, own_s in known), 0.0)  # no pass of a firing takes less than the least
    return min((most * step / FINELY for step in range(FINELY + 1)), key=error)
