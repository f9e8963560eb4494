"""The streamed update: it adds the gradients of each chunk of a batch when the chunk is there, and steps after the last one.

An update that gets the same chunks at once has the same passes in the same order, so both have the same bits. The number of tokens
that a loss divides by is known only with the last chunk: until then losses, gradients and metrics are sums.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rlgraph.algorithms.masks import Totals, divisor
from rlgraph.algorithms.policy_loss import AGGREGATED
from rlgraph.columns import Columns
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Node, Output, reachable
from rlgraph.graph.rules import why_full_batch
from rlgraph.nodes.base import declares, tensor_of
from rlgraph.nodes.training.guards import UpdateGuard
from rlgraph.nodes.training.trained_model import TrainedModel

SUMS = Totals(1, 1)  # losses and metrics that are divided by these are sums


@runtime_checkable
class AdditiveLoss(Protocol):
    """A loss that may be `additive`: it and its metrics are sums over rows, divided by what its `aggregation` says."""

    additive: bool
    aggregation: str


@dataclass
class StreamedBatch:
    """A batch that arrives in `chunks`, and its optimizer steps: one for each of `mini_batches` equal parts of the chunks."""

    engine: Any
    loss: Any
    guard: UpdateGuard
    chunks: int
    mini_batches: int
    temperature: float
    arrived: int = 0
    steps: list[dict[str, float]] = field(default_factory=list)  # the metrics of each optimizer step
    empty: int = 0  # mini-batches without a token to learn from
    tokens: int = 0  # of the present mini-batch, as the following
    rows: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, chunk: Columns) -> dict[str, float]:
        """Add the gradients of a chunk; take the optimizer step if it is the last one of its mini-batch.

        With the last chunk of the batch it returns the metrics, averaged over the optimizer steps.
        """
        if self.arrived % self.chunks == 0:
            self.guard.begin()
            self.arrived, self.steps, self.empty = 0, [], 0
        self.guard.look(chunk)
        totals = Totals.of(tensor_of(chunk, "response_mask"))
        for name, value in self.engine.add_gradients(chunk, self.loss, SUMS, temperature=self.temperature).items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.tokens, self.rows, self.arrived = self.tokens + totals.tokens, self.rows + totals.rows, self.arrived + 1
        if self.arrived * self.mini_batches % self.chunks == 0:
            self._step()
        return average(self.steps) if self.arrived == self.chunks else {}

    def _step(self) -> None:
        learns = self.guard.judge() if self.arrived == self.chunks else True
        totals, metrics, self.sums = Totals(self.tokens, self.rows), self.sums, {}
        self.tokens = self.rows = 0
        unit = divisor(self.loss.aggregation, totals)
        means = {name: value / (unit if name in AGGREGATED else max(totals.tokens, 1)) for name, value in metrics.items()}
        learns = learns and totals.tokens > 0
        found = self.engine.apply_gradients(means, learns=learns, guard=self.guard, divisor=unit)
        if learns:
            self.steps.append(found)
        else:
            self.empty += 1
        if self.mini_batches > 1:
            self.guard.found["guards/empty_mini_batches"] = float(self.empty)


def average(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the optimizer steps that report it.

    >>> average([{"loss": 1.0, "kl": 0.5}, {"loss": 2.0}])
    {'loss': 1.5, 'kl': 0.5}
    """
    each = {name: [step[name] for step in steps if name in step] for name in dict.fromkeys(name for step in steps for name in step)}
    return {name: sum(values) / len(values) for name, values in each.items()}


def chunks_of(name: str, inputs: Iterable[Any]) -> int:
    """Count the chunks in which the inputs of a streamed update arrive. Raises GraphError if they arrive as whole batches."""
    found = {output.node.stream for output in inputs if isinstance(output, Output)} - {None}
    if len(found) != 1:
        raise GraphError(
            f"node '{name}' has streamed=True, but its inputs come from {len(found)} rollouts with chunks; it learns from the chunks of "
            "one: set them, e.g. generator.rollout(…, chunks=4), or leave out streamed"
        )
    (rollout,) = found
    assert rollout is not None
    return rollout.chunks


def check_streamed(node: Node, model: TrainedModel, loss: Any) -> None:
    """Raise GraphError for a streamed update that cannot learn from one chunk after the other."""
    where, spec, epochs, mini_batches = f"node '{node.name}' has streamed=True", model.spec, node.traits.epochs, node.traits.mini_batches
    if not spec.streams:
        raise GraphError(f"{where}, but trainer='{spec.name}' requires whole batches: leave out streamed, or use trainer='fsdp'")
    if node.follows is None:
        rollout = next(output.node.stream for output in node.inputs if output.node.stream is not None)
        late = [output.node for output in node.inputs if output.node.stream is None and output.node.needs(rollout)]
        reasons = "; ".join(f"'{other.name}' {why_full_batch(other, rollout)}" for other in late) or (
            f"it runs in the pool '{rollout.pool.name if rollout.pool else ''}' of the rollout, so only after it"
        )
        raise GraphError(f"{where}, but has to wait for the whole batch: {reasons}. Change that, or leave out streamed")
    if not (isinstance(loss, AdditiveLoss) and declares(loss, "additive")):
        other = "rg.ClippedLoss()" if model.scores == "log_probs" else "rg.losses.ValueLoss()"
        raise GraphError(
            f"{where} with loss={type(loss).__name__}(…), which does not add up over chunks; use a loss such as {other}, declare "
            "additive = True in your own class if it does add up, or leave out streamed"
        )
    if model.load_balance and loss.aggregation != "token-mean":
        raise GraphError(f"{where}, load_balance, and a loss with aggregation={loss.aggregation!r}; only 'token-mean' works with both")
    if epochs > 1 or len({output.prefix for output in node.inputs}) > 1:
        given = f"epochs={epochs}" if epochs > 1 else "also=[…]"
        raise GraphError(f"{where} and {given}, which needs the whole batch; leave out one of them")
    if node.chunks % mini_batches:
        raise GraphError(
            f"{where} and mini_batches={mini_batches} of a batch in {node.chunks} chunks; each mini-batch is a number of whole chunks: "
            f"choose a divisor of {node.chunks}"
        )
    if mini_batches > 1 and node.follows.traits.reorders:
        raise GraphError(
            f"{where}, mini_batches={mini_batches} and a rollout with order='finish': earlier optimizer steps would learn from shorter "
            "responses; leave out mini_batches or order"
        )
    own = next((other for other in reachable(node.inputs) if other.model is model), None)
    if mini_batches > 1 and own is not None:
        without = f", or '{own.name}': ratios are then those to the rollout's log-probs" if "old_log_probs" in own.writes else ""
        raise GraphError(
            f"{where} and mini_batches={mini_batches}: '{own.name}' would score later chunks with weights that earlier ones have trained. "
            f"Leave out mini_batches{without}"
        )
