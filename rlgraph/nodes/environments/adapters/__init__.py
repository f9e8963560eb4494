"""Environments of other projects for `rollout(agent=…)`, and what environments of one's own need: `rg.environments`."""

from rlgraph.nodes.environments.adapters.gymnasium import gymnasium
from rlgraph.nodes.environments.adapters.mcp import mcp
from rlgraph.nodes.environments.adapters.nemo_gym import nemo_gym, nemo_gym_rows
from rlgraph.nodes.environments.adapters.openenv import openenv
from rlgraph.nodes.environments.adapters.process import process, verifiers, verifiers_rows
from rlgraph.nodes.environments.adapters.reasoning_gym import reasoning_gym
from rlgraph.nodes.environments.leases import Lease, lease

__all__ = [
    "Lease",
    "gymnasium",
    "lease",
    "mcp",
    "nemo_gym",
    "nemo_gym_rows",
    "openenv",
    "process",
    "reasoning_gym",
    "verifiers",
    "verifiers_rows",
]
