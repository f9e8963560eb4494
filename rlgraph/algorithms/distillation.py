"""Distillation: a student's distributions are pulled to a teacher's, by the sampled token alone or by many tokens at each position."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from rlgraph import settings
from rlgraph.algorithms.inputs import response_mask_of, tensor, tokenwise
from rlgraph.algorithms.masks import Aggregation, Totals, aggregate, check_aggregation, keep
from rlgraph.algorithms.policy_loss import to_floats
from rlgraph.columns import Columns
from rlgraph.errors import GraphError, show_value
from rlgraph.settings import Count, Fraction, Positive

IDS, TOP, CHOSEN = "teacher_top_ids", "teacher_top_log_probs", "chosen_log_probs"
LEAST = 2.0**-23  # of the probability outside of the teacher's tokens: 1 - LEAST is below 1 in float32, so that gradients are finite


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class TeacherKL:
    """The reverse KL to a teacher as an advantage: -coef (log p_student - log p_teacher) of each sampled token.

        >>> columns = {"rollout_log_probs": torch.tensor([[-1.0]]), "teacher_log_probs": torch.tensor([[-3.0]])}
        >>> TeacherKL()({**columns, "response_mask": torch.tensor([[True]])})["advantages"].tolist()
        [[-2.0]]

    Its policy gradient equals the gradient of the reverse KL on the student's own responses, with one sample per token.
    Source: Agarwal et al., 2023, 2306.13649; Lu and Thinking Machines Lab, 2025, "On-Policy Distillation".

    * `coef`: the weight of the KL.
    * `clip`: the largest size of log p_student - log p_teacher that counts. None: any.
    * `of`: an estimator to whose advantages the KL is added, e.g. `TeacherKL(coef=0.1, of=rg.GRPO())`. None: only the KL.
    """

    coef: Positive = 1.0
    clip: Positive | None = None
    of: Any = None

    def __post_init__(self) -> None:
        settings.check(self)
        estimator = self.of
        if estimator is not None and not (callable(estimator) and hasattr(estimator, "reads") and not isinstance(estimator, type)):
            raise GraphError(f"TeacherKL(of={show_value(estimator)}): it is an estimator such as rg.GRPO(), or None")

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it needs, with those of the estimator that it adds to."""
        own = ("response_mask", "rollout_log_probs", "teacher_log_probs")
        return own if self.of is None else tuple(dict.fromkeys((*own, *self.of.reads)))

    @property
    def writes(self) -> tuple[str, ...]:
        """`advantages`, and what the other estimator writes."""
        return ("advantages",) if self.of is None else tuple(self.of.writes)

    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute the advantages `[B, T]`. Raises DataError for a column that is missing or of another shape."""
        mask = response_mask_of("TeacherKL", batch)
        student, teacher = (tokenwise("TeacherKL", batch, f"{who}_log_probs", mask) for who in ("rollout", "teacher"))
        apart = teacher - student
        own = keep(self.coef * (apart if self.clip is None else apart.clamp(-self.clip, self.clip)), mask)
        others = {} if self.of is None else self.of(batch)
        return {**others, "advantages": others["advantages"] + own if others else own}


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """The divergence of the student's distribution from the teacher's at each token, with a gradient through all tokens that are sent.

        >>> DistillationLoss(divergence="jsd", beta=0.5).reads
        ('teacher_top_ids', 'teacher_top_log_probs')

    * `divergence`: "forward_kl" is KL(teacher, student), "reverse_kl" is KL(student, teacher), "jsd" is the generalised Jensen-Shannon
      divergence beta KL(teacher, M) + (1 - beta) KL(student, M), M = (1 - beta) student + beta teacher.
    * `beta`: the weight of the teacher in the mixture M of "jsd".
    * `aggregation`: reduces token losses, by "token-mean" or as in `rg.ClippedLoss`.
    * `horizon`: the tokens that "seq-mean-token-sum-norm" divides by.

    `teacher.top_log_probs(…, top_k=64)` chooses the tokens to send: the teacher's top k, with all others counted as one token, or with
    `top_k=None` the whole vocabulary. With k tokens the divergence is at most the divergence over the whole vocabulary, and 0 only if
    both agree.

    The mean is over all tokens. Metric: `actor/distillation`. Source: Agarwal et al., 2023, 2306.13649, which mixes on-policy responses
    and examples with lambda: pass the examples as `also=[…]`. Oracle: TRL's `generalized_jsd_loss`, whose beta of 0 and 1 are the two KLs.
    """

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: Fraction = 0.5
    aggregation: Aggregation = "token-mean"
    horizon: Count | None = None
    additive: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (IDS, TOP)
    optional_reads: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False
    chosen_at: ClassVar[str] = IDS

    def __post_init__(self) -> None:
        settings.check(self)
        check_aggregation("DistillationLoss", self.aggregation, self.horizon)
        if self.divergence != "jsd" and self.beta != 0.5:
            raise GraphError(f"DistillationLoss(beta={self.beta}): only the divergence 'jsd' uses beta; leave it out")
        if self.divergence == "jsd" and self.beta in (0, 1):
            raise GraphError(f"DistillationLoss(beta={self.beta}): the divergence is then a KL; pass 'forward_kl' or 'reverse_kl'")

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss from the student's log-probs `[b, T, K]` of the teacher's tokens.

        They are the column `chosen_log_probs`, which the trainer adds. Raises DataError for a column that is missing.
        """
        mask = response_mask_of("DistillationLoss", batch, log_probs.shape)
        ids, teacher, student = (tensor("DistillationLoss", batch, name) for name in (IDS, TOP, CHOSEN))
        teacher, student = torch.where(mask[..., None], teacher, 0.0), torch.where(mask[..., None], student, 0.0)
        whole = bool((ids == torch.arange(ids.shape[-1], device=ids.device))[mask].all())
        if not whole:
            teacher, student = (torch.cat([values, _rest(values)], -1) for values in (teacher, student))
        each = keep(self._of(student, teacher.to(student)).sum(-1), mask)
        loss = aggregate(each, mask, totals, self.aggregation, self.horizon)
        return loss, to_floats({"actor/distillation": each.detach().sum() / max(totals.tokens, 1)})

    def _of(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Compute the terms of the divergence, of log-probs `[b, T, K]`."""
        if self.divergence == "forward_kl":
            return teacher.exp() * (teacher - student)
        if self.divergence == "reverse_kl":
            return student.exp() * (student - teacher)
        beta = student.new_tensor(self.beta)
        mixed = torch.logaddexp(student + torch.log1p(-beta), teacher + torch.log(beta))
        return beta * teacher.exp() * (teacher - mixed) + (1 - beta) * student.exp() * (student - mixed)


def _rest(log_probs: torch.Tensor) -> torch.Tensor:
    """Compute the log-prob `[b, T, 1]` of all tokens outside of `[b, T, K]`."""
    return torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - LEAST))
