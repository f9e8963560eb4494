"""The policy: the model that the graph trains, its log-probs and its update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlgraph.algorithms.policy_loss import WholeLoss
from rlgraph.columns import Columns
from rlgraph.engines.api import PolicyLossFn, chosen_at
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Node, Operation, Output, declare
from rlgraph.nodes.base import Context, Stage, list_columns
from rlgraph.nodes.training.guards import Guards
from rlgraph.nodes.training.streamed import chunks_of
from rlgraph.nodes.training.trained_model import (
    TOKENS,
    ModelScores,
    TrainedModel,
    beside_tokens,
    check_whole_vocabulary,
    columns_to_check,
)
from rlgraph.nodes.training.update import DEFAULT_GUARDS, Part, PolicyUpdate, Update, check_taken, checked_also, checked_schedule, own_name
from rlgraph.settings import Count, Natural, check_arguments, refuse_unknown
from rlgraph.values.sampling import Sampling


@dataclass(frozen=True, eq=False)
class LogProbs(ModelScores):
    """Compute log-probs [B, T] of the responses under the current weights and, with `squares`, the sums of squared probabilities.

    With `base` they are the log-probs of the model without its adapter.
    """

    column: str
    temperature: float
    squares: bool = False
    base: bool = False

    def start(self, context: Context) -> Stage:
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Columns:
        if self.base:
            return {self.column: context.engine.base_scores(columns, temperature=self.temperature)}
        if not self.squares:
            return {self.column: context.engine.scores(columns, temperature=self.temperature)}
        log_probs, squares = context.engine.scores_and_squares(columns, temperature=self.temperature)
        return {self.column: log_probs, "sum_pi_squared": squares}


@dataclass(frozen=True, eq=False)
class SampledLogProbs(Operation):
    """Use the rollout's log-probs [B, T] as the policy's own, to which they are bit-identical."""

    def start(self, context: Context) -> Stage:
        return lambda step, columns: {"old_log_probs": columns["rollout_log_probs"]}


@refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class Policy(TrainedModel):
    """The model that the graph trains.

    >>> import rlgraph as rg
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1))
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-6))
    >>> policy.log_probs(rollout).columns  # policy.update(...) trains it
    ('old_log_probs',)

    * `router_replay`: for a mixture of experts, computes log-probs and updates with the experts that the engine chose for each token; the
      trainer's routers compute the weights of these experts, with gradients. It requires `rg.Generator(…, routes=True)`. Metrics:
      `moe/route_agreement`, the share of tokens and layers at which the trainer's router would choose the same experts, and
      `moe/routes_replayed`, the share with a known route. Source: Ma et al. 2025, arXiv:2510.11370 (R3).
    """

    role: ClassVar[str] = "policy"
    router_replay: bool = False

    @check_arguments()
    def log_probs(self, *inputs: Output, sum_pi_squared: bool = False, name: str = "old_log_probs") -> Output:
        """Declare `old_log_probs` [B, T]: the trainer's log-probs of the responses before the update.

        * `inputs`: outputs with the prompts and the responses.
        * `sum_pi_squared`: adds the column of that name [B, T] from the same forward pass: at each token, the sum of the squared
          probabilities of the whole vocabulary. `rg.estimators.OptimalTokenBaseline` reads it.
        * `name`: the node's name in plans and errors.

        With `exact=True` the column is a copy of the rollout's log-probs, without a forward pass.
        """
        if self.exact and not sum_pi_squared:
            return Output(declare(name, SampledLogProbs(), inputs, reads=("rollout_log_probs",), writes=("old_log_probs",)))
        operation = LogProbs(self, "old_log_probs", sampling_temperature(inputs), sum_pi_squared)
        writes = ("old_log_probs", *(("sum_pi_squared",) if sum_pi_squared else ()))
        reads = (*TOKENS, *beside_tokens(name, self, inputs))
        return Output(declare(name, operation, inputs, reads=reads, writes=writes, model=self))

    @check_arguments()
    def base_log_probs(self, *inputs: Output, name: str = "base_log_probs") -> Output:
        """Declare `ref_log_probs` [B, T]: the log-probs of the responses without the adapter. They replace a reference and need no memory.

        * `inputs`: outputs with the prompts and the responses.
        * `name`: the node's name in plans and errors.

        Raises GraphError for a policy without `adapter=`.
        """
        if self.adapter is None:
            raise GraphError(
                f"node '{name}': the policy has no adapter to leave out; use rg.Reference(…).log_probs(…), or adapter=rg.LoRA(…)"
            )
        operation = LogProbs(self, "ref_log_probs", sampling_temperature(inputs), base=True)
        reads = (*TOKENS, *beside_tokens(name, self, inputs))
        return Output(declare(name, operation, inputs, reads=reads, writes=("ref_log_probs",), model=self))

    @check_arguments()
    def update(
        self,
        *inputs: Output,
        loss: PolicyLossFn | WholeLoss,
        epochs: Count = 1,
        mini_batches: Count = 1,
        critic_warmup: Natural = 0,
        guards: Guards = DEFAULT_GUARDS,
        also: Sequence[Any] = (),
        streamed: bool = False,
        trial: bool = True,
        name: str = "update",
    ) -> Update:
        """Declare the training on a batch. Pass its `weights`, published once at the end, to a feedback edge, its `metrics` to the graph.

        * `inputs`: outputs with the columns that the loss declares. Without `old_log_probs` among them, importance ratios use
          `rollout_log_probs` (verl's bypass mode). `rollout_is_weights`, if present, multiply the loss. `loss_mask`, if present, replaces
          `response_mask`: tokens outside of it are neither computed nor counted. The update provides `current_version` itself.
        * `loss`: e.g. `rg.ClippedLoss()`, `rg.SFTLoss()` or a custom `rlgraph.algorithms.PolicyLoss`.
        * `epochs`, `mini_batches`: the iterations over the batch, and the optimizer steps in each; one uses an equal part of adjacent rows.
        * `critic_warmup`, `guards`: the first steps of the graph in which only the critic learns, and what the update refuses, e.g. NaN.
        * `also`: further batches for each optimizer step, e.g. `also=[(examples, rg.SFTLoss(), 0.1)]`. Each is (batch, loss, weight), and
          a batch is an output or a list of outputs. Each loss is normalised by its own batch. Its metrics begin with the batch's name.
        * `streamed`: learns from each chunk of a rollout with `chunks` while the rest decodes: gradients add up, and the optimizer steps
          after the last chunk, or after the last one of each mini-batch.
        * `trial`, `name`: whether to call a custom loss on a made-up batch before anything starts, and the node's name.

        Raises GraphError for a column that no input carries, unequal mini-batches, a warm-up without a critic, and what bars `streamed`.
        """
        check_taken(name, loss, self.scores, inputs, mini_batches)
        check_warmup(name, inputs, critic_warmup)
        behaviour, reads = columns_read(name, inputs, loss)
        reads += _mismatch_columns(guards, inputs) + columns_to_check(name, self, inputs) + beside_tokens(name, self, inputs)
        parts, more = list[Part](), list(inputs)
        sizes: list[tuple[object, Sequence[Output]]] = [(loss, inputs)]
        for number, (outputs, other, weight) in enumerate(checked_also(name, also)):
            check_taken(name, other, self.scores, outputs, mini_batches)
            found, read = columns_read(name, outputs, other)
            checked_schedule(name, outputs, epochs, mini_batches)
            sizes.append((other, outputs))
            parts.append(Part(f"also{number}.", own_name(outputs[0].node.name, [part.name for part in parts]), other, weight, found))
            more += [output.with_prefix(parts[-1].prefix) for output in outputs]
            reads += tuple(parts[-1].prefix + column for column in (*read, *beside_tokens(name, self, outputs)))
        if any(chosen_at(other) is not None for other in (loss, *(part.loss for part in parts))):
            check_whole_vocabulary(name, self)
        training = PolicyUpdate(
            model=self,
            loss=loss,
            schedule=checked_schedule(name, inputs, epochs, mini_batches),
            guards=guards,
            name=name,
            tried=trial,
            behaviour=behaviour,
            temperature=sampling_temperature(more),
            warmup=critic_warmup,
            parts=tuple(parts),
            scored=scored_share(sizes),
            chunks=chunks_of(name, inputs) if streamed else 1,
        )
        return training.declare(more, reads)


def columns_read(name: str, inputs: Sequence[Output], loss: PolicyLossFn | WholeLoss) -> tuple[str, tuple[str, ...]]:
    """Choose the column of the ratios' denominators, and the columns that an update with this loss reads from its inputs."""
    given = list_columns(inputs)
    wanted = [c for c in loss.reads if c not in ("old_log_probs", "current_version")]
    behaviour = "old_log_probs" if "old_log_probs" in given or "old_log_probs" not in loss.reads else "rollout_log_probs"
    if "old_log_probs" in loss.reads:
        wanted.append(behaviour)
    # A user's loss need not have `optional_reads`.
    optional = (*getattr(loss, "optional_reads", ()), "loss_mask", "finish_reasons", "weight_version")
    return behaviour, (*TOKENS, *wanted, *(column for column in optional if column in given))


def scored_share(batches: Sequence[tuple[object, Sequence[Output]]]) -> float:
    """Compute the share of an update's rows whose loss compares rows, from (loss, outputs) of each of its batches."""
    rows = [max((o.node.rows for o in outputs if isinstance(o, Output)), default=0) for _, outputs in batches]
    whole = sum(count for count, (loss, _) in zip(rows, batches, strict=True) if isinstance(loss, WholeLoss))
    return whole / max(sum(rows), 1)


def sampling_temperature(inputs: Sequence[Output]) -> float:
    """Find the temperature at which the responses among the inputs were sampled; greedy responses count as 1.

    Raises GraphError for inputs from rollouts of different temperatures.
    """
    found = {node.name: float(sampling.temperature) or 1.0 for node, sampling in _samplings(inputs)}
    if len(set(found.values())) > 1:
        raise GraphError(f"rollouts of several temperatures are among the inputs of one node ({found}); give each rollout a separate node")
    return next(iter(found.values()), 1.0)


def _mismatch_columns(guards: Guards, inputs: Sequence[Output]) -> tuple[str, ...]:
    """Name the columns by which the guards measure the engine's distance: if a limit stops the job, or if the inputs carry both."""
    columns, there = ("rollout_log_probs", "old_log_probs"), list_columns(inputs)
    comparable = all(there.count(column) == 1 for column in columns) and all(
        sampling.is_full_distribution for _, sampling in _samplings(inputs)
    )
    return columns if guards.stop_mismatch is not None or (guards.warn_mismatch is not None and comparable) else ()


def _samplings(inputs: Sequence[Output]) -> Iterator[tuple[Node, Sampling]]:
    """Yield each rollout among the inputs and its sampling."""
    for output in inputs:
        sampling = output.node.traits.sampling if isinstance(output, Output) else None
        if sampling is not None:
            yield output.node, sampling


def check_warmup(name: str, inputs: Sequence[Any], critic_warmup: int) -> None:
    """Raise GraphError for a critic's warm-up in an update without a critic upstream."""
    nodes = [output.node for output in inputs if isinstance(output, Output)]
    for node in nodes:
        nodes += [output.node for output in node.inputs if output.node not in nodes]
    if critic_warmup and not any("values" in node.writes for node in nodes):
        raise GraphError(
            f"node '{name}' has critic_warmup={critic_warmup}, but no critic's values reach it; leave it out, or pass advantages that "
            "are estimated with critic.values(rollout)"
        )
