"""The critic: value estimates, and the update that fits them to returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from rlgraph.algorithms.policy_loss import WholeLoss
from rlgraph.columns import Columns
from rlgraph.engines.api import ValueLossFn
from rlgraph.graph.nodes import Output, declare
from rlgraph.nodes.base import Context, Stage, list_columns, tensor_of
from rlgraph.nodes.training.guards import Guards
from rlgraph.nodes.training.streamed import chunks_of
from rlgraph.nodes.training.trained_model import TOKENS, ModelScores, TrainedModel, beside_tokens
from rlgraph.nodes.training.update import DEFAULT_GUARDS, Training, Update, check_loss, checked_schedule, trained_tokens
from rlgraph.settings import Count, check_arguments, refuse_unknown


@refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class Critic(TrainedModel):
    """A model with a value head, trained together with the policy.

    >>> import rlgraph as rg
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1))
    >>> rg.Critic("tiny", pool=rg.Pool("train")).values(rollout).columns
    ('values',)

    The head is initialised from the folder's `score.weight` if it has one (reward models do), else with zeros. With an adapter the whole
    head is trained, next to the adapter's matrices.
    """

    role: ClassVar[str] = "critic"
    scores: ClassVar[Literal["log_probs", "values"]] = "values"
    exact: bool = field(default=False, init=False)
    fused_head: bool | None = field(default=None, init=False)  # its head has one output

    @check_arguments()
    def values(self, *inputs: Output, name: str = "values") -> Output:
        """Declare `values` [B, T]: the return that the critic, before its update, expects at each response token.

        * `inputs`: outputs with the prompts and the responses.
        * `name`: the node's name in plans and errors.
        """
        return Output(
            declare(name, Values(self), inputs, reads=(*TOKENS, *beside_tokens(name, self, inputs)), writes=("values",), model=self)
        )

    @check_arguments()
    def update(
        self,
        *inputs: Output,
        loss: ValueLossFn | WholeLoss,
        epochs: Count = 1,
        mini_batches: Count = 1,
        guards: Guards = DEFAULT_GUARDS,
        streamed: bool = False,
        trial: bool = True,
        name: str = "critic_update",
    ) -> Update:
        """Declare the critic's update on a batch.

        * `inputs`: outputs with the columns that the loss declares. With `values` among them, the update also measures
          `critic/vf_explained_var`. `loss_mask`, if present, replaces `response_mask`.
        * `loss`: e.g. `rg.losses.ValueLoss()`.
        * `epochs`: how many times it iterates over the batch.
        * `mini_batches`: the optimizer steps per epoch; each uses an equal part of adjacent rows.
        * `guards`: checks that refuse NaN and empty batches.
        * `streamed`: learns from each chunk of a rollout with `chunks` while the rest decodes; see `policy.update`. It requires
          returns of an estimator that works on chunks, e.g. `rg.GAE(whiten=False)`, and a separate pool.
        * `trial`: calls a custom loss on a made-up batch before anything starts.
        * `name`: the node's name in plans and errors.

        Raises GraphError for a column that the loss reads and no input carries, mini-batches of different sizes, and what bars `streamed`.
        """
        check_loss(name, loss)
        given = list_columns(inputs)
        optional = [c for c in ("values", "loss_mask") if c in given]
        schedule = checked_schedule(name, inputs, epochs, mini_batches)
        chunks = chunks_of(name, inputs) if streamed else 1
        training = CriticUpdate(model=self, loss=loss, schedule=schedule, guards=guards, name=name, tried=trial, chunks=chunks)
        return training.declare(inputs, (*TOKENS, *beside_tokens(name, self, inputs), *loss.reads, *optional))


@dataclass(frozen=True, eq=False)
class Values(ModelScores):
    """Compute the values [B, T] of the responses under the critic's current weights."""

    def start(self, context: Context) -> Stage:
        return lambda step, columns: {"values": context.engine.scores(columns)}


class CriticUpdate(Training):
    """Take the critic's optimizer steps on a batch, and measure how well its values predicted the returns."""

    guard_prefix = "guards/critic_"

    def collect(self, columns: Columns) -> Mapping[str, torch.Tensor]:
        """Collect the values and the returns of the tokens to train, those of them that the node reads."""
        return {name: tensor_of(columns, name)[trained_tokens(columns)] for name in ("values", "returns") if name in columns}

    def measure(self, collected: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Measure mean, max and min of values and returns over the tokens, and the share of the returns' variance that values explain."""
        metrics: dict[str, float] = {}
        for name, column in collected.items():
            if column.numel():
                spread = {"mean": column.mean(), "max": column.max(), "min": column.min()}
                metrics |= {f"critic/{name}/{kind}": value.item() for kind, value in spread.items()}
        if len(collected) == 2 and len(collected["returns"]) > 1:
            left, whole = torch.var(collected["returns"] - collected["values"]), torch.var(collected["returns"])
            metrics["critic/vf_explained_var"] = (1 - left / whole.clamp(min=1e-8)).item()
        return metrics
