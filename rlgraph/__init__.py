"""RL post-training of LLMs as dataflow graphs: declare stages as nodes, compile them to a plan, run the plan on Ray."""

from typing import TYPE_CHECKING, Any

from rlgraph import api, data
from rlgraph.algorithms import GAE, GRPO, RLOO, ClippedLoss, TruncatedIS, ValueLoss
from rlgraph.api import compile, export, profile, record, replay, report, tune, watch
from rlgraph.columns import Columns
from rlgraph.comparing import compare
from rlgraph.compiler.cluster import Cluster, Precision
from rlgraph.compiler.plan import Plan
from rlgraph.config import config
from rlgraph.costs.costs import Costs
from rlgraph.costs.functions import NodeCost
from rlgraph.costs.lengths import Lengths
from rlgraph.doctor.diagnosis import doctor
from rlgraph.engines.api import Sampling
from rlgraph.engines.fsdp.adamw import AdamW, Muon
from rlgraph.engines.hf_models.pretrained import model_folder
from rlgraph.engines.registry import EngineSpec, TrainerSpec
from rlgraph.engines.schedules import WSD, Constant, Cosine, Linear
from rlgraph.errors import (
    CertificateError,
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    ChannelTimeout,
    CheckpointError,
    ConfigError,
    DataError,
    DispatchError,
    ExportError,
    GraphError,
    GuardError,
    NodeError,
    PlanError,
    PlanWarning,
    RlgraphError,
    StalenessError,
    WorkerDied,
)
from rlgraph.graph.nodes import Graph, Model, Output, Pool, declare, feedback
from rlgraph.graph.operation import ModelTraits, NodeTraits, Operation
from rlgraph.nodes.base import Context, node
from rlgraph.nodes.conversations import Chat
from rlgraph.nodes.environments import tools
from rlgraph.nodes.environments.tools import Tools
from rlgraph.nodes.prompts import prompts
from rlgraph.nodes.rewards import scorers
from rlgraph.nodes.rewards.retry import Retry
from rlgraph.nodes.rewards.reward import reward
from rlgraph.nodes.rewards.reward_model import RewardModel
from rlgraph.nodes.rewards.shaping import kl_shaped_rewards, shaped_rewards
from rlgraph.nodes.rollout.dynamic_sampling import Refill
from rlgraph.nodes.rollout.evaluation import evaluate
from rlgraph.nodes.rollout.rollout import Generator
from rlgraph.nodes.training.advantages import advantages
from rlgraph.nodes.training.correction import filter_groups, filter_truncated, rollout_correction
from rlgraph.nodes.training.critic import Critic
from rlgraph.nodes.training.guards import Guards
from rlgraph.nodes.training.policy import Policy
from rlgraph.nodes.training.reference import Reference
from rlgraph.recording import sinks
from rlgraph.recording.profile import Profile
from rlgraph.recording.samples import Samples
from rlgraph.runtime.driver.machine import local_cluster

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

__all__ = [
    "GAE",
    "GRPO",
    "RLOO",
    "WSD",
    "AdamW",
    "CertificateError",
    "ChannelBroken",
    "ChannelClosed",
    "ChannelError",
    "ChannelTimeout",
    "Chat",
    "CheckpointError",
    "ClippedLoss",
    "Cluster",
    "Columns",
    "ConfigError",
    "Constant",
    "Context",
    "Cosine",
    "Costs",
    "Critic",
    "DataError",
    "DispatchError",
    "EngineSpec",
    "ExportError",
    "Generator",
    "Graph",
    "GraphError",
    "GuardError",
    "Guards",
    "Job",
    "Lengths",
    "Linear",
    "Model",
    "ModelTraits",
    "Muon",
    "NodeCost",
    "NodeError",
    "NodeTraits",
    "Operation",
    "Output",
    "Plan",
    "PlanError",
    "PlanWarning",
    "Policy",
    "Pool",
    "Precision",
    "Profile",
    "Reference",
    "Refill",
    "Retry",
    "RewardModel",
    "RlgraphError",
    "Samples",
    "Sampling",
    "StalenessError",
    "Tools",
    "TrainerSpec",
    "TruncatedIS",
    "ValueLoss",
    "WorkerDied",
    "advantages",
    "compare",
    "compile",
    "config",
    "data",
    "declare",
    "doctor",
    "evaluate",
    "export",
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
    "report",
    "reward",
    "rollout_correction",
    "scorers",
    "shaped_rewards",
    "sinks",
    "tools",
    "tune",
    "watch",
]

Plan.facade = api


def __getattr__(name: str) -> Any:
    """`rlgraph.Job`, which needs Ray: imported where it is asked for, since `import rlgraph` starts and loads nothing."""
    if name == "Job":
        from rlgraph.runtime.driver.job import Job

        return Job
    raise AttributeError(f"module 'rlgraph' has no attribute '{name}'")
