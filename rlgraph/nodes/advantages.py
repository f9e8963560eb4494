"""Host nodes between rewards and the update: advantages, KL-shaped rewards, rollout correction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlgraph.algorithms.kl import kl_penalty
from rlgraph.columns import Columns
from rlgraph.errors import GraphError
from rlgraph.graph import Output, declare
from rlgraph.nodes.base import FunctionOperation, carried


class Estimator(Protocol):
    """An advantage estimator: a frozen dataclass of `rlgraph.algorithms`, or one of your own."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...

    def __call__(self, batch: Columns, /) -> dict[str, torch.Tensor]: ...


def advantages(*inputs: Output, estimator: Estimator, name: str = "advantages") -> Output:
    """Declare the advantage of each response token, by an estimator such as `rg.GRPO()` or `rg.GAE(lam=0.95)`.

    Where the estimator wants token rewards and the inputs carry one reward a response, it is put on the last response token;
    where it wants one and they carry token rewards, they are summed.

    Raises GraphError for a column that the estimator reads and no input carries.
    """
    if not callable(estimator) or isinstance(estimator, type) or not hasattr(estimator, "reads"):
        raise GraphError(f"node '{name}' has estimator={estimator!r}; pass an estimator object, as estimator=rg.GRPO()")
    given = carried(inputs)
    reads = list(estimator.reads)
    convert: Callable[[Columns], Columns] = dict
    if "rewards" in reads and "rewards" not in given and "token_rewards" in given:
        reads[reads.index("rewards")] = "token_rewards"
        convert = _summed
    elif "token_rewards" in reads and "token_rewards" not in given and "rewards" in given:
        reads[reads.index("token_rewards")] = "rewards"
        if "response_mask" not in reads:
            reads.append("response_mask")
        convert = _placed
    operation = FunctionOperation(_Estimate(estimator, convert))
    return Output(declare(name, operation, inputs, reads=tuple(reads), writes=tuple(estimator.writes)))


@dataclass(frozen=True)
class _Estimate:
    estimator: Estimator
    convert: Callable[[Columns], Columns]

    def __call__(self, columns: Columns) -> Columns:
        return self.estimator(self.convert(columns))


def _summed(columns: Columns) -> Columns:
    return {**columns, "rewards": _tensor(columns, "token_rewards").sum(-1)}


def _placed(columns: Columns) -> Columns:
    return {**columns, "token_rewards": on_last_token(_tensor(columns, "rewards"), _tensor(columns, "response_mask"))}


def on_last_token(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return token rewards [B, T]: each reward [B] on the last token of its response, 0 elsewhere; empty rows stay 0."""
    places = torch.arange(1, mask.shape[1] + 1)
    last = torch.where(mask, places, 0).amax(-1, keepdim=True)
    return torch.where((places == last) & mask, rewards[:, None], 0.0)


def kl_shaped_rewards(*inputs: Output, coef: float, estimator: str = "k1", name: str = "shaped") -> Output:
    """Declare token rewards [B, T]: the reward on the last token, less `coef` times the KL of each token to the reference.

    Reads `rewards`, `response_mask`, `old_log_probs` and `ref_log_probs`. Source: Ouyang et al., 2022 (InstructGPT), equation 2.
    Raises GraphError for a negative coefficient or a missing column.
    """
    if isinstance(coef, bool) or not isinstance(coef, int | float) or not 0 <= coef < float("inf"):
        raise GraphError(f"node '{name}' has coef={coef!r}; the coefficient of the KL is a number of at least 0")
    reads = ("rewards", "response_mask", "old_log_probs", "ref_log_probs")
    return Output(declare(name, FunctionOperation(_Shape(coef, estimator)), inputs, reads=reads, writes=("token_rewards",)))


@dataclass(frozen=True)
class _Shape:
    coef: float
    estimator: str

    def __call__(self, columns: Columns) -> Columns:
        mask = _tensor(columns, "response_mask")
        kl = kl_penalty(_tensor(columns, "old_log_probs"), _tensor(columns, "ref_log_probs"), self.estimator)
        shaped = on_last_token(_tensor(columns, "rewards"), mask) - self.coef * torch.where(mask, kl, 0.0)
        return {"token_rewards": shaped}


def rollout_correction(*inputs: Output, weights: Any, name: str = "correction") -> Output:
    """Declare importance weights [B, T] of the trainer's log-probs over the engine's, such as `rg.TruncatedIS(level="token")`.

    Reads `old_log_probs`, `rollout_log_probs` and `response_mask`; an update that is given them multiplies its loss by them.
    Raises GraphError for a missing column.
    """
    if not callable(weights) or isinstance(weights, type):
        raise GraphError(f"node '{name}' has weights={weights!r}; pass a weights object, as weights=rg.TruncatedIS(level='token')")
    reads = ("old_log_probs", "rollout_log_probs", "response_mask")
    return Output(declare(name, FunctionOperation(_Correct(weights)), inputs, reads=reads, writes=("rollout_is_weights",)))


@dataclass(frozen=True)
class _Correct:
    weights: Any

    def __call__(self, columns: Columns) -> Columns:
        return {"rollout_is_weights": self.weights(*(columns[c] for c in ("old_log_probs", "rollout_log_probs", "response_mask")))}


def _tensor(columns: Columns, name: str) -> torch.Tensor:
    column = columns[name]
    assert isinstance(column, torch.Tensor), name
    return column
