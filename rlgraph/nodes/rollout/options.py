"""The options of a rollout: its agent, of whatever it was given as, and those that exclude each other."""

import inspect
from collections.abc import Sequence
from typing import Any

from rlgraph.errors import GraphError, shown
from rlgraph.nodes.environments.agent import Agent
from rlgraph.nodes.environments.program import Program
from rlgraph.nodes.environments.tools import Tools


def agent_of(tools: Tools | None, agent: Any) -> Agent | Program | None:
    """Make the agent of a rollout: of tools, of a class of environments, or of a program."""
    if tools is not None:
        return tools.agent()
    if isinstance(agent, Agent | Program | None):
        return agent
    return Program(agent) if isinstance(agent, str | Sequence) or inspect.iscoroutinefunction(agent) else Agent(agent)


def check_options(name: str, routes: bool, **options: Any) -> None:
    """Raise GraphError for options that no rollout can have, or none of a generator with `routes`."""
    refill = options["refill"]
    if options["tools"] is not None and options["agent"] is not None:
        raise GraphError(
            f"node '{name}' has tools= and agent=; choose one: an environment gets calls of tools parsed, with rg.Agent(…, calls=…)"
        )
    if routes and (options["tools"] is not None or options["agent"] is not None):
        raise GraphError(
            f"node '{name}' samples conversations, and its generator has routes=True: routes are those of one turn; leave out routes, or "
            "tools and agent"
        )
    for option in ("max_turns", "concurrency"):
        if options[option] is not None and options["tools"] is None and options["agent"] is None:
            raise GraphError(
                f"node '{name}' has {option}={options[option]} but no tools and no agent, so there is one turn; pass tools= or agent=, or "
                f"leave {option} out"
            )
    agent = options["agent"]
    if isinstance(agent, Agent) and agent.warm and options["concurrency"] is None:
        raise GraphError(
            f"node '{name}' has Agent(warm={agent.warm}) without concurrency=, so every conversation begins at once and none waits for its "
            "place; give concurrency=, or leave warm out"
        )
    if refill is not None and not hasattr(refill, "declare"):
        raise GraphError(f"node '{name}' has refill={shown(refill)}; pass what to refill by, as refill=rg.Refill(reward=right)")
