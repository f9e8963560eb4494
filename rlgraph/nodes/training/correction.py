"""What is trained of a batch, and how strongly: rollout correction where trainer and engine disagree, filtering of groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlgraph.algorithms.diagnostics import diagnostics
from rlgraph.algorithms.presets import RolloutCorrection
from rlgraph.algorithms.rejection import Rejection
from rlgraph.algorithms.rollout_correction import ImportanceWeights
from rlgraph.algorithms.shaping import constant_groups
from rlgraph.columns import Columns
from rlgraph.errors import GraphError, shown
from rlgraph.graph.nodes import Output, declare
from rlgraph.nodes.base import Fired, FunctionOperation, carried, tensor_of
from rlgraph.nodes.rollout.responses import truncated
from rlgraph.settings import Name, checked

Weigh = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@checked()
def rollout_correction(
    *inputs: Output,
    weights: ImportanceWeights | RolloutCorrection | Weigh | None = None,
    rejections: Sequence[Rejection] = (),
    denominator: Literal["kept", "all"] = "kept",
    name: str = "correction",
) -> Output:
    """Declare how a batch is corrected for what trainer and engine disagree on, for the update and, as in verl, the advantages.

    `weights`, such as `rg.TruncatedIS(level="token")`, give `rollout_is_weights` [B, T], which multiply the loss. `rejections` leave
    tokens or responses out; a preset such as `rg.algorithms.correction("decoupled_k3_rs_seq_tis")`, given as `weights`, has both.
    With `denominator="kept"` rejections give `loss_mask` [B, T]: what is rejected does not count in the loss's means, as in verl.
    With "all" its weights are 0 and it still counts, so that rejecting does not scale up the rest, as in AReaL.

    Reads `old_log_probs`, `rollout_log_probs`, `response_mask`, and `loss_mask` where an input carries it.
    Metrics: `rollout_corr/...`, see `rlgraph.algorithms.diagnostics`.
    Raises GraphError for a missing column, settings without effect, or values of the wrong kind.
    """
    correction = _correction(name, weights, rejections)
    rejects = isinstance(correction, RolloutCorrection) and bool(correction.rejections)
    if denominator == "all" and not rejects:
        raise GraphError(f"node '{name}' has denominator='all', but rejects nothing; give rejections, or leave it out")
    masks = rejects and denominator == "kept"
    weighs = not masks or (isinstance(correction, RolloutCorrection) and correction.weights is not None)
    writes = (*(("rollout_is_weights",) if weighs else ()), *(("loss_mask",) if masks else ()))
    reads = ("old_log_probs", "rollout_log_probs", *mask_columns(inputs))
    return Output(declare(name, FunctionOperation(_Correct(correction, writes)), inputs, reads=reads, writes=writes))


def _correction(name: str, weights: Any, rejections: Sequence[Rejection]) -> RolloutCorrection | Weigh:
    """Return weights and rejections as one object; a function of the user's own stays what it is."""
    if isinstance(weights, type) or not (weights is None or callable(weights)):
        raise GraphError(f"node '{name}' has weights={shown(weights)}; pass a weights object, as weights=rg.TruncatedIS(level='token')")
    if weights is None and not rejections:
        raise GraphError(f"node '{name}' has neither weights nor rejections, and so nothing to do; give one of them")
    if weights is None or isinstance(weights, ImportanceWeights):
        return RolloutCorrection(weights, tuple(rejections))
    if rejections:
        raise GraphError(
            f"node '{name}' has weights={shown(weights)} and rejections; put both into one rg.algorithms.RolloutCorrection(...)"
        )
    correction: RolloutCorrection | Weigh = weights
    return correction


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
            written["loss_mask"] = self.correction.kept(*policies)
        if "rollout_is_weights" in self.writes:
            weights = self.correction.weights if "loss_mask" in self.writes else self.correction
            assert weights is not None
            written["rollout_is_weights"] = weights(*policies)
        return written, diagnostics(*policies, self.correction)


@checked()
def filter_groups(*inputs: Output, metric: Name = "rewards", name: str = "filter") -> Output:
    """Declare `loss_mask` [B, T] without the groups whose responses all have one `metric`: they teach nothing.

    The update neither computes nor counts them, so that a mean over tokens is one over those that teach. A group of one stays.
    Dynamic sampling replaces such groups instead. Metrics: `filter/groups_fraction`, of the groups that are left out.
    Source: Yu et al., 2025, 2503.14476 (DAPO).

    Raises GraphError for a missing column.
    """
    reads = (metric, "group_ids", *mask_columns(inputs))
    return Output(declare(name, FunctionOperation(_Filter(metric)), inputs, reads=reads, writes=("loss_mask",)))


@dataclass(frozen=True)
class _Filter:
    metric: str

    def __call__(self, columns: Columns) -> Fired:
        mask = tensor_of(columns, "loss_mask" if "loss_mask" in columns else "response_mask")
        groups = tensor_of(columns, "group_ids")
        constant = constant_groups(tensor_of(columns, self.metric), groups)
        fraction = len(groups[constant].unique()) / max(len(groups.unique()), 1)
        return {"loss_mask": mask & ~constant[:, None]}, {"filter/groups_fraction": fraction}


@checked()
def filter_truncated(*inputs: Output, name: str = "filter_truncated") -> Output:
    """Declare `loss_mask` [B, T] without the responses that were cut off: their reward judges an answer that they could not finish.

    A response is cut off by `max_tokens`, by the context or, with tools, by `max_turns`. The update neither computes nor counts it.
    Metric: `filter/truncated_fraction`, of the responses left out. Source: Yu et al., 2025, 2503.14476 (DAPO's overlong filtering).

        >>> import rlgraph as rg
        >>> generator = rg.Generator("tiny", pool=rg.Pool("rollout"))
        >>> rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=8), rg.feedback("weights", depth=1))
        >>> rg.filter_truncated(rollout).columns  # for policy.update(rollout, advantages, mask, …)
        ('loss_mask',)

    Raises GraphError for a missing column.
    """
    reads = ("finish_reasons", *mask_columns(inputs))
    return Output(declare(name, FunctionOperation(_without_truncated), inputs, reads=reads, writes=("loss_mask",)))


def _without_truncated(columns: Columns) -> Fired:
    mask = tensor_of(columns, "loss_mask" if "loss_mask" in columns else "response_mask")
    cut = truncated(columns)
    return {"loss_mask": mask & ~cut[:, None]}, {"filter/truncated_fraction": cut.float().mean().item()}


def mask_columns(inputs: Sequence[Output]) -> tuple[str, ...]:
    """Return which mask says what is trained: `loss_mask` where an input carries it, else `response_mask`."""
    return ("loss_mask",) if "loss_mask" in carried(inputs) else ("response_mask",)
