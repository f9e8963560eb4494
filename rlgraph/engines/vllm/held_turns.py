"""What vLLM has read of conversations, kept between their turns: the next turn reads only what is new.

A prefix cache keeps whole blocks alone, of 32 tokens on a CPU, so that each turn reads half a block again on average. A resumable request
keeps all of it, in memory that nothing else can take. So it is given back where others need the room, and the prefix cache has its
whole blocks from then on. Proven for the scheduler and the runner of vLLM on a CPU, which are in this process.
"""

from collections.abc import Iterable
from typing import Any

from rlgraph.engines.api import Request

LEAST_FREE = 0.25  # of the blocks, for what runs: a turn given back in vain reads half a block more


class HeldTurns:
    """The requests of conversations that wait for their next turn, by vLLM's names; the longest waiting one first."""

    def __init__(self, llm: Any) -> None:
        self._client = llm.engine_core
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._runner = llm.model_executor.driver_worker.worker.model_runner
        self._names: dict[str, str] = {}  # by conversation

    def __len__(self) -> int:
        return len(self._names)

    def hold(self, conversation: str, name: str) -> None:
        """Keep a request whose turn has ended, and of its conversation no other."""
        self.give_back([conversation])
        self._names[conversation] = name

    def next_turn(self, request: Request) -> tuple[str, list[int]] | None:
        """Give the name of the held request that this one goes on from, and the tokens that are new; None where nothing is held.

        The seed of the turn is set as that of a new request is.
        """
        name = self._names.pop(request.conversation, None)
        if name is None:
            return None
        held = self._scheduler.requests[name]
        known = held.num_computed_tokens
        if known >= len(request.prompt) or list(held.all_token_ids[:known]) != list(request.prompt[:known]):
            self._client.abort_requests([name])
            return None
        generator = self._runner.requests[name].generator
        if generator is not None:
            generator.manual_seed(request.seed)
        return name, list(request.prompt[known:])

    def give_back(self, conversations: Iterable[str] | None = None) -> None:
        """Free what is held of these conversations, or of all."""
        given = list(self._names) if conversations is None else conversations
        names = [self._names.pop(conversation) for conversation in given if conversation in self._names]
        if names:
            self._client.abort_requests(names)

    def make_room(self) -> None:
        """Give back the longest waiting ones while what runs has too few blocks or places."""
        while self._names and self._crowded():
            self.give_back([next(iter(self._names))])

    def _crowded(self) -> bool:
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() < LEAST_FREE * pool.num_gpu_blocks:
            return True
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)  # what is held is among these
        return len(scheduler.running) + waiting > scheduler.max_num_active_reqs
