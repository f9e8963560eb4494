"""The advantage of each response token, by any estimator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from rlgraph.algorithms.advantages import GroupEstimator
from rlgraph.columns import Columns
from rlgraph.errors import GraphError, shown
from rlgraph.graph.nodes import Output, declare
from rlgraph.nodes.base import FunctionOperation, carried, tensor_of
from rlgraph.settings import checked


class Estimator(Protocol):
    """An advantage estimator: a frozen dataclass of `rlgraph.algorithms`, or one of your own."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...

    def __call__(self, batch: Columns, /) -> dict[str, torch.Tensor]: ...


@checked()
def advantages(*inputs: Output, estimator: Estimator, name: str = "advantages") -> Output:
    """Declare the advantage of each response token, by an estimator such as `rg.GRPO()` or `rg.GAE(lam=0.95)`.

    If the estimator reads token rewards and the inputs carry one reward a response, that reward goes on the last response token. If it
    reads one reward a response and the inputs carry token rewards, these are summed. A `loss_mask` among the inputs, from a rollout
    correction or a filter, replaces `response_mask`.

    Raises GraphError for a column that the estimator reads and no input carries.

    >>> import rlgraph as rg
    >>> data = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
    >>> answers = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(data, group_size=8)
    >>> rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], answers)
    >>> rg.advantages(answers, rewards, estimator=rg.GRPO()).columns
    ('advantages',)
    """
    if not callable(estimator) or isinstance(estimator, type) or not hasattr(estimator, "reads"):
        raise GraphError(f"node '{name}' has estimator={shown(estimator)}; pass an estimator object, as estimator=rg.GRPO()")
    given = carried(inputs)
    reads = list(estimator.reads)
    if "loss_mask" in given and "response_mask" in reads:
        reads[reads.index("response_mask")] = "loss_mask"
    convert: Callable[[Columns], Columns] = dict
    if "rewards" in reads and "rewards" not in given and "token_rewards" in given:
        reads[reads.index("rewards")] = "token_rewards"
        convert = _summed
    elif "token_rewards" in reads and "token_rewards" not in given and "rewards" in given:
        reads[reads.index("token_rewards")] = "rewards"
        if "response_mask" not in reads:
            reads.append("response_mask")
        convert = _placed
    operation = FunctionOperation(_Estimate(estimator, convert), compares=_compares(estimator))
    return Output(declare(name, operation, inputs, reads=tuple(reads), writes=tuple(estimator.writes)))


def _compares(estimator: Estimator) -> str:
    return type(estimator).__name__ if isinstance(estimator, GroupEstimator) else ""


@dataclass(frozen=True)
class _Estimate:
    estimator: Estimator
    convert: Callable[[Columns], Columns]

    def __call__(self, columns: Columns) -> Columns:
        # Rewards are placed by `response_mask`, before rejection: with a rejected last token its reward is lost and moves to no other.
        converted = self.convert(columns)
        return self.estimator({**converted, "response_mask": columns["loss_mask"]} if "loss_mask" in columns else converted)


def _summed(columns: Columns) -> Columns:
    return {**columns, "rewards": tensor_of(columns, "token_rewards").sum(-1)}


def _placed(columns: Columns) -> Columns:
    return {**columns, "token_rewards": on_last_token(tensor_of(columns, "rewards"), tensor_of(columns, "response_mask"))}


def on_last_token(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Place each reward [B] on the last token of its response: token rewards [B, T], 0 elsewhere. Empty rows stay 0."""
    places = torch.arange(1, mask.shape[1] + 1)
    last = torch.where(mask, places, 0).amax(-1, keepdim=True)
    return torch.where((places == last) & mask, rewards[:, None], 0.0)
