"""Rollouts of several turns: a response that calls a tool waits for the answer and goes on, while the others decode.

No text is encoded twice. Sampled tokens stay as sampled, and an answer is encoded once and appended. So the engine finds earlier
turns in its prefix cache, and the trainer sees exactly the tokens that were sampled.
"""

import asyncio
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from rlgraph.columns import Column, Columns
from rlgraph.engines.api import Finish, Request, Response
from rlgraph.errors import RlgraphError
from rlgraph.nodes.base import Context, Fired
from rlgraph.nodes.environments.tools import Environment, Tools, may_go_on
from rlgraph.nodes.rewards.function_pool import event_loop
from rlgraph.nodes.rollout.responses import columns_of

if TYPE_CHECKING:
    from rlgraph.nodes.rollout.rollout import Rollout

SILENCE_S = 60.0  # beyond the deadline of a reply: after that the tools' event loop must be stuck


@dataclass(eq=False)
class Conversation:
    """One response of several turns. `written` marks the tokens that the model sampled; the others are answers of the environment."""

    request: Request
    environment: Environment
    turn: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    finish: Finish = "stop"

    @property
    def room(self) -> int:
        """How many tokens the response may still get, those of answers included."""
        return self.request.sampling.max_tokens - len(self.tokens)

    def next_request(self) -> Request:
        """Build the request of the present turn: the prompt and all turns so far."""
        return replace(
            self.request,
            id=f"{self.request.id}/{self.turn}",
            prompt=[*self.request.prompt, *self.tokens],
            sampling=replace(self.request.sampling, max_tokens=self.room),
            seed=(self.request.seed + 7_368_787 * self.turn) % 2**31,
        )

    def wrote(self, response: Response) -> None:
        self.tokens += response.tokens
        self.log_probs += response.log_probs
        self.versions += response.versions
        self.written += [True] * len(response.tokens)
        self.finish = response.finish

    def told(self, tokens: Sequence[int]) -> None:
        """Append an answer of the environment. Its tokens are not trained, since the policy did not write them."""
        said = list(tokens)[: self.room]
        self.tokens += said
        self.log_probs += [0.0] * len(said)
        self.versions += [self.versions[-1] if self.versions else 0] * len(said)
        self.written += [False] * len(said)
        self.turn += 1
        if self.room == 0:
            self.finish = "length"


@dataclass(frozen=True)
class _Said:
    """The answer of a conversation's environment; the text of an error if it `failed`."""

    conversation: Conversation
    text: str | None = None
    failed: bool = False


class MultiTurnLoop:
    """Samples the batch of a rollout with tools at each firing."""

    def __init__(self, rollout: "Rollout", tools: Tools, context: Context) -> None:
        self.rollout, self.tools, self.context = rollout, tools, context
        self._said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._slots = asyncio.Semaphore(tools.pool.cpus or 1)
        self._open: dict[str, Conversation] = {}  # by the request that decodes
        self._asking = 0
        self._failures, self._reply_s, self._idle_s = 0, 0.0, 0.0

    def __call__(self, step: int, columns: Columns) -> Fired:
        ids = columns["prompt_ids"]
        assert isinstance(ids, torch.Tensor)
        [rows], [requests] = self.rollout.shares(self.context, ids), self.rollout.requests(self.context, columns)
        self._failures, self._reply_s, self._idle_s = 0, 0.0, 0.0
        places = [row for row in rows for _ in range(self.rollout.group_size)]
        conversations = [
            Conversation(request, self.tools.answering(_item(columns, row))) for request, row in zip(requests, places, strict=True)
        ]
        for conversation in conversations:
            self._submit(conversation)
        while left := len(self._open) + self._asking:
            self.context.report_progress(len(conversations) - left, len(conversations), "responses")
            self._hear()
            self._decode()
        return self._columns(conversations, ids[torch.tensor(places, dtype=torch.long)]), self._metrics(conversations)

    def _submit(self, conversation: Conversation) -> None:
        request = conversation.next_request()
        self._open[request.id] = conversation
        self.context.engine.submit(request)

    def _decode(self) -> None:
        """Decode one step of the open turns, and ask the environments of those that end."""
        if not self._open:
            return
        if self.rollout.admission.interrupt and self.context.arrivals is not None:
            self.context.arrivals.poll()
        for name, response in self.context.engine.step(self.rollout.prefix).items():
            conversation = self._open.pop(name)
            conversation.wrote(response)
            if response.finish != "stop" or conversation.room == 0 or not response.tokens:
                continue
            text = self.context.tokenizer(self.rollout.generator.path).decode(response.tokens, skip_special_tokens=True)
            if conversation.turn + 1 < self.rollout.max_turns:
                self._asking += 1
                asyncio.run_coroutine_threadsafe(self._ask(conversation, text), event_loop())
            elif may_go_on(conversation.environment, text):
                conversation.finish = "turns"

    def _hear(self) -> None:
        """Submit the next turns of answered conversations. Waits for an answer only if nothing can decode."""
        while self._asking:
            start = time.monotonic()
            try:
                said = self._said.get(block=not self._open, timeout=self.tools.deadline_s + SILENCE_S)
            except queue.Empty:
                if self._open:
                    return
                raise RlgraphError(
                    f"{self._asking} tool calls of node '{self.rollout.prefix.rstrip(': ')}' gave no answer and no error within "
                    f"{self.tools.deadline_s + SILENCE_S:g} s: one of them blocks the event loop; await what takes time, or use a thread"
                ) from None
            self._idle_s += 0.0 if self._open else time.monotonic() - start
            self._asking -= 1
            self._failures += said.failed
            if said.text is not None:
                said.conversation.told(self._encoded(said.text))
                if said.conversation.room > 0:
                    self._submit(said.conversation)

    async def _ask(self, conversation: Conversation, text: str) -> None:
        """Ask the environment, in the event loop. At most as many run at once as the tools' pool has cores."""
        async with self._slots:
            start = time.monotonic()
            try:
                answer = await asyncio.wait_for(conversation.environment.reply(text), self.tools.deadline_s)
                said = _Said(conversation, answer)
            except TimeoutError:
                said = _Said(conversation, f"\nerror: no answer within {self.tools.deadline_s:g} s\n", failed=True)
            except Exception as error:  # noqa: BLE001 (a user's environment; the conversation goes on with what went wrong)
                said = _Said(conversation, f"\nerror: {type(error).__name__}: {error}\n", failed=True)
            self._reply_s += time.monotonic() - start
        self._said.put(said)

    def _encoded(self, text: str) -> list[int]:
        tokens: list[int] = self.context.tokenizer(self.rollout.generator.path)(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _columns(self, conversations: Sequence[Conversation], ids: torch.Tensor) -> dict[str, Column]:
        responses = [Response(c.tokens, c.log_probs, c.versions, c.finish) for c in conversations]
        columns = columns_of([c.request.prompt for c in conversations], responses, ids.clone())
        mask = columns["response_mask"]
        assert isinstance(mask, torch.Tensor)
        for row, conversation in enumerate(conversations):
            mask[row, : len(conversation.written)] = torch.tensor(conversation.written, dtype=torch.bool)
        return columns

    def _metrics(self, conversations: Sequence[Conversation]) -> dict[str, float]:
        count = max(len(conversations), 1)
        calls = sum(getattr(c.environment, "calls", c.turn) for c in conversations)
        failures = self._failures + sum(getattr(c.environment, "failures", 0) for c in conversations)
        told = sum(len(c.written) - sum(c.written) for c in conversations)
        return {
            "tools/turns_mean": sum(c.turn + 1 for c in conversations) / count,
            "tools/turns_max": float(max((c.turn + 1 for c in conversations), default=0)),
            "tools/calls": float(calls),
            "tools/failures": float(failures),
            "tools/tokens": float(told),
            "tools/reply_s": self._reply_s,
            "tools/idle_s": self._idle_s,
        }


def _item(columns: Columns, row: int) -> Mapping[str, Any]:
    """Collect the prompt columns of a row, all but its place in the data order."""
    return {name: column[row] for name, column in columns.items() if name != "prompt_ids"}
