"""Pure tensor functions of RL post-training: advantages, losses, KL, rollout correction, shaping."""

from rlgraph.algorithms.aggregation import AGGREGATIONS, Totals, aggregate
from rlgraph.algorithms.group_advantages import GDPO, GPG, GRPO, OPO, RLOO, PassK, ReinforcePlusPlusBaseline
from rlgraph.algorithms.kl import KL_ESTIMATORS, kl_penalty
from rlgraph.algorithms.losses import CISPO, DRO, ClippedLoss, Reinforce
from rlgraph.algorithms.masks import masked_mean, masked_sum, whiten
from rlgraph.algorithms.policy_loss import PolicyLoss
from rlgraph.algorithms.return_advantages import GAE, ReinforcePlusPlus, ReMax
from rlgraph.algorithms.rollout_correction import IcePop, TruncatedIS
from rlgraph.algorithms.value_loss import ValueLoss

__all__ = [
    "AGGREGATIONS",
    "CISPO",
    "DRO",
    "GAE",
    "GDPO",
    "GPG",
    "GRPO",
    "KL_ESTIMATORS",
    "OPO",
    "RLOO",
    "ClippedLoss",
    "IcePop",
    "PassK",
    "PolicyLoss",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Totals",
    "TruncatedIS",
    "ValueLoss",
    "aggregate",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "whiten",
]
