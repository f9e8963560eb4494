"""A trainable reward model: one number for a prompt and a response, read after the last token."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from rlgraph.algorithms.advantages import LABELS, StepwiseLoss
from rlgraph.algorithms.policy_loss import WholeLoss
from rlgraph.algorithms.supervised_losses import BradleyTerry
from rlgraph.batching.packing import response_lengths
from rlgraph.columns import Column, Columns
from rlgraph.engines.hf.export import HEAD
from rlgraph.engines.hf.model_files import header_shapes
from rlgraph.errors import DataError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Output, declare
from rlgraph.nodes.base import Context, Fired, Stage, list_columns, tensor_of
from rlgraph.nodes.rewards.reward import check_column, spread
from rlgraph.nodes.training.guards import Guards
from rlgraph.nodes.training.trained_model import TOKENS, ModelScores, TrainedModel, beside_tokens
from rlgraph.nodes.training.update import DEFAULT_GUARDS, Training, Update, check_taken, checked_schedule
from rlgraph.settings import Count, Name, check_arguments, refuse_unknown
from rlgraph.values.lora import LoRA

# Where the steps of a response end, and a reward model's score of each.


@dataclass(frozen=True, eq=False)
class StepRewards(ModelScores):
    """Compute the reward of each step of a response, at the step's last token, and flag these tokens."""

    separator: str
    writes: str

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.model.path)
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Fired:
        mask = tensor_of(columns, "response_mask")
        ends = self.ends(context.tokenizer(self.model.path), tensor_of(columns, "responses"), mask)
        logits = context.engine.scores(behind_the_tokens(columns, ends))[:, 1:]
        found = torch.where(ends, logits.sigmoid(), 0.0)
        count = max(int(ends.sum()), 1)
        metrics = {f"{self.writes}/mean": float(found.sum()) / count, f"{self.writes}/steps": float(ends.sum()) / max(len(ends), 1)}
        return {self.writes: found, "step_mask": ends}, metrics

    def ends(self, tokenizer: Any, responses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Flag the last token of each step `[B, T]`. Tokens outside of the mask, e.g. of tools, belong to no step."""
        found = torch.zeros_like(mask)
        texts: dict[int, str] = {}
        for row, tokens in enumerate(responses):
            places = mask[row].nonzero()[:, 0]
            ids = tokens[places].tolist()
            texts |= {token: tokenizer.decode([token], skip_special_tokens=True) for token in ids if token not in texts}
            found[row, places[step_ends([texts[token] for token in ids], self.separator)]] = True
        return found


def step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    """Find the last token of each step, given the text of each token: a step ends with its separators, the last one with the response.

    >>> step_ends(["a", " b", ".\\n", "\\n", "c", ""], "\\n")
    [3, 5]
    """
    text, token_of = "".join(pieces), [place for place, piece in enumerate(pieces) for _ in piece]
    ends, begin = [], 0
    for found in re.finditer(f"(?:{re.escape(separator)})+", text):
        if text[begin : found.start()].strip():
            ends.append(token_of[found.end() - 1])
        begin = found.end()
    return list(dict.fromkeys([*ends, len(pieces) - 1] if text[begin:].strip() else ends))


def behind_the_tokens(columns: Columns, places: torch.Tensor) -> Mapping[str, Column]:
    """Move a mask by one place, to the tokens after the flagged ones: a score there depends on the flagged tokens."""
    longer = torch.nn.functional.pad(tensor_of(columns, "responses"), (0, 1))
    return {**columns, "responses": longer, "response_mask": torch.nn.functional.pad(places, (1, 0))}


def behind_the_steps(columns: Columns) -> Mapping[str, Column]:
    """Move the mask of each response behind the tokens whose step has a label, and the labels with it."""
    labels = tensor_of(columns, LABELS)
    return {**behind_the_tokens(columns, labels != 0), LABELS: torch.nn.functional.pad(labels, (1, 0))}


@refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class LearnedReward(TrainedModel):
    """A model that learns rewards from pairs, and scores responses with them.

    >>> import rlgraph as rg
    >>> judge = rg.LearnedReward("tiny", pool=rg.Pool("train"))
    >>> pairs = rg.pairs([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}], 8, judge)
    >>> judge.update(pairs, loss=rg.losses.BradleyTerry()).metrics
    the metrics of 'reward_update'

    The reward is a linear map of the last token's state. The map is initialised from the folder's `score.weight` if it has one, else with
    zeros. Exports include it, so another graph can compute rewards with `rg.LearnedReward(folder, …).rewards(rollout)`. Tokens are passed
    unchanged, as in training.
    """

    role: ClassVar[str] = "reward"
    scores: ClassVar[Literal["log_probs", "values"]] = "values"
    adapter: LoRA | None = field(default=None, init=False)
    exact: bool = field(default=False, init=False)
    fused_head: bool | None = field(default=None, init=False)  # its head has one output

    @check_arguments()
    def rewards(self, *inputs: Output, writes: str = "rewards", name: str = "reward") -> Output:
        """Declare `rewards` [B]: the reward of each response under the current weights. A rollout with `chunks` is scored part by part."""
        check_column(name, writes)
        return Output(
            declare(
                name,
                LearnedRewards(self, writes),
                inputs,
                reads=(*TOKENS, *beside_tokens(name, self, inputs)),
                writes=(writes,),
                model=self,
            )
        )

    @check_arguments()
    def step_rewards(self, *inputs: Output, separator: Name = "\n", writes: str = "step_rewards", name: str = "step_rewards") -> Output:
        """Declare `step_rewards` [B, T], the probability that a step is good at its last token, and `step_mask`, which flags these tokens.

        A step of a response ends with `separator`, the last one with the response. `rg.estimators.ProcessGRPO` reads both columns. With
        `writes="token_rewards"` they are rewards of tokens, for `rg.GAE` and others. Metrics: the mean of all steps, and `…/steps`, the
        steps of a response.
        """
        operation = StepRewards(self, separator, writes)
        reads = (*TOKENS, *beside_tokens(name, self, inputs))
        return Output(declare(name, operation, inputs, reads=reads, writes=(writes, "step_mask"), model=self))

    @check_arguments()
    def update(
        self,
        *inputs: Output,
        loss: WholeLoss | StepwiseLoss = BradleyTerry(),  # noqa: B008 (a frozen value)
        epochs: Count = 1,
        mini_batches: Count = 1,
        guards: Guards = DEFAULT_GUARDS,
        trial: bool = True,
        name: str = "reward_update",
    ) -> Update:
        """Declare the training on pairs of `rg.pairs` or `rg.preferred`, or with `StepwiseLoss` on solutions of `rg.stages.stepwise`.

        The launch tries a custom loss on a made-up batch; `trial=False` leaves that out.

        Raises GraphError for a column that the loss reads and no input carries, or mini-batches of different sizes.
        """
        check_taken(name, loss, self.scores, inputs, mini_batches)
        given = list_columns(inputs)
        optional = [column for column in loss.optional_reads if column in given]
        schedule = checked_schedule(name, inputs, epochs, mini_batches)
        training = RewardUpdate(model=self, loss=loss, schedule=schedule, guards=guards, name=name, tried=trial)
        return training.declare(inputs, (*TOKENS, *beside_tokens(name, self, inputs), *loss.reads, *optional))


@dataclass(frozen=True, eq=False)
class LearnedRewards(ModelScores):
    """Compute the rewards [B] of responses."""

    writes: str

    def start(self, context: Context) -> Stage:
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Fired:
        found = context.engine.scores(behind_the_end(columns)).sum(-1)
        return {self.writes: found}, spread(self.writes, found)


class RewardUpdate(Training):
    """Take the reward model's optimizer steps on pairs, or on solutions with a label for each step."""

    def losses(self, columns: Columns, step: int) -> Iterator[tuple[Any, Columns]]:
        yield self.loss, behind_the_steps(columns) if LABELS in columns else behind_the_end(columns)


def check_heads(graph: Graph, to_come: Collection[str] = ()) -> None:
    """Raise DataError for a reward model that computes rewards but was never trained. Folders `to_come` stand in for trained ones."""
    trained = {node.model for node in graph.nodes if node.traits.work == "train"}
    for node in graph.nodes:
        model = node.model
        if not isinstance(model, LearnedReward) or model in trained or model.path in to_come:
            continue
        if not any(HEAD in header_shapes(file) for file in Path(model.path).glob("*.safetensors")):
            raise DataError(
                f"node '{node.name}' scores with '{model.path}', which has no {HEAD}, and nothing in the graph trains it: all rewards "
                "would be 0; train it first by judge.update(…), and pass the folder of its export"
            )


def behind_the_end(columns: Columns) -> Mapping[str, Column]:
    """Set the mask of each response to the place after its last token, whose score is the response's score; without tokens it is empty.

    The score at a place depends on the token before it, so the score after the end depends on the last token.
    """
    mask, responses = tensor_of(columns, "response_mask"), tensor_of(columns, "responses")
    ends = response_lengths(mask)[:, None]
    longer = torch.nn.functional.pad(responses, (0, 1))
    behind = (torch.arange(longer.shape[1]) == ends) & (ends > 0)
    return {**columns, "responses": longer, "response_mask": behind}
