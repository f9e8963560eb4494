"""Pure tensor functions of RL post-training: advantages, losses, KL, rollout correction, shaping."""

from rlgraph.algorithms.aggregation import AGGREGATIONS, Totals, aggregate
from rlgraph.algorithms.bypass import Bypass
from rlgraph.algorithms.covariance_losses import ClipCov, KlCov
from rlgraph.algorithms.diagnostics import diagnostics
from rlgraph.algorithms.distillation import DistillationLoss, TeacherKL
from rlgraph.algorithms.divergence_losses import DPPO
from rlgraph.algorithms.group_advantages import GDPO, GPG, GRPO, OPO, RLOO, PassK, ReinforcePlusPlusBaseline
from rlgraph.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, kl_penalty, penalize_rewards
from rlgraph.algorithms.losses import CISPO, DRO, ClippedLoss, Reinforce
from rlgraph.algorithms.masks import masked_mean, masked_sum, whiten
from rlgraph.algorithms.names import ESTIMATORS, LOSSES, correction, estimator, loss
from rlgraph.algorithms.policy_loss import PolicyLoss
from rlgraph.algorithms.preferences import DPO, IPO, KTO, ORPO, SimPO
from rlgraph.algorithms.presets import RolloutCorrection
from rlgraph.algorithms.process_rewards import ProcessGRPO, StepwiseLoss
from rlgraph.algorithms.proximal import ProximalLoss, proximal_log_probs
from rlgraph.algorithms.rejection import STATISTICS, Rejection
from rlgraph.algorithms.return_advantages import GAE, ReinforcePlusPlus, ReMax
from rlgraph.algorithms.reward_losses import BradleyTerry
from rlgraph.algorithms.rollout_correction import IcePop, ImportanceWeights, TruncatedIS
from rlgraph.algorithms.sequence_losses import GMPO, GSPO, SAPO
from rlgraph.algorithms.shaping import OverlongPenalty, constant_groups
from rlgraph.algorithms.supervised import SFTLoss
from rlgraph.algorithms.token_baselines import OptimalTokenBaseline
from rlgraph.algorithms.value_loss import ValueLoss
from rlgraph.algorithms.whole_loss import WholeLoss

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
