"""RL post-training of LLMs as dataflow graphs: declare stages as nodes, compile them to a plan, run the plan on Ray.

A public name is imported when it is first asked for: `import rlgraph` takes milliseconds, and a worker loads only what it runs.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for mypy and editors; `_NAMES` and `_MODULES` say the same, and a test compares them
    from rlgraph import api, data
    from rlgraph.algorithms import (
        DPO,
        GAE,
        GRPO,
        IPO,
        KTO,
        ORPO,
        RLOO,
        BradleyTerry,
        ClippedLoss,
        DistillationLoss,
        SFTLoss,
        SimPO,
        TeacherKL,
        TruncatedIS,
        ValueLoss,
    )
    from rlgraph.api import compile, export, profile, record, rehearse, replay, report, tune, watch
    from rlgraph.columns import Columns
    from rlgraph.comparing import compare
    from rlgraph.config import config
    from rlgraph.curriculum import run
    from rlgraph.diagnosis import doctor
    from rlgraph.engines.api import Sampling
    from rlgraph.engines.drafts import PromptLookup
    from rlgraph.engines.hf_models.pretrained import model_folder
    from rlgraph.engines.lora.settings import LoRA
    from rlgraph.engines.optim import WSD, AdamW, Constant, Cosine, Linear, Muon
    from rlgraph.engines.registry import EngineSpec, TrainerSpec
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
    from rlgraph.nodes.environments import adapters as environments
    from rlgraph.nodes.environments import tools
    from rlgraph.nodes.environments.agent import Agent, Environment
    from rlgraph.nodes.environments.messages import Message, ToolCall, Turn
    from rlgraph.nodes.environments.program import AgentClient, Program
    from rlgraph.nodes.environments.tools import Tools
    from rlgraph.nodes.examples import examples, pairs, stepwise
    from rlgraph.nodes.prompts import prompts
    from rlgraph.nodes.rewards import scorers
    from rlgraph.nodes.rewards.calls import Retry
    from rlgraph.nodes.rewards.reward import kl_shaped_rewards, reward, shaped_rewards
    from rlgraph.nodes.rewards.reward_model import RewardModel
    from rlgraph.nodes.rollout.dynamic_sampling import Refill
    from rlgraph.nodes.rollout.evaluation import evaluate
    from rlgraph.nodes.rollout.rollout import Generator
    from rlgraph.nodes.sandbox import Executed, LocalSandbox, Sandbox, ToolError
    from rlgraph.nodes.training.advantages import advantages, filter_groups, filter_truncated, preferred, rollout_correction
    from rlgraph.nodes.training.critic import Critic
    from rlgraph.nodes.training.guards import Guards
    from rlgraph.nodes.training.learned_reward import LearnedReward
    from rlgraph.nodes.training.policy import Policy
    from rlgraph.nodes.training.reference import Reference
    from rlgraph.nodes.training.teacher import Teacher, by_source
    from rlgraph.plan.cluster import Cluster, Precision
    from rlgraph.plan.cost_functions import NodeCost
    from rlgraph.plan.costs import Costs
    from rlgraph.plan.facade import Facade
    from rlgraph.plan.lengths import Lengths
    from rlgraph.plan.plan import Plan
    from rlgraph.plan.rehearse import ClusterSite
    from rlgraph.recording import sinks
    from rlgraph.recording.profile import Profile
    from rlgraph.recording.samples import Samples
    from rlgraph.runtime.driver.job import Job
    from rlgraph.runtime.driver.machine import local_cluster
    from rlgraph.runtime.driver.warm import warm

    facade: Facade = api  # mypy compares the two

__all__ = [
    "DPO",
    "GAE",
    "GRPO",
    "IPO",
    "KTO",
    "ORPO",
    "RLOO",
    "WSD",
    "AdamW",
    "Agent",
    "AgentClient",
    "BradleyTerry",
    "CertificateError",
    "ChannelBroken",
    "ChannelClosed",
    "ChannelError",
    "ChannelTimeout",
    "Chat",
    "CheckpointError",
    "ClippedLoss",
    "Cluster",
    "ClusterSite",
    "Columns",
    "ConfigError",
    "Constant",
    "Context",
    "Cosine",
    "Costs",
    "Critic",
    "DataError",
    "DispatchError",
    "DistillationLoss",
    "EngineSpec",
    "Environment",
    "Executed",
    "ExportError",
    "Generator",
    "Graph",
    "GraphError",
    "GuardError",
    "Guards",
    "Job",
    "LearnedReward",
    "Lengths",
    "Linear",
    "LoRA",
    "LocalSandbox",
    "Message",
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
    "Program",
    "PromptLookup",
    "Reference",
    "Refill",
    "Retry",
    "RewardModel",
    "RlgraphError",
    "SFTLoss",
    "Samples",
    "Sampling",
    "Sandbox",
    "SimPO",
    "StalenessError",
    "Teacher",
    "TeacherKL",
    "ToolCall",
    "ToolError",
    "Tools",
    "TrainerSpec",
    "TruncatedIS",
    "Turn",
    "ValueLoss",
    "WorkerDied",
    "advantages",
    "by_source",
    "compare",
    "compile",
    "config",
    "data",
    "declare",
    "doctor",
    "environments",
    "evaluate",
    "examples",
    "export",
    "feedback",
    "filter_groups",
    "filter_truncated",
    "kl_shaped_rewards",
    "local_cluster",
    "model_folder",
    "node",
    "pairs",
    "preferred",
    "profile",
    "prompts",
    "record",
    "rehearse",
    "replay",
    "report",
    "reward",
    "rollout_correction",
    "run",
    "scorers",
    "shaped_rewards",
    "sinks",
    "stepwise",
    "tools",
    "tune",
    "warm",
    "watch",
]

_NAMES = {
    "DPO": "rlgraph.algorithms",
    "Executed": "rlgraph.nodes.sandbox",
    "GAE": "rlgraph.algorithms",
    "GRPO": "rlgraph.algorithms",
    "IPO": "rlgraph.algorithms",
    "KTO": "rlgraph.algorithms",
    "LocalSandbox": "rlgraph.nodes.sandbox",
    "ORPO": "rlgraph.algorithms",
    "RLOO": "rlgraph.algorithms",
    "Sandbox": "rlgraph.nodes.sandbox",
    "ToolError": "rlgraph.nodes.sandbox",
    "WSD": "rlgraph.engines.optim",
    "AdamW": "rlgraph.engines.optim",
    "Agent": "rlgraph.nodes.environments.agent",
    "AgentClient": "rlgraph.nodes.environments.program",
    "BradleyTerry": "rlgraph.algorithms",
    "CertificateError": "rlgraph.errors",
    "ChannelBroken": "rlgraph.errors",
    "ChannelClosed": "rlgraph.errors",
    "ChannelError": "rlgraph.errors",
    "ChannelTimeout": "rlgraph.errors",
    "Chat": "rlgraph.nodes.conversations",
    "CheckpointError": "rlgraph.errors",
    "ClippedLoss": "rlgraph.algorithms",
    "Cluster": "rlgraph.plan.cluster",
    "ClusterSite": "rlgraph.plan.rehearse",
    "Columns": "rlgraph.columns",
    "ConfigError": "rlgraph.errors",
    "Constant": "rlgraph.engines.optim",
    "Context": "rlgraph.nodes.base",
    "Cosine": "rlgraph.engines.optim",
    "Costs": "rlgraph.plan.costs",
    "Critic": "rlgraph.nodes.training.critic",
    "DataError": "rlgraph.errors",
    "DispatchError": "rlgraph.errors",
    "DistillationLoss": "rlgraph.algorithms",
    "EngineSpec": "rlgraph.engines.registry",
    "Environment": "rlgraph.nodes.environments.agent",
    "ExportError": "rlgraph.errors",
    "Generator": "rlgraph.nodes.rollout.rollout",
    "Graph": "rlgraph.graph.nodes",
    "GraphError": "rlgraph.errors",
    "GuardError": "rlgraph.errors",
    "Guards": "rlgraph.nodes.training.guards",
    "Job": "rlgraph.runtime.driver.job",
    "LearnedReward": "rlgraph.nodes.training.learned_reward",
    "Lengths": "rlgraph.plan.lengths",
    "LoRA": "rlgraph.engines.lora.settings",
    "Linear": "rlgraph.engines.optim",
    "Message": "rlgraph.nodes.environments.messages",
    "Model": "rlgraph.graph.nodes",
    "ModelTraits": "rlgraph.graph.operation",
    "Muon": "rlgraph.engines.optim",
    "NodeCost": "rlgraph.plan.cost_functions",
    "NodeError": "rlgraph.errors",
    "NodeTraits": "rlgraph.graph.operation",
    "Operation": "rlgraph.graph.operation",
    "Output": "rlgraph.graph.nodes",
    "Plan": "rlgraph.plan.plan",
    "PlanError": "rlgraph.errors",
    "PlanWarning": "rlgraph.errors",
    "Policy": "rlgraph.nodes.training.policy",
    "Pool": "rlgraph.graph.nodes",
    "Precision": "rlgraph.plan.cluster",
    "Profile": "rlgraph.recording.profile",
    "Program": "rlgraph.nodes.environments.program",
    "PromptLookup": "rlgraph.engines.drafts",
    "Reference": "rlgraph.nodes.training.reference",
    "Refill": "rlgraph.nodes.rollout.dynamic_sampling",
    "Retry": "rlgraph.nodes.rewards.calls",
    "RewardModel": "rlgraph.nodes.rewards.reward_model",
    "RlgraphError": "rlgraph.errors",
    "SFTLoss": "rlgraph.algorithms",
    "Samples": "rlgraph.recording.samples",
    "Sampling": "rlgraph.engines.api",
    "SimPO": "rlgraph.algorithms",
    "StalenessError": "rlgraph.errors",
    "Teacher": "rlgraph.nodes.training.teacher",
    "TeacherKL": "rlgraph.algorithms",
    "ToolCall": "rlgraph.nodes.environments.messages",
    "Tools": "rlgraph.nodes.environments.tools",
    "TrainerSpec": "rlgraph.engines.registry",
    "TruncatedIS": "rlgraph.algorithms",
    "Turn": "rlgraph.nodes.environments.messages",
    "ValueLoss": "rlgraph.algorithms",
    "WorkerDied": "rlgraph.errors",
    "advantages": "rlgraph.nodes.training.advantages",
    "by_source": "rlgraph.nodes.training.teacher",
    "compare": "rlgraph.comparing",
    "compile": "rlgraph.api",
    "config": "rlgraph.config",
    "declare": "rlgraph.graph.nodes",
    "doctor": "rlgraph.diagnosis",
    "evaluate": "rlgraph.nodes.rollout.evaluation",
    "examples": "rlgraph.nodes.examples",
    "export": "rlgraph.api",
    "feedback": "rlgraph.graph.nodes",
    "filter_groups": "rlgraph.nodes.training.advantages",
    "filter_truncated": "rlgraph.nodes.training.advantages",
    "kl_shaped_rewards": "rlgraph.nodes.rewards.reward",
    "local_cluster": "rlgraph.runtime.driver.machine",
    "model_folder": "rlgraph.engines.hf_models.pretrained",
    "node": "rlgraph.nodes.base",
    "pairs": "rlgraph.nodes.examples",
    "preferred": "rlgraph.nodes.training.advantages",
    "profile": "rlgraph.api",
    "prompts": "rlgraph.nodes.prompts",
    "record": "rlgraph.api",
    "rehearse": "rlgraph.api",
    "replay": "rlgraph.api",
    "report": "rlgraph.api",
    "reward": "rlgraph.nodes.rewards.reward",
    "rollout_correction": "rlgraph.nodes.training.advantages",
    "run": "rlgraph.curriculum",
    "shaped_rewards": "rlgraph.nodes.rewards.reward",
    "stepwise": "rlgraph.nodes.examples",
    "tune": "rlgraph.api",
    "warm": "rlgraph.runtime.driver.warm",
    "watch": "rlgraph.api",
}

_MODULES = {
    "data": "rlgraph.data",
    "environments": "rlgraph.nodes.environments.adapters",
    "scorers": "rlgraph.nodes.rewards.scorers",
    "sinks": "rlgraph.recording.sinks",
    "tools": "rlgraph.nodes.environments.tools",
}


class _Package(ModuleType):
    def __reduce__(self) -> tuple[Any, ...]:  # a function that is sent by value may name this package: it is imported there
        return import_module, (__name__,)

    # The import system names a module in its package when it is imported: not over a public name, as `rlgraph.config`, the function.
    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
if sys.excepthook is sys.__excepthook__:  # an error that ends a program shows the user's lines, not those of this package
    sys.excepthook = lambda *raised: import_module("rlgraph.errors").hook(*raised)


def __getattr__(name: str) -> Any:
    # A public name, or a module of this package: `rlgraph.errors` needs no import of its own.
    if name in _NAMES:
        value = vars(import_module(_NAMES[name]))[name]
    elif name in _MODULES or (not name.startswith("_") and find_spec(f"{__name__}.{name}")):
        value = import_module(_MODULES.get(name, f"{__name__}.{name}"))
    else:
        raise AttributeError(f"module 'rlgraph' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
