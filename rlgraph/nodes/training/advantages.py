"""The advantage of each response token, the weights and masks of the loss, and pairs of preferred responses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from rlgraph.algorithms.advantages import GAE, GroupEstimator
from rlgraph.algorithms.correction import ImportanceWeights, Rejection, RolloutCorrection
from rlgraph.algorithms.diagnostics import diagnostics
from rlgraph.algorithms.kl import constant_groups
from rlgraph.columns import Column, Columns, rows_at, truncation_mask
from rlgraph.errors import GraphError, show_value
from rlgraph.graph.nodes import SAMPLED, Operation, Output, declare
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Fired, FunctionOperation, ReadColumns, Stage, custom, declares, list_columns, tensor_of
from rlgraph.nodes.training.trained_model import TOKENS
from rlgraph.settings import AtLeastZero, Name, check_arguments
from rlgraph.values.sampling import Sampling


class Estimator(Protocol):
    """An advantage estimator: a frozen dataclass of `rlgraph.algorithms`, or a custom one."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...

    def __call__(self, batch: Columns, /) -> dict[str, torch.Tensor]: ...


@check_arguments()
def advantages(*inputs: Output, estimator: Estimator, trial: bool = True, name: str = "advantages") -> Output:
    """Declare the advantage of each response token.

    >>> import rlgraph as rg
    >>> data = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
    >>> answers = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(data, group_size=8)
    >>> rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], answers)
    >>> rg.advantages(answers, rewards, estimator=rg.GRPO()).columns
    ('advantages',)

    * `inputs`: outputs with the columns that the estimator reads. If it reads token rewards [B, T] and the inputs carry one reward per
      response [B], the reward is placed on the last response token. In the opposite case the token rewards are summed. A `loss_mask`
      [B, T], from a rollout correction or a filter, replaces `response_mask`.
    * `estimator`: e.g. `rg.GRPO()`, `rg.GAE(lam=0.95)`, or a custom object.
    * `trial`: tries a custom estimator on a made-up batch of two prompts with their groups, before anything starts.
    * `name`: the node's name in plans and errors.

    It writes `advantages` [B, T], and with a critic `returns` [B, T]. Raises GraphError for a column that the estimator reads and no input
    carries.
    """
    if not callable(estimator) or isinstance(estimator, type) or not hasattr(estimator, "reads"):
        raise GraphError(f"node '{name}' has estimator={show_value(estimator)}; pass an estimator object, e.g. estimator=rg.GRPO()")
    given = list_columns(inputs)
    reads = list(estimator.reads)
    if "loss_mask" in given and "response_mask" in reads:
        reads[reads.index("response_mask")] = "loss_mask"
    convert: Callable[[Columns], Columns] = dict
    if "rewards" in reads and "rewards" not in given and "token_rewards" in given:
        reads[reads.index("rewards")] = "token_rewards"
        convert = _sum_token_rewards
    elif "token_rewards" in reads and "token_rewards" not in given and "rewards" in given:
        reads[reads.index("token_rewards")] = "rewards"
        if "response_mask" not in reads:
            reads.append("response_mask")
        convert = _place_rewards
    whole = _reason_for_full_batch(estimator)
    operation = FunctionOperation(
        _Estimate(estimator, convert),
        by_group=not whole,
        whole=whole,
        compares=_compares(estimator),
        tried=trial and custom(estimator),
    )
    return Output(declare(name, operation, inputs, reads=tuple(reads), writes=tuple(estimator.writes)))


def _reason_for_full_batch(estimator: Any) -> str:
    """Say why an estimator needs the whole batch; nothing if it works on groups."""
    if declares(estimator, "by_group"):
        return ""
    fix = " unless whiten=False" if type(estimator) is GAE else ", unlike e.g. rg.GRPO()"
    return f"estimates by {type(estimator).__name__}, which needs the whole batch{fix}"


def _compares(estimator: Estimator) -> str:
    return type(estimator).__name__ if isinstance(estimator, GroupEstimator) else ""


@dataclass(frozen=True)
class _Estimate:
    estimator: Estimator
    convert: Callable[[Columns], Columns]

    def __call__(self, columns: Columns) -> Columns:
        # Rewards are placed by `response_mask`, before rejection: a rejected last token loses its reward, which does not move to another
        # token.
        converted = self.convert(columns)
        masks = {"response_mask": columns["loss_mask"]} if "loss_mask" in columns else {}
        return self.estimator(ReadColumns({**converted, **masks}))


def _sum_token_rewards(columns: Columns) -> Columns:
    return {**columns, "rewards": tensor_of(columns, "token_rewards").sum(-1)}


def _place_rewards(columns: Columns) -> Columns:
    return {**columns, "token_rewards": on_last_token(tensor_of(columns, "rewards"), tensor_of(columns, "response_mask"))}


def on_last_token(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Place each reward [B] on the last token of its response: token rewards [B, T], 0 elsewhere. Empty rows stay 0."""
    places = torch.arange(1, mask.shape[1] + 1)
    last = torch.where(mask, places, 0).amax(-1, keepdim=True)
    return torch.where((places == last) & mask, rewards[:, None], 0.0)


# Weights and masks of the loss: rollout correction if trainer and engine disagree, filters of groups and cut-off responses.

Weigh = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@check_arguments()
def rollout_correction(
    *inputs: Output,
    weights: ImportanceWeights | RolloutCorrection | Weigh | None = None,
    rejections: Sequence[Rejection] = (),
    denominator: Literal["kept", "all"] = "kept",
    trial: bool = True,
    name: str = "correction",
) -> Output:
    """Declare the correction of a batch for log-probs on which trainer and engine disagree. Updates and, as in verl, advantages read it.

    `weights`, such as `rg.estimators.TruncatedIS(level="token")`, yield `rollout_is_weights` [B, T], which multiply the loss. `rejections`
    leave tokens or responses out. A preset passed as `weights`, such as `rg.algorithms.correction("decoupled_k3_rs_seq_tis")`, has both.

    With `denominator="kept"` rejections yield `loss_mask` [B, T]: the loss's means do not count rejected tokens, as in verl. With "all"
    rejected tokens have weight 0 and still count, so that rejecting does not scale up the others, as in AReaL.

    The launch tries a custom function, passed as `weights`, on a made-up batch; `trial=False` leaves that out.

    Reads `old_log_probs`, `rollout_log_probs`, `response_mask`, and `loss_mask` if an input carries it.
    Metrics: `rollout_corr/...`, see `rlgraph.algorithms.diagnostics`.
    Raises GraphError for a missing column, a setting without effect, or a value of the wrong kind.

    >>> import rlgraph as rg
    >>> data = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
    >>> answers = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(data)
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"))
    >>> rg.stages.rollout_correction(answers, policy.log_probs(answers), weights=rg.estimators.TruncatedIS(level="token")).columns
    ('rollout_is_weights',)
    """
    correction = _correction(name, weights, rejections)
    rejects = isinstance(correction, RolloutCorrection) and bool(correction.rejections)
    if denominator == "all" and not rejects:
        raise GraphError(f"node '{name}' has denominator='all', but rejects nothing; pass rejections, or leave it out")
    masks = rejects and denominator == "kept"
    weighs = not masks or (isinstance(correction, RolloutCorrection) and correction.weights is not None)
    writes = (*(("rollout_is_weights",) if weighs else ()), *(("loss_mask",) if masks else ()))
    reads = ("old_log_probs", "rollout_log_probs", *mask_columns(inputs))
    whole = _why_full_batch(correction)
    operation = FunctionOperation(_Correct(correction, writes), not whole, whole, tried=trial and custom(correction))
    return Output(declare(name, operation, inputs, reads=reads, writes=writes))


def _correction(name: str, weights: Any, rejections: Sequence[Rejection]) -> RolloutCorrection | Weigh:
    """Combine weights and rejections into one object; pass a user's function through."""
    if isinstance(weights, type) or not (weights is None or callable(weights)):
        raise GraphError(
            f"node '{name}' has weights={show_value(weights)}; pass a weights object, e.g. weights=rg.estimators.TruncatedIS(level='token')"
        )
    if weights is None and not rejections:
        raise GraphError(f"node '{name}' has neither weights nor rejections, so it has nothing to do; pass one of them")
    if weights is None or isinstance(weights, ImportanceWeights):
        return RolloutCorrection(weights, tuple(rejections))
    if rejections:
        raise GraphError(
            f"node '{name}' has weights={show_value(weights)} and rejections; put both into one rg.estimators.RolloutCorrection(...)"
        )
    correction: RolloutCorrection | Weigh = weights
    return correction


def _why_full_batch(correction: RolloutCorrection | Weigh) -> str:
    """Say why a correction needs the whole batch; nothing if it looks at single rows."""
    if not isinstance(correction, RolloutCorrection) or any(map(custom, (correction, *correction.rejections))):
        return "calls a function of yours, which may need the whole batch"
    if correction.weights is not None and (correction.weights.normalize or custom(correction.weights)):
        return "divides weights by their mean over the whole batch" if correction.weights.normalize else "has weights of yours"
    return ""


@dataclass(frozen=True)
class _Correct:
    correction: RolloutCorrection | Weigh
    writes: tuple[str, ...]

    def __call__(self, columns: Columns) -> Fired:
        mask = tensor_of(columns, "loss_mask" if "loss_mask" in columns else "response_mask")
        policies = tensor_of(columns, "old_log_probs"), tensor_of(columns, "rollout_log_probs"), mask
        if not isinstance(self.correction, RolloutCorrection):
            return {"rollout_is_weights": self.correction(*policies)}, diagnostics(*policies)
        written = {}
        if "loss_mask" in self.writes:
            written["loss_mask"] = self.correction.acceptance_mask(*policies)
        if "rollout_is_weights" in self.writes:
            weights = self.correction.weights if "loss_mask" in self.writes else self.correction
            assert weights is not None
            written["rollout_is_weights"] = weights(*policies)
        return written, diagnostics(*policies, self.correction)


@check_arguments()
def filter_groups(*inputs: Output, metric: Name = "rewards", name: str = "filter") -> Output:
    """Declare `loss_mask` [B, T] without the groups whose responses all have the same `metric`: they teach nothing.

    The update neither computes nor counts these groups, so a mean over tokens covers only the other groups. A group of one stays.
    `rg.options.Refill` replaces such groups instead. Metric: `filter/groups_fraction`, the share of groups left out.
    Source: Yu et al., 2025, 2503.14476 (DAPO).

    Raises GraphError for a missing column.

    >>> import rlgraph as rg
    >>> data = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
    >>> answers = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(data, group_size=8)
    >>> rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], answers)
    >>> rg.stages.filter_groups(answers, rewards).columns
    ('loss_mask',)
    """
    reads = (metric, "group_ids", *mask_columns(inputs))
    return Output(declare(name, FunctionOperation(_Filter(metric), by_group=True), inputs, reads=reads, writes=("loss_mask",)))


@dataclass(frozen=True)
class _Filter:
    metric: str

    def __call__(self, columns: Columns) -> Fired:
        mask = tensor_of(columns, "loss_mask" if "loss_mask" in columns else "response_mask")
        groups = tensor_of(columns, "group_ids")
        constant = constant_groups(tensor_of(columns, self.metric), groups)
        fraction = len(groups[constant].unique()) / max(len(groups.unique()), 1)
        return {"loss_mask": mask & ~constant[:, None]}, {"filter/groups_fraction": fraction}


@check_arguments()
def filter_truncated(*inputs: Output, name: str = "filter_truncated") -> Output:
    """Declare `loss_mask` [B, T] without the responses that were cut off: their rewards judge unfinished answers.

    A response is cut off by `max_tokens`, by the context or, with tools, by `max_turns`. The update neither computes nor counts it.
    Metric: `filter/truncated_fraction`, the share of responses left out. Source: Yu et al., 2025, 2503.14476 (DAPO's overlong filtering).

        >>> import rlgraph as rg
        >>> generator = rg.Generator("tiny", pool=rg.Pool("rollout"))
        >>> rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=8), rg.feedback("weights", depth=1))
        >>> rg.stages.filter_truncated(rollout).columns  # for policy.update(rollout, advantages, mask, …)
        ('loss_mask',)

    Raises GraphError for a missing column.
    """
    reads = ("finish_reasons", *mask_columns(inputs))
    return Output(declare(name, FunctionOperation(_mask_truncated_rows, by_group=True), inputs, reads=reads, writes=("loss_mask",)))


def _mask_truncated_rows(columns: Columns) -> Fired:
    mask = tensor_of(columns, "loss_mask" if "loss_mask" in columns else "response_mask")
    cut = truncation_mask(columns)
    return {"loss_mask": mask & ~cut[:, None]}, {"filter/truncated_fraction": cut.float().mean().item()}


def mask_columns(inputs: Sequence[Output]) -> tuple[str, ...]:
    """Choose the mask of the tokens to train: `loss_mask` if an input carries it, else `response_mask`."""
    return ("loss_mask",) if "loss_mask" in list_columns(inputs) else ("response_mask",)


# Preference pairs out of a rollout: the responses of each group with the highest and the lowest reward.

CARRIED = ("weight_version", "finish_reasons", SAMPLED, "ref_log_probs", "data_sources")


@dataclass(frozen=True, eq=False)
class Preferred(Operation):
    """Choose two rows of each group, and copy their columns."""

    columns: tuple[str, ...]
    group_size: int
    gap: float
    sampling: Sampling | None

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(given=(), sampling=self.sampling, preferences="pairs")

    def start(self, context: Context) -> Stage:
        return lambda step, columns: self.choose(columns)

    def choose(self, columns: Columns) -> Fired:
        """Choose the first best and the first worst response of each group; equal responses get the preference 0."""
        rewards = tensor_of(columns, "rewards").reshape(-1, self.group_size)
        first = torch.arange(len(rewards)) * self.group_size
        best, worst = rewards.argmax(-1), rewards.argmin(-1)
        apart = rewards.amax(-1) - rewards.amin(-1)
        differ = apart > self.gap
        rows = torch.stack([first + best, first + torch.where(best == worst, (best + 1) % self.group_size, worst)], -1).flatten()
        made: dict[str, Column] = {name: rows_at(columns[name], rows) for name in self.columns}
        made["preferences"] = torch.stack([differ.float(), -differ.float()], -1).flatten()
        made["margins"] = apart.repeat_interleave(2)
        return made, {"preferred/share": differ.float().mean().item(), "preferred/gap": apart.mean().item()}


@check_arguments()
def preferred(*inputs: Output, gap: AtLeastZero = 0.0, name: Name = "preferred") -> Output:
    """Declare preference pairs out of a rollout and its rewards: the best and the worst response of each group.

    >>> import rlgraph as rg
    >>> prompts = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts, group_size=8)
    >>> rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], rollout)
    >>> rg.preferred(rollout, rewards).node.rows  # for policy.update(pairs, reference.log_probs(pairs), loss=rg.DPO())
    8

    A pair is two rows, the chosen one first, with `preferences` 1 and -1, or 0 if the rewards differ by at most `gap`: the loss
    leaves these out. `margins` is the difference of the rewards. Metrics: `preferred/share` of the groups that yield a pair, and
    `preferred/gap`, the mean difference. Raises GraphError for inputs without the rewards of a rollout, and groups of one.
    """
    given = list_columns(inputs)
    sources = [o.node.traits for o in inputs if isinstance(o, Output) and (o.node.traits.group_size or 1) > 1]
    if not sources:
        raise GraphError(f"node '{name}' needs a rollout with a group_size of 2 or more among its inputs, to select the best and the worst")
    whole = all(source.sampling is None or source.sampling.is_full_distribution for source in sources)
    passed = (column for column in CARRIED if column in given and (whole or column != SAMPLED))
    kept, size = (*TOKENS, *passed), sources[0].group_size or 1
    operation = Preferred(kept, size, gap, sources[0].sampling)
    rows = 2 * (max(o.node.rows for o in inputs) // size)
    return Output(declare(name, operation, inputs, reads=(*kept, "rewards"), writes=(*kept, "preferences", "margins"), rows=rows))
