"""Environments of other projects for `rollout(agent=…)`, and what environments of one's own need: `rg.environments`."""

from rlgraph.environments.gymnasium import gymnasium
from rlgraph.environments.mcp import mcp
from rlgraph.environments.nemo_gym import nemo_gym, nemo_gym_rows
from rlgraph.environments.openenv import openenv
from rlgraph.environments.process import process, verifiers, verifiers_rows
from rlgraph.environments.reasoning_gym import reasoning_gym
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
