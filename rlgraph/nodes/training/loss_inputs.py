"""Whether a loss goes with what it is given: its model's scores, and the rows of its batch."""

from collections.abc import Iterable
from typing import Any, Literal

from rlgraph.algorithms.advantages import StepwiseLoss
from rlgraph.algorithms.whole_loss import WholeLoss
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Output
from rlgraph.nodes.training.update import check_loss

HELD = {
    "pairs": "pairs, which rg.pairs and rg.preferred make",
    "labels": "single rows that are good or bad",
    "mismatched": "rows that are good or bad with a second row for each, as rg.examples(label=…, mismatched=True) makes them",
}
SCORED = {"log_probs": "the log-probs of a policy", "values": "the rewards of a rg.LearnedReward"}


def check_taken(name: str, loss: object, scores: Literal["log_probs", "values"], inputs: Iterable[Any], mini_batches: int) -> None:
    """Raise GraphError for anything but a loss object, or for one that does not go with the model's scores or with the batch."""
    check_loss(name, loss)
    check_scores(name, loss, scores)
    check_rows(name, loss, inputs, mini_batches)


def check_scores(name: str, loss: object, scores: Literal["log_probs", "values"]) -> None:
    """Raise GraphError for a loss of another kind of model than the one that gives these `scores`."""
    taken = "values" if isinstance(loss, StepwiseLoss) else loss.scores if isinstance(loss, WholeLoss) else None
    if taken not in (None, scores):
        other = "rg.DPO()" if scores == "log_probs" else "rg.BradleyTerry()"
        raise GraphError(
            f"node '{name}' has loss={type(loss).__name__}(…), which takes {SCORED[taken or scores]}, but trains on {SCORED[scores]}; "
            f"give a loss such as {other}"
        )


def check_rows(name: str, loss: object, inputs: Iterable[Any], mini_batches: int) -> None:
    """Raise GraphError for a batch whose preferences are not those that a loss compares, or mini-batches that part two rows of a pair."""
    if not isinstance(loss, WholeLoss) or loss.rows is None:
        return
    carrier = next((o.node for o in inputs if isinstance(o, Output) and "preferences" in o.columns), None)
    if carrier is None:
        return  # the declaration names the column that is missing
    held, kind = carrier.traits.preferences, type(loss).__name__
    if held not in (None, loss.rows):
        raise GraphError(f"node '{name}' has loss={kind}(…), which takes {HELD[loss.rows]}, but '{carrier.name}' gives {HELD[held]}")
    if carrier.rows // mini_batches % 2:
        raise GraphError(
            f"node '{name}' has mini_batches={mini_batches} of {carrier.rows} rows, which parts two rows that {kind} compares; choose a "
            f"divisor of {carrier.rows // 2}"
        )
