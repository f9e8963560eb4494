"""Pure tensor functions of RL post-training: advantages, losses, KL, rollout correction, shaping; and each by name.

Names are for configuration: `estimator("grpo")`, `loss("gspo", clip_high=4e-4)`, `correction("decoupled_k3_rs")`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlgraph.algorithms import advantages, policy_losses, supervised_losses
from rlgraph.algorithms.advantages import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    OptimalTokenBaseline,
    PassK,
    ProcessGRPO,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    StepwiseLoss,
)
from rlgraph.algorithms.correction import (
    BYPASS,
    DECOUPLED,
    STATISTICS,
    IcePop,
    ImportanceWeights,
    Rejection,
    RolloutCorrection,
    TruncatedIS,
)
from rlgraph.algorithms.diagnostics import diagnostics
from rlgraph.algorithms.distillation import DistillationLoss, TeacherKL
from rlgraph.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, OverlongPenalty, constant_groups, kl_penalty, penalize_rewards
from rlgraph.algorithms.masks import AGGREGATIONS, Totals, aggregate, masked_mean, masked_sum, whiten
from rlgraph.algorithms.policy_loss import PolicyLoss, WholeLoss
from rlgraph.algorithms.policy_losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    Bypass,
    ClipCov,
    ClippedLoss,
    KlCov,
    ProximalLoss,
    Reinforce,
    proximal_log_probs,
)
from rlgraph.algorithms.supervised_losses import DPO, IPO, KTO, ORPO, BradleyTerry, SFTLoss, SimPO, ValueLoss
from rlgraph.errors import GraphError

# Algorithms by name, for configuration: `estimator("grpo")`, `loss("gspo", clip_high=4e-4)`, `correction("decoupled_k3_rs")`.

ESTIMATORS: Mapping[str, Callable[..., Any]] = {
    "gae": advantages.GAE,
    "grpo": advantages.GRPO,
    "dr_grpo": partial(advantages.GRPO, normalize_std=False),
    "grpo_process": advantages.ProcessGRPO,
    "grpo_passk": advantages.PassK,
    "gdpo": advantages.GDPO,
    "rloo": advantages.RLOO,
    "opo": advantages.OPO,
    "gpg": advantages.GPG,
    "remax": advantages.ReMax,
    "reinforce_plus_plus": advantages.ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": advantages.ReinforcePlusPlusBaseline,
    "optimal_token_baseline": advantages.OptimalTokenBaseline,
    "tir_optimal_token_baseline": partial(advantages.OptimalTokenBaseline, align="token"),
}


def _bypass(name: str, **options: Any) -> policy_losses.Bypass:
    loss = policy_losses.Reinforce(**options) if name.startswith("bypass_pg") else policy_losses.ClippedLoss(**options)
    return policy_losses.Bypass(loss, BYPASS[name])


LOSSES: Mapping[str, Callable[..., Any]] = {
    "clipped": policy_losses.ClippedLoss,
    "dapo": partial(policy_losses.ClippedLoss, clip_low=0.2, clip_high=0.28),
    "gspo": policy_losses.GSPO,
    "cispo": policy_losses.CISPO,
    "reinforce": policy_losses.Reinforce,
    "gmpo": policy_losses.GMPO,
    "sapo": policy_losses.SAPO,
    "clip_cov": policy_losses.ClipCov,
    "kl_cov": policy_losses.KlCov,
    "dppo_tv": partial(policy_losses.DPPO, divergence="tv"),
    "dppo_kl": partial(policy_losses.DPPO, divergence="kl"),
    "dro": policy_losses.DRO,
    "proximal": policy_losses.ProximalLoss,
    "dpo": supervised_losses.DPO,
    "ipo": supervised_losses.IPO,
    "kto": supervised_losses.KTO,
    "orpo": supervised_losses.ORPO,
    "simpo": supervised_losses.SimPO,
    "sft": supervised_losses.SFTLoss,
    "dft": partial(supervised_losses.SFTLoss, dft=True),
    **{name: partial(_bypass, name) for name in BYPASS},
}


def estimator(name: str, **options: Any) -> Any:
    """Make the advantage estimator called `name` (one of `ESTIMATORS`), with its options.

        >>> estimator("dr_grpo")
        GRPO(singleton='reward', normalize_std=False)

    Raises GraphError for an unknown name, with a list of the names, and for an unknown option.
    """
    return _make("estimator", ESTIMATORS, name, options)


def loss(name: str, **options: Any) -> Any:
    """Make the policy loss called `name` (one of `LOSSES`), with its options; a `bypass_...` loss accepts the options of its inner loss.

        >>> loss("dapo").clip_high
        0.28

    Raises GraphError for an unknown name, with a list of the names, and for an unknown option.
    """
    return _make("loss", LOSSES, name, options)


def correction(name: str) -> RolloutCorrection:
    """Look up the rollout correction that verl's preset `name` stands for.

        >>> correction("decoupled_k3_rs").rejections
        (Rejection(statistic='seq_mean_k3', high=0.01, low=None),)

    Raises GraphError for an unknown name, with a list of the names, and for a `bypass_...` preset, which is a loss.
    """
    if name in BYPASS:
        raise GraphError(f"correction '{name}' computes its ratios inside the loss; pass it as a loss: loss='{name}'")
    if name not in DECOUPLED:
        raise GraphError(f"there is no correction '{name}'; the corrections are {sorted(DECOUPLED)}")
    return DECOUPLED[name]


def _make(kind: str, table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any]) -> Any:
    if name not in table:
        raise GraphError(f"there is no {kind} '{name}'; choose one of {sorted(table)}")
    try:
        return table[name](**options)
    except TypeError as error:
        raise GraphError(
            f"{kind} '{name}' cannot be built with {dict(options)}: {error}; see docs/algorithms.md for its options"
        ) from error


__all__ = [
    "AGGREGATIONS",
    "CISPO",
    "DPO",
    "DPPO",
    "DRO",
    "ESTIMATORS",
    "GAE",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "IPO",
    "KL_ESTIMATORS",
    "KTO",
    "LOSSES",
    "OPO",
    "ORPO",
    "RLOO",
    "SAPO",
    "STATISTICS",
    "AdaptiveKL",
    "BradleyTerry",
    "Bypass",
    "ClipCov",
    "ClippedLoss",
    "DistillationLoss",
    "FixedKL",
    "IcePop",
    "ImportanceWeights",
    "KlCov",
    "OptimalTokenBaseline",
    "OverlongPenalty",
    "PassK",
    "PolicyLoss",
    "ProcessGRPO",
    "ProximalLoss",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Rejection",
    "RolloutCorrection",
    "SFTLoss",
    "SimPO",
    "StepwiseLoss",
    "TeacherKL",
    "Totals",
    "TruncatedIS",
    "ValueLoss",
    "WholeLoss",
    "aggregate",
    "constant_groups",
    "correction",
    "diagnostics",
    "estimator",
    "kl_penalty",
    "loss",
    "masked_mean",
    "masked_sum",
    "penalize_rewards",
    "proximal_log_probs",
    "whiten",
]
