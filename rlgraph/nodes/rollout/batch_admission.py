"""Continuous decoding: the rule by which the next batch and new weights join a batch that still decodes."""

from dataclasses import dataclass

from rlgraph.engines.api import Running
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Feedback
from rlgraph.nodes.prompts import Prompts


@dataclass(frozen=True)
class BatchAdmission:
    """The rule by which new weights and new prompts join running responses. `depth` is None without a feedback edge.

    `interrupt`: the engine swaps in each published version before its next decode step, even if the edge is not `latest`. The clock
    decides when a version arrives, so a run no longer repeats bit for bit.

    `continuous`: batch k + 1 joins once half of the responses of batch k have ended. It needs version k + 1 - depth, and the rest of
    batch k goes on under that version. Without `interrupt` the engine waits for exactly this version, so a run still depends on its
    seed and depth alone. With `interrupt` up to `depth` batches join ahead, each as soon as the engine holds a version it may use.
    """

    interrupt: Running | None = None
    continuous: bool = False
    depth: int | None = None

    @property
    def running(self) -> Running:
        """What the engine does with the keys and values of running responses when the weights change."""
        return self.interrupt or "recompute"

    def needs(self, step: int) -> int:
        """Compute the oldest version of the weights that may write a token of batch `step`."""
        return 0 if self.depth is None else max(0, step - self.depth)

    def ahead(self) -> int:
        """Compute how many batches may decode beside the one that is due."""
        if not self.continuous:
            return 0
        return self.depth or 1 if self.interrupt else 1


def admission_rule(node: str, weights: Feedback | None, interrupt: Running | None, continuous: bool, source: object) -> BatchAdmission:
    """Make the rule. Raises GraphError for a setting that has no effect, or that cannot keep the staleness bound."""
    if interrupt is not None and weights is None:
        raise GraphError(f"node '{node}' has interrupt={interrupt!r} but no weights that change; pass a feedback edge, or leave it out")
    if interrupt is not None and weights is not None and weights.depth == 0:
        raise GraphError(
            f"node '{node}' has interrupt={interrupt!r}, but at depth=0 of feedback '{weights.name}' no version is published while "
            "responses decode: use depth>=1, or leave it out"
        )
    if continuous and weights is not None and weights.depth == 0:
        raise GraphError(
            f"node '{node}' has continuous=True at depth=0 of feedback '{weights.name}', where the next batch may only start on weights "
            "trained on this one: use depth>=1, or leave it out"
        )
    if continuous and source is not None and not isinstance(source, Prompts):
        raise GraphError(
            f"node '{node}' has continuous=True, so it looks up the next prompts while it decodes, which only rlgraph.prompts can tell, "
            "and of a data set with a length: pass its output, read a stream into rg.data.rows(list(...)), or leave continuous out"
        )
    return BatchAdmission(interrupt, continuous, weights.depth if weights is not None else None)
