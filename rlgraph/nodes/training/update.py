"""The update: the node that trains a model on a batch, the optimizer steps that it takes, and the batch that a policy learns from."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlgraph import settings
from rlgraph.algorithms.advantages import StepwiseLoss
from rlgraph.algorithms.whole_loss import GRADIENTS, SlopedLoss, WholeLoss
from rlgraph.batching.packing import response_lengths
from rlgraph.columns import Column, Columns, rows_of, truncated
from rlgraph.engines.api import Loss
from rlgraph.errors import GraphError, shown
from rlgraph.graph.nodes import Node, Output, declare
from rlgraph.graph.operation import NodeTraits, Operation
from rlgraph.nodes.base import Context, Fired, Stage, tensor_of
from rlgraph.nodes.training.exact import checked_rows
from rlgraph.nodes.training.guards import Guards, UpdateGuard
from rlgraph.nodes.training.mixture import Part, mixed
from rlgraph.nodes.training.trained_model import TrainedModel, check_rotary_factors, check_trained
from rlgraph.nodes.training.vocabulary import check_vocabulary
from rlgraph.settings import Count

DEFAULT_GUARDS = Guards()


@dataclass(frozen=True)
class Update:
    """The outputs of an update: new weights for a feedback edge, and the metrics of the step."""

    weights: Output
    metrics: Output


@dataclass(frozen=True)
class UpdateSchedule:
    """An update walks its batch `epochs` times, each time in so many `mini_batches`; each of them is an optimizer step.

    A mini-batch is adjacent rows, in the order of the batch, so the responses to one prompt are trained together and a run depends on
    its seed alone. A loss is normalised by the tokens and rows of its mini-batch. A mini-batch whose rows are all masked is skipped: it
    takes no optimizer step, does not advance the warm-up, and counts in no metric.
    """

    epochs: Count = 1
    mini_batches: Count = 1

    def __post_init__(self) -> None:
        settings.check(self)

    def cut(self, batch: Columns) -> Iterator[Columns]:
        """Yield the batch of each optimizer step."""
        rows = rows_of(batch)
        for _ in range(self.epochs):
            for index in range(self.mini_batches):
                own = slice(rows * index // self.mini_batches, rows * (index + 1) // self.mini_batches)
                yield batch if self.mini_batches == 1 else {name: column[own] for name, column in batch.items()}

    def update(
        self,
        engine: Any,
        batch: Columns,
        loss: Any,
        more: Sequence[tuple[Columns, Part]] = (),
        *,
        temperature: float = 1.0,
        **settings: Any,
    ) -> dict[str, float]:
        """Take the optimizer steps, each with the settings, and average each metric over the steps that report it.

        `more` are further batches with their losses. They are cut into as many mini-batches, one of each an optimizer step.
        """
        found: dict[str, list[float]] = {}
        for mini_batches in zip(self.cut(batch), *(self.cut(other) for other, _ in more), strict=True):
            if not _has_tokens(mini_batches[0]):
                continue
            each = [prepared(engine, mini_batches[0], loss, temperature)]
            each += [prepared(engine, rows, own.loss, temperature) for rows, (_, own) in zip(mini_batches[1:], more, strict=True)]
            ready, whole = mixed(each, [own for _, own in more]) if more else each[0]
            for name, value in engine.update(ready, whole, temperature=temperature, **settings).items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def empty(self, batch: Columns) -> int:
        """Count the optimizer steps that are skipped because their mini-batches have no token to learn from."""
        return sum(not _has_tokens(rows) for rows in self.cut(batch))


def _has_tokens(mini_batch: Columns) -> bool:
    mask = mini_batch["response_mask"]
    assert isinstance(mask, torch.Tensor)
    return bool(mask.any())


def prepared(engine: Any, batch: Columns, loss: Any, temperature: float) -> tuple[Columns, Any]:
    """Take the slopes of a `WholeLoss` in the scores of its mini-batch; pass any other loss through.

    Rows without a slope, such as pairs without a winner, leave the mask: the passes with gradients need not compute them.
    """
    if not isinstance(loss, WholeLoss):
        return batch, loss
    with torch.enable_grad():
        scores = engine.scores(batch, temperature=temperature).requires_grad_()
        value, metrics = loss(scores, batch)
        (slopes,) = torch.autograd.grad(value, scores)
    mask = tensor_of(batch, "response_mask")
    learns = mask & (slopes != 0).any(-1, keepdim=True)
    made = {**batch, GRADIENTS: slopes, "response_mask": learns if bool(learns.any()) else mask}
    return made, SlopedLoss(value=float(value.detach()), metrics=metrics)


@dataclass(frozen=True, eq=False, kw_only=True)
class Training(Operation):
    """Train a model on a batch. The updates of policy and critic each prepare the batch and add their own metrics in `fire`."""

    model: TrainedModel
    loss: Loss | WholeLoss | StepwiseLoss
    schedule: UpdateSchedule
    guards: Guards
    name: str

    @property
    def traits(self) -> NodeTraits:
        epochs, mini_batches = self.schedule.epochs, self.schedule.mini_batches
        scored = float(isinstance(self.loss, WholeLoss))
        return NodeTraits(work="train", epochs=epochs, mini_batches=mini_batches, scored=scored, given=(self.loss,))

    def declare(self, inputs: Sequence[Output], reads: Sequence[str]) -> Update:
        """Declare the node. `reads` may name a column twice; it trains on the rows of all batches, which prefixes keep apart."""
        widest: dict[str, int] = {}
        for output in inputs:
            if isinstance(output, Output):
                widest[output.prefix] = max(widest.get(output.prefix, 0), output.node.rows)
        node = declare(self.name, self, inputs, reads=tuple(dict.fromkeys(reads)), writes=(), rows=sum(widest.values()), model=self.model)
        return Update(Output(node, "weights"), Output(node, "metrics"))

    def check(self, node: Node) -> None:
        check_trained(self.model)
        check_vocabulary(node)
        check_rotary_factors(node, self.model)

    def start(self, context: Context) -> Stage:
        guard = UpdateGuard(self.name, self.guards)
        return lambda step, columns: self.fire(context, guard, step, columns)

    @abstractmethod
    def fire(self, context: Context, guard: UpdateGuard, step: int, columns: Columns) -> Fired:
        """Train on the batch of a step; the result is its metrics."""

    def learn(
        self, context: Context, guard: UpdateGuard, batch: Columns, more: Sequence[tuple[Columns, Part]] = (), **settings: float
    ) -> dict[str, float]:
        """Take the optimizer steps on a batch and on `more`, and average their metrics. A refused batch has none."""
        if not guard.batch(batch):
            return {}
        if self.schedule.mini_batches > 1:
            guard.found["guards/empty_mini_batches"] = float(self.schedule.empty(batch))
        return self.schedule.update(context.engine, batch, self.loss, more, guard=guard, **settings)


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyUpdate(Training):
    """Take the policy's optimizer steps on a batch, and on those of `parts`. Ratios are taken against the column `behaviour`."""

    behaviour: str
    temperature: float
    critic_warmup: int
    scored: float  # the share of its rows whose loss compares rows
    parts: tuple[Part, ...] = ()

    @property
    def traits(self) -> NodeTraits:
        return replace(super().traits, scored=self.scored, given=(self.loss, *(part.loss for part in self.parts)))

    def fire(self, context: Context, guard: UpdateGuard, step: int, columns: Columns) -> Fired:
        own = {name: column for name, column in columns.items() if not name.startswith(tuple(part.prefix for part in self.parts))}
        if step < self.critic_warmup:
            return {}, _sizes(own)
        batch = _batch(own, self.behaviour, step)
        exact = checked_rows(context.engine, columns, step, self.temperature) if self.model.exact else {}
        more = [(_batch(part.of(columns), part.behaviour, step), part) for part in self.parts]
        return {}, {**self.learn(context, guard, batch, more, temperature=self.temperature), **guard.metrics(), **_sizes(own), **exact}


def _batch(columns: Columns, behaviour: str, step: int) -> dict[str, Column]:
    """Make the batch of a loss: old log-probs, the mask of what is trained, and the version that trains."""
    mask = columns["response_mask"]
    return {
        **columns,
        **({"old_log_probs": columns[behaviour]} if behaviour in columns else {}),
        "response_mask": columns.get("loss_mask", mask),
        "current_version": torch.full((len(mask),), step, dtype=torch.int32),
    }


def _sizes(columns: Columns) -> Mapping[str, float]:
    """Measure the responses' lengths in tokens that the policy wrote, the share cut off, and the number of all tokens in the batch."""
    mask, prompt_mask = columns["response_mask"], columns["prompt_mask"]
    assert isinstance(mask, torch.Tensor)
    assert isinstance(prompt_mask, torch.Tensor)
    lengths = mask.sum(-1).float()
    cut = {"response/truncated": truncated(columns).float().mean().item()} if "finish_reasons" in columns else {}
    return cut | {
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "perf/total_num_tokens": float(prompt_mask.sum() + response_lengths(mask).sum()),
    }


def checked_schedule(node: str, inputs: Sequence[Any], epochs: int, mini_batches: int) -> UpdateSchedule:
    """Make the schedule of an update. Raises GraphError for a count below 1, or mini-batches of different sizes."""
    where = f"node '{node}'"
    rows = max((output.node.rows for output in inputs if isinstance(output, Output)), default=0)
    if rows % mini_batches:
        raise GraphError(
            f"{where} has mini_batches={mini_batches} of a batch of {rows} rows; mini-batches are to be equally large, as each is one "
            "optimizer step: choose a divisor, or another number of prompts"
        )
    return UpdateSchedule(epochs, mini_batches)


def check_loss(name: str, loss: object) -> None:
    """Raise GraphError for anything but a loss object."""
    if not callable(loss) or isinstance(loss, type) or not hasattr(loss, "reads"):
        raise GraphError(f"node '{name}' has loss={shown(loss)}; pass a loss object, as loss=rg.ClippedLoss()")
