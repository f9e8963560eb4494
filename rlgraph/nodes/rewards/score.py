"""Scores that say more than a number: the answer that a response gives, and whether that answer is right."""

from collections.abc import Mapping
from typing import Any

from rlgraph.errors import DataError, shown

PRED_CHARACTERS = 1000  # of an answer; a longer one is cut, since votes compare whole texts


class Score(float):
    """A score with the answer `pred` that was found in the response, for `maj@k`, and how right it is, `acc`.

    It is a number like any other: arithmetic with it gives plain numbers. `pred` is None if the scorer tells no answers, and "" if the
    response gives none. `acc` is None if the score itself tells.

    >>> score = Score(-1.0, pred="41", acc=0.0)
    >>> score + 2, score.pred, score.acc
    (1.0, '41', 0.0)

    Raises DataError for a value that is no number.
    """

    pred: str | None
    acc: float | None

    def __new__(cls, value: float, pred: object = None, acc: float | None = None) -> "Score":
        try:
            made = super().__new__(cls, value)
            made.acc = None if acc is None else float(acc)
        except (TypeError, ValueError):
            raise DataError(f"Score({shown(value)}, acc={shown(acc)}): a score and its acc are numbers") from None
        made.pred = None if pred is None else str(pred)[:PRED_CHARACTERS]
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (Score, (float(self), self.pred, self.acc))


def score_of(value: object) -> object:
    """Convert a mapping as verl's scorers return, {"score": 1.0, "acc": True, "pred": "42"}, to a `Score`; pass other values through.

    Raises DataError for a mapping without a number under "score".
    """
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise DataError(
            f"a mapping has its number under 'score', as {{'score': 1.0, 'pred': '42'}}; it has {shown(sorted(map(str, value)))}"
        )
    return Score(value["score"], value.get("pred"), value.get("acc"))
