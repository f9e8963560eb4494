"""Shaped rewards: a penalty by token for the KL to a reference, and changes such as a penalty for long responses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol, TypeAlias

import torch

from rlgraph.algorithms.kl import AdaptiveKL, FixedKL, KlEstimator, penalize_rewards
from rlgraph.algorithms.shaping import OverlongPenalty
from rlgraph.columns import Columns
from rlgraph.errors import GraphError, shown
from rlgraph.graph.nodes import Output, declare
from rlgraph.graph.operation import Operation
from rlgraph.nodes.base import Context, Fired, FunctionOperation, Stage, tensor_of
from rlgraph.nodes.training.advantages import on_last_token
from rlgraph.settings import Range, checked

Coefficient: TypeAlias = Annotated[float, Range(least=0, rule="a number of at least 0, or AdaptiveKL(...)")]


@checked()
def kl_shaped_rewards(
    *inputs: Output, coef: Coefficient | FixedKL | AdaptiveKL, estimator: KlEstimator = "k1", name: str = "shaped"
) -> Output:
    """Declare token rewards [B, T]: the reward on the last token, minus `coef` times the KL of each token to the reference.

    >>> import rlgraph as rg
    >>> pool, prompts = rg.Pool("gpu"), rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], 1)
    >>> rollout = rg.Generator("tiny", pool=pool).rollout(prompts)
    >>> reward = rg.reward(lambda response, answer: float(answer in response), rollout, prompts)
    >>> old, reference = rg.Policy("tiny", pool=pool).log_probs(rollout), rg.Reference("tiny", pool=pool).log_probs(rollout)
    >>> rg.kl_shaped_rewards(rollout, reward, old, reference, coef=0.001).columns
    ('token_rewards',)

    `coef` is a number or a controller. `rg.algorithms.AdaptiveKL(coef, target, horizon)` adapts the coefficient to the KL after each
    batch. Reads `rewards`, `response_mask`, `old_log_probs` and `ref_log_probs`.
    Metrics: `actor/reward_kl_penalty`, the KL, and `actor/reward_kl_penalty_coeff`.
    Source: Ouyang et al., 2022 (InstructGPT), equation 2; Ziegler et al., 2019, 1909.08593 (the controller).

    Raises GraphError for a negative coefficient, an unknown estimator or a missing column.
    """
    if not isinstance(coef, FixedKL | AdaptiveKL):
        coef = FixedKL(coef)
    reads = ("rewards", "response_mask", "old_log_probs", "ref_log_probs")
    return Output(declare(name, KLShaping(coef, estimator), inputs, reads=reads, writes=("token_rewards",)))


@dataclass(frozen=True)
class KLShaping(Operation):
    """Subtract the KL from the rewards; the controller carries its coefficient from step to step."""

    controller: FixedKL | AdaptiveKL
    estimator: str

    def start(self, context: Context) -> Stage:
        return _Shaper(self.controller, self.estimator)


@dataclass
class _Shaper:
    controller: FixedKL | AdaptiveKL
    estimator: str

    def __call__(self, step: int, columns: Columns) -> Fired:
        mask, coef = tensor_of(columns, "response_mask"), self.controller.coef
        rewards = on_last_token(tensor_of(columns, "rewards"), mask)
        policies = tensor_of(columns, "old_log_probs"), tensor_of(columns, "ref_log_probs")
        shaped, kl = penalize_rewards(rewards, *policies, mask, coef, self.estimator)
        self.controller = self.controller.updated(kl, len(mask))
        return {"token_rewards": shaped}, {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef}

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint: the coefficient of the next batch."""
        return {"coef": self.controller.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore a `state` from a checkpoint."""
        self.controller = replace(self.controller, coef=state["coef"])


class Shaping(Protocol):
    """A change of rewards: `rg.algorithms.OverlongPenalty`, or an object of your own that reads and gives `rewards`."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, batch: Columns, /) -> dict[str, torch.Tensor]: ...


@checked()
def shaped_rewards(*inputs: Output, by: Shaping, of: str = "rewards", name: str = "shaped") -> Output:
    """Declare `rewards` [B]: those of the column `of`, changed by an object such as `rg.algorithms.OverlongPenalty`.

    >>> import rlgraph as rg
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1))
    >>> plain = rg.reward(lambda response: float("2" in response), rollout)
    >>> rg.shaped_rewards(rollout, plain, by=rg.algorithms.OverlongPenalty(max_tokens=1024, buffer_tokens=256)).columns
    ('rewards',)

    Pass the result to later nodes in place of the plain rewards. Metrics: `critic/NAME/mean`, the mean change,
    `critic/NAME/fraction`, the share of responses changed, and `critic/rewards/...` if the plain rewards have another name.

    Raises GraphError for an object that does not change rewards, a missing column, or a penalty that begins beyond the longest response.
    """
    if not callable(by) or isinstance(by, type) or "rewards" not in getattr(by, "reads", ()):
        raise GraphError(
            f"node '{name}' has by={shown(by)}; pass an object that reads and gives rewards, as by=rg.algorithms.OverlongPenalty(...)"
        )
    if isinstance(by, OverlongPenalty):
        _check_reached(name, inputs, by)
    function: Callable[[Columns], Fired] = _Change(by, of, name)
    reads = tuple(of if column == "rewards" else column for column in by.reads)
    return Output(declare(name, FunctionOperation(function), inputs, reads=reads, writes=("rewards",)))


def _check_reached(name: str, inputs: Sequence[Output], by: OverlongPenalty) -> None:
    """Raise GraphError if the penalty begins beyond the longest response that the rollout can write: it would have no effect."""
    begins = by.max_tokens - by.buffer_tokens
    for output in inputs:
        dims = output.node.traits.dims if isinstance(output, Output) and "response_mask" in output.columns else {}
        if dims.get("T", begins + 1) <= begins:
            raise GraphError(
                f"node '{name}' penalises responses of more than {begins} tokens, but '{output.node.name}' writes at most {dims['T']}, so "
                f"it would do nothing: give OverlongPenalty(max_tokens={dims['T']}, ...), which is the rollout's"
            )


@dataclass(frozen=True)
class _Change:
    by: Shaping
    of: str
    name: str

    def __call__(self, columns: Columns) -> Fired:
        plain = tensor_of(columns, self.of)
        shaped = self.by({**columns, "rewards": plain})["rewards"]
        change = shaped - plain
        metrics = {f"critic/{self.name}/mean": change.mean(), f"critic/{self.name}/fraction": (change != 0).float().mean()}
        if self.of != "rewards":
            metrics |= {"critic/rewards/mean": shaped.mean(), "critic/rewards/max": shaped.max(), "critic/rewards/min": shaped.min()}
        return {"rewards": shaped}, {name: value.item() for name, value in metrics.items()}
