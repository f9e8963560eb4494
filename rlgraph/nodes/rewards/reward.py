"""Rewards: a node that scores each response by a function, and shapes of its scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, TypeAlias

import torch

from rlgraph.algorithms.kl import AdaptiveKL, FixedKL, KlEstimator, OverlongPenalty, penalize_rewards
from rlgraph.columns import COLUMNS, Columns
from rlgraph.errors import GraphError, show_value
from rlgraph.graph.nodes import Node, Operation, Output, declare
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Fired, FunctionOperation, ReadColumns, Stage, checked_columns, custom, list_columns, tensor_of
from rlgraph.nodes.rewards.calls import Calls, Retry
from rlgraph.nodes.rewards.scoring import Scoring, match_parameters, tokenizer_of
from rlgraph.nodes.training.advantages import on_last_token
from rlgraph.nodes.training.guards import Outliers
from rlgraph.notices import accept_old_names
from rlgraph.settings import Name, Range, Seconds, check_arguments

DEADLINE_S = 300.0  # half of a job's deadline, so that the error names the response and not only the node
OUTLIERS = 20.0
OUTLIERS_RULE = "a number of standard deviations above 0, or None to look for none"
RewardFunction: TypeAlias = Annotated[Callable[..., Any], Range(rule="a function that returns one number per response")]
RewardColumn: TypeAlias = Annotated[str, Range(least=1, rule="the name of the column for the rewards, e.g. writes='baseline_rewards'")]
Concurrency: TypeAlias = Annotated[int, Range(least=1, rule="how many responses are scored at a time, at least 1")]


@dataclass(frozen=True, eq=False)
class Reward(Operation):
    """Score the responses, measure their spread and count outliers."""

    scoring: Scoring
    writes: str = "rewards"
    by_group: bool = True
    outliers: float | None = OUTLIERS
    name: str = "reward"

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(by_group=self.by_group, given=(self.scoring,))

    def check(self, node: Node) -> None:
        self.scoring.check()

    def trial(self, node: Node, columns: Columns, rows: int) -> Columns:
        scores = self.scoring.try_on(columns)
        return {self.writes: torch.arange(rows).remainder(2).float() if scores is None else scores}

    def start(self, context: Context) -> Stage:
        self.scoring.start(context)
        outliers = None if self.outliers is None else Outliers(self.name, self.outliers)
        return lambda step, columns: self.fire(context, outliers, columns)

    def fire(self, context: Context, outliers: Outliers | None, columns: Columns) -> Fired:
        graded = self.scoring.grade(context, columns)
        scores = graded.tensor
        metrics = spread(self.writes, scores)
        metrics |= {f"critic/{self.writes}/{name}": value for name, value in graded.metrics(self.scoring.retry).items()}
        if outliers is not None:
            metrics["guards/reward_outliers"] = float(outliers.look(scores))
        return {self.writes: scores}, metrics


def spread(column: str, scores: torch.Tensor) -> dict[str, float]:
    """Compute mean, largest and smallest reward as metrics."""
    found = {"mean": scores.mean(), "max": scores.max(), "min": scores.min()}
    return {f"critic/{column}/{name}": value.item() for name, value in found.items()}


@accept_old_names(at_once="concurrency")
@check_arguments()
def reward(
    function: RewardFunction,
    *inputs: Output,
    writes: RewardColumn = "rewards",
    concurrency: Concurrency | None = None,
    deadline_s: Seconds = DEADLINE_S,
    retries: Retry | None = None,
    by_group: bool = True,
    outliers: Annotated[float, Range(above=0, rule=OUTLIERS_RULE)] | None = OUTLIERS,
    trial: bool = True,
    name: Name = "reward",
) -> Output:
    """Declare a reward: one number per response, from a function whose parameters name the columns they get.

    >>> import rlgraph as rg
    >>> prompts = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], 1)
    >>> reward(lambda answers: [1.0 for answer in answers], prompts).columns
    ('rewards',)

    `def right(responses, answers)` is called once with the columns of all responses and returns one number for each.
    `def right(response, answer)` is called for each response and returns its number, and so is `async def judge(response)`.
    For `rg.evaluate` a function may also return the answer that it found: see `rg.scorers.Score`.

    * `function`: the function. Its parameters `responses` and `prompts` are texts, or token ids if they are annotated `torch.Tensor`.
      `answers` is the field `answer` of the data set, repeated for each response.
    * `inputs`: outputs that carry these columns, e.g. the rollout and the prompts.
    * `writes`: the column of the rewards [B]: `baseline_rewards` for greedy responses, or a custom name for an estimator of several
      rewards, e.g. `rg.estimators.GDPO(keys=("right", "brief"))`.
    * `concurrency`: the calls for single responses that run at a time, on threads or, if async, in one event loop. None: 16, or the
      scorer's own number.
    * `deadline_s`: the seconds that a call may last.
    * `retries`: `rg.options.Retry(times=3, default=0.0)` repeats calls that fail. Metrics: `critic/rewards/retries`, repeated calls per
      response, and `critic/rewards/defaults`, the share of responses that got the default.
    * `by_group`: True if the reward of a response depends only on the responses to its prompt. In a rollout with `chunks` the function
      then gets each chunk, of whole groups, as it arrives. With False it gets the whole batch.
    * `outliers`: a reward farther than this many standard deviations from the mean of earlier rewards causes a warning and counts in
      `guards/reward_outliers`. It is used unchanged. None: no check.
    * `trial`: before anything starts, the launch calls the function on a made-up batch of two prompts with their groups, and checks its
      result as the run would. Set False for a function with side effects, or one that loads a model or needs a network.
    * `name`: the node's name in plans and errors.

    A call fails if it raises, takes longer than `deadline_s` or returns no finite number. If all retries fail and there is no default, the
    run ends with an error that names the response and its prompt.

    Raises GraphError for a parameter whose column no input carries, a function without parameters, or a column of another kind.
    """
    check_column(name, writes)
    where = f"node '{name}'"
    scored = match_parameters(where, function, list_columns(inputs), tokenizer_of(inputs), Calls(concurrency, deadline_s, retries, trial))
    operation = Reward(scored, writes, by_group, outliers, name)
    return Output(declare(name, operation, inputs, reads=operation.scoring.reads, writes=(writes,)))


def check_column(name: str, writes: str) -> None:
    """Raise GraphError unless a column of that name can hold rewards."""
    spec = COLUMNS.get(writes)
    if spec is not None and (spec.dtype, spec.dims) != (torch.float32, ("B",)):
        raise GraphError(
            f"node '{name}' has writes='{writes}', which holds {spec.meaning}; a reward is one number per response: choose another name"
        )


# Shaped rewards: a penalty by token for the KL to a reference, and changes such as a penalty for long responses.

Coefficient: TypeAlias = Annotated[float, Range(least=0, rule="a number of at least 0, or AdaptiveKL(...)")]


@check_arguments()
def kl_shaped_rewards(
    *inputs: Output, coef: Coefficient | FixedKL | AdaptiveKL, estimator: KlEstimator = "k1", name: str = "shaped"
) -> Output:
    """Declare token rewards [B, T]: the reward on the last token, minus `coef` times the KL of each token to the reference.

    >>> import rlgraph as rg
    >>> pool, prompts = rg.Pool("gpu"), rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], 1)
    >>> rollout = rg.Generator("tiny", pool=pool).rollout(prompts)
    >>> reward = rg.reward(lambda response, answer: float(answer in response), rollout, prompts)
    >>> old, reference = rg.Policy("tiny", pool=pool).log_probs(rollout), rg.Reference("tiny", pool=pool).log_probs(rollout)
    >>> rg.stages.kl_shaped_rewards(rollout, reward, old, reference, coef=0.001).columns
    ('token_rewards',)

    `coef` is a number or a controller. `rg.estimators.AdaptiveKL(coef, target, horizon)` adapts the coefficient to the KL after each
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
        self.controller = self.controller.advance(kl, len(mask))
        return {"token_rewards": shaped}, {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef}

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint: the coefficient of the next batch."""
        return {"coef": self.controller.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore a `state` from a checkpoint."""
        self.controller = replace(self.controller, coef=state["coef"])


class Shaping(Protocol):
    """A change of rewards: `rg.estimators.OverlongPenalty`, or a custom object that reads and returns `rewards`."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, batch: Columns, /) -> dict[str, torch.Tensor]: ...


@check_arguments()
def shaped_rewards(*inputs: Output, by: Shaping, of: str = "rewards", trial: bool = True, name: str = "shaped") -> Output:
    """Declare `rewards` [B]: the column `of`, changed by an object such as `rg.estimators.OverlongPenalty`.

    >>> import rlgraph as rg
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1))
    >>> plain = rg.reward(lambda response: float("2" in response), rollout)
    >>> rg.stages.shaped_rewards(rollout, plain, by=rg.estimators.OverlongPenalty(max_tokens=1024, buffer_tokens=256)).columns
    ('rewards',)

    Pass the result to later nodes in place of the plain rewards. Metrics: `critic/NAME/mean`, the mean change,
    `critic/NAME/fraction`, the share of responses changed, and `critic/rewards/...` if the plain rewards have another name.
    The launch tries a custom object on a made-up batch; `trial=False` leaves that out.

    Raises GraphError for an object that does not change rewards, a missing column, or a penalty that begins beyond the longest response.
    """
    # Users give any object.
    if not callable(by) or isinstance(by, type) or "rewards" not in getattr(by, "reads", ()):
        raise GraphError(
            f"node '{name}' has by={show_value(by)}; pass an object that maps rewards, e.g. by=rg.estimators.OverlongPenalty(...)"
        )
    if isinstance(by, OverlongPenalty):
        _check_reached(name, inputs, by)
    function: Callable[[Columns], Fired] = _Change(by, of, name)
    reads = tuple(of if column == "rewards" else column for column in by.reads)
    operation = FunctionOperation(function, tried=trial and custom(by))
    return Output(declare(name, operation, inputs, reads=reads, writes=("rewards",)))


def _check_reached(name: str, inputs: Sequence[Output], by: OverlongPenalty) -> None:
    """Raise GraphError if the penalty begins beyond the longest response that the rollout can write: it would have no effect."""
    begins = by.max_tokens - by.buffer_tokens
    for output in inputs:
        dims = output.node.traits.dims if isinstance(output, Output) and "response_mask" in output.columns else {}
        if dims.get("T", begins + 1) <= begins:
            raise GraphError(
                f"node '{name}' penalises responses of more than {begins} tokens, but '{output.node.name}' writes at most {dims['T']}, so "
                f"it has no effect: pass OverlongPenalty(max_tokens={dims['T']}, ...), the rollout's limit"
            )


@dataclass(frozen=True)
class _Change:
    by: Shaping
    of: str
    name: str

    def __call__(self, columns: Columns) -> Fired:
        plain = tensor_of(columns, self.of)
        shaped = self.by(ReadColumns({**columns, "rewards": plain}))["rewards"]
        checked_columns(self.name, ("rewards",), {"rewards": shaped}, len(plain))
        change = shaped - plain
        metrics = {f"critic/{self.name}/mean": change.mean(), f"critic/{self.name}/fraction": (change != 0).float().mean()}
        if self.of != "rewards":
            metrics |= {"critic/rewards/mean": shaped.mean(), "critic/rewards/max": shaped.max(), "critic/rewards/min": shaped.min()}
        return {"rewards": shaped}, {name: value.item() for name, value in metrics.items()}
