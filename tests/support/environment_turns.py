"""Conversations with environments, without a model: what the adapters answer to what is said."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import rlgraph as rg


async def take_turns(make: Callable[..., Any], given: dict[str, Any], said: Sequence[str | rg.agents.Message]) -> list[Any]:
    """Hold a conversation: what `reset` returns, then each turn, until one is the last."""
    environment = make(**given)
    heard: list[Any] = []
    try:
        heard.append(await environment.reset())
        for text in said:
            heard.append(await environment.step(rg.agents.Message("assistant", text) if isinstance(text, str) else text))
            if heard[-1].done:
                break
    finally:
        await environment.close()
    return heard


def run_turns(make: Callable[..., Any], given: dict[str, Any], said: Sequence[str | rg.agents.Message]) -> list[Any]:
    """The same in an event loop of its own."""
    return asyncio.run(take_turns(make, given, said))
