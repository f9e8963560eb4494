"""RL post-training of LLMs as dataflow graphs: declare stages as nodes, compile them to a plan, run the plan on Ray."""

from rlgraph.algorithms import GAE, GRPO, RLOO, ClippedLoss, TruncatedIS, ValueLoss
from rlgraph.columns import Columns
from rlgraph.compiler import Plan, compile, profile
from rlgraph.config import config
from rlgraph.engines.adamw import AdamW
from rlgraph.engines.base import Sampling
from rlgraph.engines.pretrained import model_folder
from rlgraph.errors import RlgraphError
from rlgraph.graph import Graph, Pool, feedback
from rlgraph.nodes import scorers, tools
from rlgraph.nodes.advantages import advantages
from rlgraph.nodes.base import node
from rlgraph.nodes.correction import filter_groups, filter_truncated, rollout_correction
from rlgraph.nodes.critic import Critic
from rlgraph.nodes.dynamic_sampling import Refill
from rlgraph.nodes.evaluation import evaluate
from rlgraph.nodes.guards import Guards
from rlgraph.nodes.policy import Policy
from rlgraph.nodes.prompts import prompts
from rlgraph.nodes.reference import Reference
from rlgraph.nodes.reward import reward
from rlgraph.nodes.reward_model import RewardModel
from rlgraph.nodes.rollout import Generator
from rlgraph.nodes.shaping import kl_shaped_rewards, shaped_rewards
from rlgraph.nodes.tools import Tools
from rlgraph.planning.cluster import Cluster, Precision
from rlgraph.planning.costs import Costs
from rlgraph.planning.laws import NodeCost
from rlgraph.planning.lengths import Lengths
from rlgraph.record import record
from rlgraph.runtime.machine import local_cluster
from rlgraph.tuning import replay, tune

__all__ = [
    "GAE",
    "GRPO",
    "RLOO",
    "AdamW",
    "ClippedLoss",
    "Cluster",
    "Columns",
    "Costs",
    "Critic",
    "Generator",
    "Graph",
    "Guards",
    "Lengths",
    "NodeCost",
    "Plan",
    "Policy",
    "Pool",
    "Precision",
    "Reference",
    "Refill",
    "RewardModel",
    "RlgraphError",
    "Sampling",
    "Tools",
    "TruncatedIS",
    "ValueLoss",
    "advantages",
    "compile",
    "config",
    "evaluate",
    "feedback",
    "filter_groups",
    "filter_truncated",
    "kl_shaped_rewards",
    "local_cluster",
    "model_folder",
    "node",
    "profile",
    "prompts",
    "record",
    "replay",
    "reward",
    "rollout_correction",
    "scorers",
    "shaped_rewards",
    "tools",
    "tune",
]
