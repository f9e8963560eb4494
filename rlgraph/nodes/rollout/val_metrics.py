"""Metrics of an evaluation: means, verl's bootstrap of best, worst and majority, and the unbiased pass@k."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from rlgraph.nodes.rewards.score import Score
from rlgraph.nodes.rollout.bootstrap import bootstrap


@dataclass(frozen=True)
class Item:
    """The answers to one item: their rewards, how right each is (`acc`), and what each says (`votes`), if the scorer tells."""

    rewards: Sequence[float]
    acc: Sequence[float]
    passed: int
    votes: Sequence[str] | None

    @classmethod
    def of(cls, scores: Sequence[Score], passes: float, tells: bool) -> "Item":
        """Make an item of its scores. An answer is right if its `acc`, or else its reward, is at least `passes`.

        `tells`: whether the scorer tells answers. A response without one then votes for "".
        """
        right = [(score if score.acc is None else score.acc) >= passes for score in scores]
        acc = [float(passed) if score.acc is None else score.acc for score, passed in zip(scores, right, strict=True)]
        votes = [score.pred or "" for score in scores] if tells else None
        return cls([float(score) for score in scores], acc, sum(right), votes)


def summary(scores: Sequence[Sequence[Score]], sources: Sequence[str], passes: float) -> dict[str, float]:
    """Compute the metrics of the scores of N items with n answers each, over all items and, as `source/...`, over those of each source.

    `acc/mean@n`, `acc/std@n`, those of `bootstrap` as `acc/best@k/mean`, and `pass@k` for k of 1, 2, 4, … and n; of the plain rewards
    `reward/mean@n` and `reward/std@n`. Each is the mean over items. `acc/stderr` is the standard error of `acc/mean@n` over items.
    An empty source gets no metrics of its own.
    """
    tells = any(score.pred is not None for answers in scores for score in answers)
    items = [Item.of(answers, passes, tells) for answers in scores]
    of_items = [_of_item(item) for item in items]
    found = _over(of_items)
    for source in sorted(set(sources) - {""}):
        own = _over([metrics for metrics, s in zip(of_items, sources, strict=True) if s == source])
        found |= {f"{source}/{name}": value for name, value in own.items()}
    return found


def _of_item(item: Item) -> dict[str, float]:
    samples = len(item.acc)
    found = {f"acc/{name}": value for name, value in bootstrap(item.acc, item.votes).items()}
    for name, values in (("acc", item.acc), ("reward", item.rewards)):
        found[f"{name}/mean@{samples}"] = float(np.mean(values))
        if samples > 1:
            found[f"{name}/std@{samples}"] = float(np.std(values))
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
    return found | {f"pass@{k}": pass_at(k, samples, item.passed) for k in (*powers, samples)}


def _over(items: Sequence[dict[str, float]]) -> dict[str, float]:
    found = {name: float(np.mean([item[name] for item in items])) for name in items[0]}
    if len(items) > 1:
        mean = next(name for name in found if name.startswith("acc/mean@"))
        found["acc/stderr"] = float(np.std([item[mean] for item in items], ddof=1) / len(items) ** 0.5)
    return found


def pass_at(k: int, samples: int, right: int) -> float:
    """Estimate the probability that at least one of k samples passes, without bias, given that `right` of `samples` passed.

    Source: Chen et al., 2021 (Evaluating Large Language Models Trained on Code), equation 1.

    >>> round(pass_at(2, 4, 1), 3)
    0.5
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)
