"""Rollout correction: importance weights together with rejections, and verl's presets by name."""

from dataclasses import dataclass

import torch

from rlgraph import settings
from rlgraph.algorithms.inputs import check_mask
from rlgraph.algorithms.rejection import Rejection
from rlgraph.algorithms.rollout_correction import IcePop, ImportanceWeights, TruncatedIS
from rlgraph.errors import GraphError, shown


@settings.refuse_unknown
@dataclass(frozen=True)
class RolloutCorrection:
    """Correct for the difference between trainer and engine, by importance weights and rejections; a token is kept if all keep it.

        >>> correction = RolloutCorrection(TruncatedIS(threshold=2.0), (Rejection("token_k3", 0.5),))
        >>> correction(torch.tensor([[0.0, -1.0, -5.0]]), torch.tensor([[0.0, -1.5, -1.0]]), torch.ones(1, 3).bool())
        tensor([[1.0000, 1.6487, 0.0000]])

    A call gives weights that are 0 on rejected tokens. These still count in the loss's denominators, so that rejecting does not
    scale up the rest (as in AReaL). `kept` gives the mask instead: used as the new `response_mask` it takes rejected tokens out of the
    denominators too, and out of advantages computed later (as in verl).
    """

    weights: ImportanceWeights | None = None
    rejections: tuple[Rejection, ...] = ()

    def __post_init__(self) -> None:
        settings.check(self)
        if len(set(self.rejections)) < len(self.rejections):
            raise GraphError(f"RolloutCorrection(rejections={shown(self.rejections)}): a rejection is given twice; leave one out")

    @torch.no_grad()
    def __call__(self, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Compute weights `[B, T]`: 0 on rejected tokens and outside of the mask, and 1 on the others if there are no importance weights.

        Raises DataError for tensors of different shapes, or a mask that is not bool.
        """
        check_mask("RolloutCorrection", response_mask)
        kept = self.kept(old_log_probs, rollout_log_probs, response_mask)
        if self.weights is None:
            return kept.to(old_log_probs.dtype)
        return torch.where(kept, self.weights(old_log_probs, rollout_log_probs, response_mask), 0.0)

    def kept(self, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Compute the mask `[B, T]` of the tokens that no rejection takes out."""
        kept = response_mask
        for rejection in self.rejections:
            kept = kept & rejection(old_log_probs, rollout_log_probs, response_mask)
        return kept


_TOKEN, _SEQUENCE = TruncatedIS(level="token", threshold=2.0), TruncatedIS(level="sequence", threshold=2.0)
_ICEPOP = IcePop(level="token", low=0.5, high=5.0)
_PRODUCT = (Rejection.from_verl("seq_sum_k1", "0.5_2.0"),)
_GEOMETRIC = (Rejection.from_verl("seq_mean_k1", "0.999_1.001"),)
_K3 = (Rejection("seq_mean_k3", 0.01),)

# Decoupled presets have `old_log_probs` of the trainer. Bypass presets are part of a loss with ratios against the rollout: see `bypass`.
DECOUPLED: dict[str, RolloutCorrection] = {
    "decoupled_token_is": RolloutCorrection(_TOKEN),
    "decoupled_seq_is": RolloutCorrection(_SEQUENCE),
    "decoupled_token_icepop": RolloutCorrection(_ICEPOP),
    "decoupled_seq_is_rs": RolloutCorrection(_SEQUENCE, _PRODUCT),
    "decoupled_geo_rs": RolloutCorrection(None, _GEOMETRIC),
    "decoupled_geo_rs_seq_tis": RolloutCorrection(_SEQUENCE, _GEOMETRIC),
    "decoupled_geo_rs_token_tis": RolloutCorrection(_TOKEN, _GEOMETRIC),
    "decoupled_k3_rs": RolloutCorrection(None, _K3),
    "decoupled_k3_rs_seq_tis": RolloutCorrection(_SEQUENCE, _K3),
    "decoupled_k3_rs_token_tis": RolloutCorrection(_TOKEN, _K3),
    "disabled": RolloutCorrection(),
}
BYPASS: dict[str, RolloutCorrection] = {
    "bypass_ppo_clip": RolloutCorrection(),
    "bypass_ppo_clip_geo_rs": RolloutCorrection(None, _GEOMETRIC),
    "bypass_ppo_clip_k3_rs": RolloutCorrection(None, _K3),
    "bypass_pg_is": RolloutCorrection(_SEQUENCE),
    "bypass_pg_token_icepop": RolloutCorrection(_ICEPOP),
    "bypass_pg_geo_rs": RolloutCorrection(None, _GEOMETRIC),
    "bypass_pg_geo_rs_seq_tis": RolloutCorrection(_SEQUENCE, _GEOMETRIC),
    "bypass_pg_geo_rs_token_tis": RolloutCorrection(_TOKEN, _GEOMETRIC),
}
