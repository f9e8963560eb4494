"""The update: the node that trains a model on one batch or several, with their losses and weights, in optimizer steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from rlgraph import settings
from rlgraph.algorithms.advantages import StepwiseLoss
from rlgraph.algorithms.masks import Totals
from rlgraph.algorithms.policy_loss import GRADIENTS, SlopedLoss, WholeLoss
from rlgraph.batching.packing import response_lengths
from rlgraph.columns import Column, Columns, concat_rows, rows_at, rows_of, truncation_mask
from rlgraph.engines.api import Loss, chosen_at
from rlgraph.errors import GraphError, show_value
from rlgraph.graph.nodes import Node, Operation, Output, declare
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage, custom, tensor_of
from rlgraph.nodes.training.guards import Guards, UpdateGuard
from rlgraph.nodes.training.streamed import StreamedBatch, average, check_streamed
from rlgraph.nodes.training.trained_model import TrainedModel, check_rotary_factors, check_trained, check_vocabulary, checked_rows
from rlgraph.nodes.trial import try_loss
from rlgraph.settings import Count

# An update on several batches: each with its loss and its weight, in one optimizer step.

FAMILIES = ("actor", "critic", "preference", "reward")  # of the update's own metrics
PART = "part_of_batch"  # the column with the number of each row's batch
Also: TypeAlias = tuple[Output | Sequence[Output], Loss, float]


@dataclass(frozen=True)
class Part:
    """One more batch of an update: its columns begin with `prefix`, its metrics with the name of its first node."""

    prefix: str
    name: str
    loss: Any
    weight: float
    behaviour: str  # the column of the ratios' denominators

    def of(self, columns: Columns) -> dict[str, Column]:
        """Pick its columns, under their own names."""
        return {name.removeprefix(self.prefix): column for name, column in columns.items() if name.startswith(self.prefix)}


@dataclass(frozen=True)
class Mixture:
    """The weighted sum of the losses of several batches. Each is normalised by the tokens and rows of its own batch.

    `parts` are (loss, weight, totals, prefix of its metrics' names).
    """

    parts: tuple[tuple[Any, float, Totals, str], ...]
    reads: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_entropy(self) -> bool:
        """Whether one of the losses needs it."""
        return any(loss.needs_entropy for loss, *_ in self.parts)

    @property
    def chosen_at(self) -> str | None:
        """The column with the tokens whose log-probs one of the losses reads."""
        return next((at for at in (chosen_at(loss) for loss, *_ in self.parts) if at is not None), None)

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Add up the shares of the losses of this micro-batch's rows, each by the rows of its own batch."""
        part, found = tensor_of(batch, PART), dict[str, float]()
        whole = log_probs.sum() * 0
        for number, (loss, weight, own, front) in enumerate(self.parts):
            rows = (part == number).nonzero()[:, 0]
            if not len(rows):
                continue
            columns = {name: rows_at(column, rows) for name, column in batch.items()}
            value, metrics = loss(log_probs[rows], columns, own, None if entropy is None else entropy[rows])
            whole = whole + weight * value
            found |= {front + name.rpartition("/")[2] if front else name: number for name, number in metrics.items()}
        return whole, found


def join_batches(batches: Sequence[Columns]) -> dict[str, Column]:
    """Join batches of different columns along their rows; missing values are 0 or empty text. The column `PART` numbers them."""
    like: dict[str, tuple[Column, int]] = {}  # a column, and the width of its responses
    for batch in batches:
        like = {**{name: (column, _width(batch)) for name, column in batch.items()}, **like}
    same = [{name: batch[name] if name in batch else _nothing(*found, batch) for name, found in like.items()} for batch in batches]
    numbered = [{**batch, PART: torch.full((rows_of(batch),), number)} for number, batch in enumerate(same)]
    return concat_rows(numbered)


def _width(batch: Columns) -> int:
    return tensor_of(batch, "response_mask").shape[1]


def _nothing(like: Column, beside: int, batch: Columns) -> Column:
    """Make the column that a batch lacks; a column of tokens is as wide as the batch's own responses, so that all columns end equally
    wide."""
    rows = rows_of(batch)
    if not isinstance(like, torch.Tensor):
        return [""] * rows
    of_tokens = like.ndim > 1 and like.shape[1] == beside
    return like.new_zeros(rows, *((_width(batch), *like.shape[2:]) if of_tokens else like.shape[1:]))


def checked_also(node: str, also: Sequence[Any]) -> Iterator[tuple[Sequence[Output], Any, float]]:
    """Check what `also` was given: (a batch or several outputs, loss, weight) each. Raises GraphError for anything else."""
    for number, entry in enumerate(also):
        where = f"node '{node}' has also[{number}]={show_value(entry)}"
        if not isinstance(entry, tuple) or len(entry) != 3:
            raise GraphError(f"{where}; each is (batch, loss, weight), e.g. (examples, rg.SFTLoss(), 0.1)")
        given, loss, weight = entry
        outputs = [given] if isinstance(given, Output) else given
        if not isinstance(outputs, list | tuple) or not outputs or not all(isinstance(o, Output) and o.kind == "batch" for o in outputs):
            raise GraphError(f"{where}; its batch is the output of a node, or a list of outputs whose columns belong together")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise GraphError(f"{where}; its weight is a finite number above 0")
        yield outputs, loss, float(weight)


def own_name(node: str, taken: Sequence[str]) -> str:
    """Name the metrics of a further batch after its node, with a number if another batch or a family of metrics has that name.

    >>> own_name("pairs", []), own_name("pairs", ["pairs"]), own_name("actor", [])
    ('pairs', 'pairs2', 'actor2')
    """
    names = (node, *(f"{node}{number}" for number in range(2, len(taken) + 4)))
    return next(name for name in names if name not in taken and name not in FAMILIES)


def join_with_losses(each: Sequence[tuple[Columns, Any]], more: Sequence[Part]) -> tuple[Columns, Mixture]:
    """Join the batches of an optimizer step with their losses: the update's own batch first, then the batches of `more`."""
    weights = [(1.0, ""), *((part.weight, f"{part.name}/") for part in more)]
    parts = tuple(
        (loss, weight, Totals.of(tensor_of(batch, "response_mask")), front)
        for (batch, loss), (weight, front) in zip(each, weights, strict=True)
    )
    return join_batches([batch for batch, _ in each]), Mixture(parts)


# The update: the node that trains a model on a batch, its optimizer steps, and the batch that a policy learns from.

DEFAULT_GUARDS = Guards()


@dataclass(frozen=True)
class Update:
    """The outputs of an update: new weights for a feedback edge, and the metrics of the step."""

    weights: Output
    metrics: Output


@dataclass(frozen=True)
class UpdateSchedule:
    """An update iterates `epochs` times over its batch, each time in `mini_batches` parts; each part is an optimizer step.

    A mini-batch has adjacent rows, in the order of the batch, so the responses to one prompt are trained together and a run depends only on
    its seed. A loss is normalised by the tokens and rows of its mini-batch. A mini-batch whose rows are all masked is skipped: it has no
    optimizer step, does not advance the warm-up, and counts in no metric.
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

        `more` are further batches with their losses. Each is cut into equally many mini-batches, one per optimizer step.
        """
        steps: list[dict[str, float]] = []
        for mini_batches in zip(self.cut(batch), *(self.cut(other) for other, _ in more), strict=True):
            if not _has_tokens(mini_batches[0]):
                continue
            each = [prepare_loss(engine, mini_batches[0], loss, temperature)]
            each += [prepare_loss(engine, rows, own.loss, temperature) for rows, (_, own) in zip(mini_batches[1:], more, strict=True)]
            ready, whole = join_with_losses(each, [own for _, own in more]) if more else each[0]
            steps.append(engine.update(ready, whole, temperature=temperature, **settings))
        return average(steps)

    def empty(self, batch: Columns) -> int:
        """Count the optimizer steps that are skipped because their mini-batches have no token to learn from."""
        return sum(not _has_tokens(rows) for rows in self.cut(batch))


def _has_tokens(mini_batch: Columns) -> bool:
    mask = mini_batch["response_mask"]
    assert isinstance(mask, torch.Tensor)
    return bool(mask.any())


def prepare_loss(engine: Any, batch: Columns, loss: Any, temperature: float) -> tuple[Columns, Any]:
    """Compute the slopes of a `WholeLoss` in the scores of its mini-batch; pass any other loss through.

    Rows without a slope, e.g. pairs without a winner, leave the mask: the passes with gradients need not compute them.
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
    """Train a model on a batch, or on each of its chunks as it arrives. The updates of the models say which batches and metrics they have.

    In the first `warmup` steps it only measures its batch.
    """

    model: TrainedModel
    loss: Loss | WholeLoss | StepwiseLoss
    schedule: UpdateSchedule
    guards: Guards
    name: str
    tried: bool = True  # at the launch, on a made-up batch
    chunks: int = 1  # of a batch, from which it learns one after the other
    parts: tuple[Part, ...] = ()
    warmup: int = 0
    temperature: float = 1.0
    guard_prefix: ClassVar[str] = "guards/"  # begins the names of the metrics of its guards

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(
            work="train",
            by_group=self.chunks > 1,
            epochs=self.schedule.epochs,
            mini_batches=self.schedule.mini_batches,
            scored=float(isinstance(self.loss, WholeLoss)),
            given=(self.loss, *(part.loss for part in self.parts)),
            trial=self.tried,
        )

    def declare(self, inputs: Sequence[Output], reads: Sequence[str]) -> Update:
        """Declare the node. `reads` may name a column twice; it trains on the rows of all batches, which differ by their prefixes."""
        widest: dict[str, int] = {}
        for output in inputs:
            if isinstance(output, Output):
                widest[output.prefix] = max(widest.get(output.prefix, 0), output.node.rows)
        node = declare(self.name, self, inputs, reads=tuple(dict.fromkeys(reads)), writes=(), rows=sum(widest.values()), model=self.model)
        if self.chunks > 1:
            check_streamed(node, self.model, self.loss)
        return Update(Output(node, "weights"), Output(node, "metrics"))

    def check(self, node: Node) -> None:
        check_trained(self.model)
        check_vocabulary(node)
        check_rotary_factors(node, self.model)

    def trial(self, node: Node, columns: Columns, rows: int) -> Columns:
        """Call the user's losses. Raises RlgraphError as the first step would."""
        for loss, batch in self.losses(columns, 0):
            if custom(loss):
                try_loss(self.name, loss, batch, self.model.scores)
        return {}

    def losses(self, columns: Columns, step: int) -> Iterator[tuple[Any, Columns]]:
        """Yield each loss with its batch, out of the columns that the node reads: its own first, then those of `parts`."""
        yield self.loss, {**columns, "response_mask": trained_tokens(columns)}

    def collect(self, columns: Columns) -> Mapping[str, torch.Tensor]:
        """Collect what `measure` needs of a batch or a chunk, in its own memory: the columns are valid only during the firing."""
        return {}

    def measure(self, collected: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Compute the metrics of the batch itself."""
        return {}

    def start(self, context: Context) -> Stage:
        guard, collected = UpdateGuard(self.name, self.guards), list[Mapping[str, torch.Tensor]]()
        streamed = StreamedBatch(context.engine, self.loss, guard, self.chunks, self.schedule.mini_batches, self.temperature)

        def fire(step: int, columns: Columns) -> Fired:
            collected.append(self.collect(columns))
            learnt, exact = dict[str, float](), dict[str, float]()
            if step >= self.warmup:
                exact = checked_rows(context.engine, columns, step, self.temperature) if self.model.exact else {}
                batch, *others = (batch for _, batch in self.losses(columns, step))
                more = list(zip(others, self.parts, strict=True))
                learnt = self.learn(context, guard, batch, more) if self.chunks == 1 else streamed.add(batch)
                learnt |= {name.replace("guards/", self.guard_prefix): value for name, value in guard.metrics().items()}
            if len(collected) < self.chunks:
                return {}, exact
            whole = {name: torch.cat([chunk[name] for chunk in collected]) for name in collected[0]}
            collected.clear()
            return {}, {**learnt, **self.measure(whole), **exact}

        return fire

    def learn(self, context: Context, guard: UpdateGuard, batch: Columns, more: Sequence[tuple[Columns, Part]] = ()) -> dict[str, float]:
        """Take the optimizer steps on a batch and on `more`, and average their metrics. A refused batch has none."""
        if not guard.batch(batch):
            return {}
        if self.schedule.mini_batches > 1:
            guard.found["guards/empty_mini_batches"] = float(self.schedule.empty(batch))
        return self.schedule.update(context.engine, batch, self.loss, more, temperature=self.temperature, guard=guard)


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyUpdate(Training):
    """Take the policy's optimizer steps on a batch, and on the batches of `parts`.

    The column `behaviour` holds the ratios' denominators.
    """

    behaviour: str
    scored: float  # the share of its rows whose loss compares rows

    @property
    def traits(self) -> NodeTraits:
        return replace(super().traits, scored=self.scored)

    def losses(self, columns: Columns, step: int) -> Iterator[tuple[Any, Columns]]:
        prefixes = tuple(part.prefix for part in self.parts)
        own = {name: column for name, column in columns.items() if not name.startswith(prefixes)}
        yield self.loss, _batch(own, self.behaviour, step)
        for part in self.parts:
            yield part.loss, _batch(part.of(columns), part.behaviour, step)

    def collect(self, columns: Columns) -> Mapping[str, torch.Tensor]:
        """Collect of each response how many tokens the policy wrote, whether it was cut off, and the tokens with those of its prompt."""
        mask = tensor_of(columns, "response_mask")
        cut = {"cut": truncation_mask(columns).float()} if "finish_reasons" in columns else {}
        return {"written": mask.sum(-1).float(), "tokens": tensor_of(columns, "prompt_mask").sum(-1) + response_lengths(mask), **cut}

    def measure(self, collected: Mapping[str, torch.Tensor]) -> dict[str, float]:
        written, cut = collected["written"], collected.get("cut")
        return ({} if cut is None else {"response/truncated": cut.mean().item()}) | {
            "response_length/mean": written.mean().item(),
            "response_length/max": written.max().item(),
            "perf/total_num_tokens": float(collected["tokens"].sum()),
        }


def trained_tokens(columns: Columns) -> torch.Tensor:
    """Return the mask of the tokens to train: `loss_mask` if the node reads it, else `response_mask`."""
    return tensor_of(columns, "loss_mask" if "loss_mask" in columns else "response_mask")


def _batch(columns: Columns, behaviour: str, step: int) -> dict[str, Column]:
    """Make the batch of a loss: old log-probs, the mask of trained tokens, and the training version."""
    return {
        **columns,
        **({"old_log_probs": columns[behaviour]} if behaviour in columns else {}),
        "response_mask": trained_tokens(columns),
        "current_version": torch.full((rows_of(columns),), step, dtype=torch.int32),
    }


def checked_schedule(node: str, inputs: Sequence[Any], epochs: int, mini_batches: int) -> UpdateSchedule:
    """Make the schedule of an update. Raises GraphError for a count below 1, or mini-batches of different sizes."""
    where = f"node '{node}'"
    rows = max((output.node.rows for output in inputs if isinstance(output, Output)), default=0)
    if rows % mini_batches:
        raise GraphError(
            f"{where} has mini_batches={mini_batches} for a batch of {rows} rows; mini-batches must have equal sizes: choose a divisor "
            "of the rows, or another number of prompts"
        )
    return UpdateSchedule(epochs, mini_batches)


def check_loss(name: str, loss: object) -> None:
    """Raise GraphError for anything but a loss object."""
    if not callable(loss) or isinstance(loss, type) or not hasattr(loss, "reads"):
        raise GraphError(f"node '{name}' has loss={show_value(loss)}; pass a loss object, e.g. loss=rg.ClippedLoss()")


# Whether a loss fits its model's scores and the rows of its batch.

HELD = {
    "pairs": "pairs, which rg.pairs and rg.preferred make",
    "labels": "single rows that are good or bad",
    "mismatched": "rows that are good or bad with a second row for each, as rg.examples(label=…, mismatched=True) makes them",
}
SCORED = {"log_probs": "the log-probs of a policy", "values": "the rewards of a rg.LearnedReward"}


def check_taken(name: str, loss: object, scores: Literal["log_probs", "values"], inputs: Iterable[Any], mini_batches: int) -> None:
    """Raise GraphError for anything but a loss object, or for a loss that does not fit the model's scores or the batch."""
    check_loss(name, loss)
    check_scores(name, loss, scores)
    check_rows(name, loss, inputs, mini_batches)


def check_scores(name: str, loss: object, scores: Literal["log_probs", "values"]) -> None:
    """Raise GraphError for a loss for another kind of model than the model of these `scores`."""
    taken = "values" if isinstance(loss, StepwiseLoss) else loss.scores if isinstance(loss, WholeLoss) else None
    if taken not in (None, scores):
        other = "rg.DPO()" if scores == "log_probs" else "rg.losses.BradleyTerry()"
        raise GraphError(
            f"node '{name}' has loss={type(loss).__name__}(…), which requires {SCORED[taken or scores]}, but the model "
            f"computes {SCORED[scores]}; pass a loss such as {other}"
        )


def check_rows(name: str, loss: object, inputs: Iterable[Any], mini_batches: int) -> None:
    """Raise GraphError for a batch whose preferences a loss cannot compare, or mini-batches that separate two rows of a pair."""
    if not isinstance(loss, WholeLoss) or loss.rows is None:
        return
    carrier = next((o.node for o in inputs if isinstance(o, Output) and "preferences" in o.columns), None)
    if carrier is None:
        return  # the declaration names the column that is missing
    held, kind = carrier.traits.preferences, type(loss).__name__
    if held not in (None, loss.rows):
        raise GraphError(f"node '{name}' has loss={kind}(…), which requires {HELD[loss.rows]}, but '{carrier.name}' writes {HELD[held]}")
    if carrier.rows // mini_batches % 2:
        raise GraphError(
            f"node '{name}' has mini_batches={mini_batches} of {carrier.rows} rows, which splits pairs that {kind} compares; choose a "
            f"divisor of {carrier.rows // 2}"
        )
