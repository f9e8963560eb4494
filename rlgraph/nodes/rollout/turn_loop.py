"""Conversations of a rollout: each answers its environment's turns independently, while the others decode.

A conversation is in one of three states: it waits for room, it waits for its environment, or its turn decodes. The engine runs a step
whenever a turn decodes; answers of environments are handled between two steps. No text is encoded twice: sampled tokens stay as
sampled, so the engine finds earlier turns in its prefix cache, and the trainer receives exactly the sampled tokens.
"""

import atexit
import json
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlgraph.data.images import MARK
from rlgraph.engines.api import Finish
from rlgraph.engines.hf.chat_template import ChatPrompt, TurnTemplate
from rlgraph.engines.hf.images import expand_images
from rlgraph.errors import DataError, GraphError, RlgraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.environments import leases
from rlgraph.nodes.environments.agent import Agent, Environment
from rlgraph.nodes.environments.calls import Call, EnvironmentCalls
from rlgraph.nodes.environments.messages import CallFormat, Message, Turn, calls_of
from rlgraph.nodes.rollout.conversation import Conversation, ConversationLoop, probe_answer
from rlgraph.nodes.rollout.decode_loop import Outcome, Task

WAIT_S = 0.1  # for an environment, if nothing decodes
MOST_MESSAGES = 64  # per turn of an environment
CLOSING_S = 10.0  # for environments to close after a run has failed
log = logging.getLogger("rlgraph.agents")


@dataclass(frozen=True)
class TurnRules:
    """The settings of a rollout for its conversations.

    `reads` names the column of each parameter of the environment; `chat` makes the conversation of a prompt's item. `prefix` prefixes
    request ids. If a prompt has more than `most_prompt` tokens, `cut_prompts` cuts it off, otherwise its conversation fails.
    `rewarded` means that the environment also answers the last turn, for its reward. A conversation has at most `images`; None: the
    generator reads none.
    """

    agent: Agent
    reads: Mapping[str, str]
    chat: Callable[[Mapping[str, Any]], ChatPrompt]
    form: CallFormat | None
    prefix: str
    group_size: int
    max_turns: int
    concurrency: int | None
    most_prompt: int
    cut_prompts: bool
    rewarded: bool
    images: int | None = None


@dataclass(eq=False)
class _GroupEnvironment:
    """The environment of a group, and the number of its open conversations."""

    left: int
    environment: Environment | None = None


class TurnLoop(ConversationLoop):
    """Samples conversations with environments; a decoder of `DecodeLoop`."""

    def __init__(self, rules: TurnRules, template: TurnTemplate, context: Context) -> None:
        super().__init__()
        self.rules, self.template, self.context = rules, template, context
        self.calls = EnvironmentCalls()
        self._waiting: deque[Task] = deque()
        self._warm: deque[Conversation] = deque()  # created ahead, in the order of their tasks
        self._kept: dict[Conversation, Call] = {}  # their answers of `reset`
        self._live: set[Conversation] = set()
        self._open: dict[str, Conversation] = {}  # by the request that decodes
        self._groups: dict[str, _GroupEnvironment] = {}
        self._done: dict[str, Outcome] = {}
        self._checked: set[str] = set()  # roles whose messages the template renders after a turn without changing it
        leases.sweep()  # of workers that were killed
        atexit.register(_drain, weakref.ref(self))

    def submit(self, task: Task) -> None:
        self._waiting.append(task)

    def step(self) -> Mapping[str, Outcome]:
        """Decode one step of the open turns. Waits for an environment only if nothing can decode."""
        self._begin()
        if self._open or self._done:
            ended = self.calls.take_finished_calls(0.0)
        else:
            start = time.monotonic()
            with self.context.waiting():
                ended = self.calls.take_finished_calls(WAIT_S)
            self.seconds["idle_s"] += time.monotonic() - start
        for call in ended:
            self._handle_answer(call)
        if self._open:
            for name, response in self.context.engine.step(self.rules.prefix).items():
                conversation = self._open.pop(name)
                conversation.append_turn(response)
                self._pass_turn(conversation, response.tokens)
        self.calls.send()
        done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Close the environments of all conversations after the rollout has failed; wait a while for them."""
        self.context.engine.abort(list(self._open))
        self.calls.cancel(("reset", "step", "truncated"))
        for conversation in [*(one for one in self._live if not one.ended), *self._warm]:
            self._end(conversation, "abort")
        self._warm.clear()
        self._kept.clear()
        self.drain()
        self._waiting.clear()
        self._open.clear()
        self._done.clear()

    def drain(self) -> None:
        """Wait a while for environments that close."""
        deadline = time.monotonic() + CLOSING_S
        while len(self.calls) and time.monotonic() < deadline:
            for call in self.calls.take_finished_calls(WAIT_S):
                if call.kind == "close":
                    self._handle_answer(call)

    def _begin(self) -> None:
        """Begin conversations, in the order of their tasks, as long as there is room; create the next environments ahead."""
        while (self._warm or self._waiting) and self._room() > 0:
            conversation = self._warm.popleft() if self._warm else self._start_conversation()
            conversation.begun = time.monotonic()
            self._live.add(conversation)
            if conversation in self._kept:
                self._handle_answer(self._kept.pop(conversation))
        while self._waiting and len(self._warm) < self.rules.agent.warm:
            self._warm.append(self._start_conversation())

    def _room(self) -> float:
        most = self.rules.concurrency
        return float("inf") if most is None else most - len(self._live)

    def _start_conversation(self) -> Conversation:
        """Create the conversation of the next task, and start to create its environment."""
        task = self._waiting.popleft()
        conversation = Conversation(task, self.rules.chat(task.item), time.monotonic())
        self._call(conversation, "reset", lambda: self._reset(conversation))
        return conversation

    def _call(self, conversation: Conversation, kind: str, function: Callable[[], Any]) -> None:
        agent = self.rules.agent
        left = self._left_s(conversation) if kind != "close" else agent.deadline_s
        self.calls.begin(Call(conversation, kind), function, min(agent.deadline_s, left))

    def _left_s(self, conversation: Conversation) -> float:
        """The seconds that a conversation may still last."""
        most = self.rules.agent.conversation_s
        return float("inf") if most is None else max(conversation.begun + most - time.monotonic(), 0.0)

    async def _reset(self, conversation: Conversation) -> object:
        """Create the environment, and begin; in the event loop."""
        agent, task = self.rules.agent, conversation.task
        if not agent.shared:
            conversation.environment = agent.make(self.rules.reads, task.item)
            return await conversation.environment.reset()
        group = task.request.id.rpartition(".")[0]
        shared = self._groups.setdefault(group, _GroupEnvironment(self.rules.group_size))
        shared.environment = shared.environment or agent.make(self.rules.reads, task.item)
        conversation.environment = shared.environment
        return await conversation.environment.reset(task.member)  # type: ignore[call-arg] # a shared environment accepts it

    async def _close(self, conversation: Conversation) -> None:
        """Close the environment of a conversation, or of a group with its last one; in the event loop."""
        if self.rules.agent.shared:
            name = conversation.task.request.id.rpartition(".")[0]
            group = self._groups[name]
            group.left -= 1
            if group.left:
                return
            conversation.environment = self._groups.pop(name).environment
        if conversation.environment is not None:
            await conversation.environment.close()

    def _handle_answer(self, call: Call) -> None:
        """Continue a conversation whose environment has answered."""
        conversation: Conversation = call.owner
        if call.kind == "close":
            self._live.discard(conversation)
            self.seconds["close_errors"] += call.failed is not None
            if call.failed:
                log.warning("an environment was not closed: %s", call.reason)
            return
        if conversation in self._warm:
            self._kept[conversation] = call
            return
        self.seconds["reply_s"] += call.seconds
        if call.failed is not None:
            limit = call.failed == "timeouts" and self._left_s(conversation) == 0.0
            self._fail(conversation, "limit_seconds" if limit else call.failed, call.reason)
            return
        try:
            if call.kind == "reset":
                self._submit_first_turn(conversation, call.value)
            else:
                self._submit_next_turn(conversation, call.value, last=call.kind == "truncated")
        except _CannotGoOn as wrong:
            self._fail(conversation, wrong.kind, str(wrong))

    def _submit_first_turn(self, conversation: Conversation, messages: object) -> None:
        """Submit the first turn, after the messages that `reset` returned."""
        images = json.loads(str(conversation.task.item.get("prompt_images", "[]")))
        if messages is not None:
            checked = self._checked_messages("reset", messages)
            given, images = [message.as_dict() for message in checked], self._images_of(checked)
            if given[-1]["role"] == "assistant":
                raise _CannotGoOn("errors", "reset returned messages that end with one of the assistant; the model writes what follows")
            system = [m for m in conversation.chat.messages[:1] if m["role"] == "system" and given[0]["role"] != "system"]
            conversation.chat = replace(conversation.chat, messages=[*system, *given], continue_final=False)
        try:
            prompt = self.template.prompt(conversation.chat)
        except Exception as error:  # noqa: BLE001 (a template may raise anything)
            raise _CannotGoOn("template_errors", f"the chat template refuses the messages: {error!s:.200}") from None
        if len(images) > (self.rules.images or 0):
            raise _CannotGoOn("overlong_prompts", f"the prompt has {len(images)} images, and the generator reads {self.rules.images}")
        prompt, conversation.places = self._expand(prompt, images)
        conversation.prompt, conversation.images = prompt[-self.rules.most_prompt :], images
        if len(prompt) > self.rules.most_prompt and (images or not self.rules.cut_prompts):
            raise _CannotGoOn("overlong_prompts", f"the prompt has {len(prompt)} tokens, and there is room for {self.rules.most_prompt}")
        self._submit(conversation)

    def _submit(self, conversation: Conversation) -> None:
        request = conversation.next_request(self.template.close, self.rules.agent.turn_tokens)
        self._open[request.id] = conversation
        self.context.engine.submit(request)

    def _pass_turn(self, conversation: Conversation, tokens: Sequence[int]) -> None:
        """Pass a turn of the model to its environment."""
        if not tokens or conversation.finish == "abort":
            self._end(conversation)
            return
        conversation.said = said = self._read_turn(conversation, tokens)
        if conversation.finish == "length" and not conversation.room:
            self._cut_off(conversation, "limit_tokens", "length")
            return
        conversation.counts["cut_turns"] += conversation.finish == "length"
        conversation.counts["malformed_calls"] += sum(bool(call.error) for call in said.tool_calls)
        if conversation.turn >= self.rules.max_turns and not self.rules.rewarded:
            conversation.counts["limit_turns"] += bool(said.tool_calls)
            self._end(conversation, "turns" if said.tool_calls else "stop")
            return
        environment = conversation.environment
        assert environment is not None
        self._call(conversation, "step", lambda: environment.step(said, *self._member(conversation)))

    def _read_turn(self, conversation: Conversation, tokens: Sequence[int]) -> Message:
        """Parse a turn of the model: its text, its thinking and its tool calls."""
        reasoning, content = self.template.thinking(self.template.content(tokens))
        form, tools = self.rules.form, conversation.chat.tools
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
        return Message("assistant", content, reasoning, calls_of(content, form, schemas) if form is not None else ())

    def _member(self, conversation: Conversation) -> tuple[int, ...]:
        return (conversation.task.member,) if self.rules.agent.shared else ()

    def _cut_off(self, conversation: Conversation, limit: str, finish: Finish) -> None:
        """End a conversation at a limit. An environment with `truncated` scores it first."""
        conversation.counts[limit] += 1
        conversation.finish = finish
        score = self.rules.agent.scores_cut_off(conversation.environment)
        if score is None or not self.rules.rewarded:
            self._end(conversation)
        else:
            self._call(conversation, "truncated", lambda: score(conversation.said, *self._member(conversation)))

    def _submit_next_turn(self, conversation: Conversation, turn: object, last: bool = False) -> None:
        """Submit the next turn, after the environment's answer; none after the `last`."""
        if not isinstance(turn, Turn):
            raise _CannotGoOn("errors", f"{'truncated' if last else 'step'} returned a {type(turn).__name__}; it returns an rg.agents.Turn")
        conversation.add_reward(turn.reward)
        for name, value in turn.info.items():
            conversation.counts[f"info/{name}"] += value
        conversation.counts["cost"] += turn.cost
        if last or turn.done:
            self._end(conversation, None if last else "stop")
            return
        if conversation.counts["cost"] >= (self.rules.agent.most_cost or float("inf")):
            self._cut_off(conversation, "limit_cost", "turns")
            return
        messages = self._truncate_messages(conversation, self._checked_messages("step", turn.messages))
        if conversation.turn >= self.rules.max_turns:
            self._cut_off(conversation, "limit_turns", "turns")
            return
        if self._left_s(conversation) == 0.0:
            raise _CannotGoOn("limit_seconds", "the conversation took longer than its conversation_s")
        images = self._images_of(messages)
        if len(conversation.images) + len(images) > (self.rules.images or 0):
            self._cut_off(conversation, "limit_images", "length")
            return
        self._tell(conversation, [message.as_dict() for message in messages], images)

    def _images_of(self, messages: Sequence[Message]) -> list[str]:
        """List the images of messages. Raises GraphError if the generator reads none."""
        shown = next((message for message in messages if message.images), None)
        if shown is not None and self.rules.images is None:
            where = f"the tool '{shown.name}'" if shown.name else f"the environment, as '{shown.role}',"
            raise GraphError(f"{where} answered with an image; set Generator(images=) to the most images of a conversation")
        return [url for message in messages for url in message.images]

    def _expand(self, tokens: list[int], images: list[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Write the tokens of images in the places of their marks, and tell where; see `expand_images`."""
        if self.rules.images is None:
            return tokens, []
        try:
            return expand_images(self.template.path, tokens, json.dumps(images))
        except DataError as error:
            raise _CannotGoOn("template_errors", str(error)) from None

    def _tell(self, conversation: Conversation, answers: list[dict[str, Any]], images: list[str]) -> None:
        assert conversation.said is not None
        self._check_roles(conversation.chat, answers)
        said = conversation.said.as_dict()
        try:
            tokens = self.template.between(conversation.chat, said, answers, conversation.tokens[-1])
        except DataError as error:
            raise _CannotGoOn("template_errors", str(error)) from None
        conversation.chat = replace(conversation.chat, messages=[*conversation.chat.messages, said, *answers], continue_final=False)
        tokens, places = self._expand(tokens, images)
        full = len(tokens) >= conversation.room
        conversation.append_input(tokens, images, places)
        if full:
            self._cut_off(conversation, "limit_tokens", "length")
        else:
            self._submit(conversation)

    def _check_roles(self, chat: ChatPrompt, answers: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError for the first message of a role after which the template changes earlier turns."""
        for role in {answer["role"] for answer in answers} - self._checked:
            self.template.check(chat, probe_answer(role, chat.tools), self.rules.agent.keep_thinking)
            self._checked.add(role)

    def _checked_messages(self, what: str, messages: object) -> Sequence[Message]:
        if not isinstance(messages, list | tuple) or not all(isinstance(message, Message) for message in messages):
            raise _CannotGoOn("errors", f"{what} returned a {type(messages).__name__} where a list of rg.agents.Message is due")
        if not messages or len(messages) > MOST_MESSAGES:
            raise _CannotGoOn("errors", f"{what} returned {len(messages)} messages; a conversation continues with 1 to {MOST_MESSAGES}")
        return messages

    def _truncate_messages(self, conversation: Conversation, messages: Sequence[Message]) -> Sequence[Message]:
        """Cut off characters beyond the limit of a turn."""
        room, kept = self.rules.agent.output_characters, []
        for message in messages:
            gone = len(message.content) - room
            if gone > 0:
                conversation.counts["cut_messages"] += 1
                text = message.content[:room]
                shown = message.images[: text.count(MARK)]
                message = replace(message, content=f"{text}… ({gone} more characters)", images=shown)
            kept.append(message)
            room = max(room - len(message.content), 0)
        return kept

    def _fail(self, conversation: Conversation, kind: str, reason: str) -> None:
        conversation.counts[kind] += 1
        log.warning("a conversation has ended (%s): %s", kind, reason)
        self._end(conversation, "abort")

    def _end(self, conversation: Conversation, finish: Any = None) -> None:
        """End a conversation. Its place is free once its environment has closed."""
        conversation.ended, conversation.finish = True, finish or conversation.finish
        conversation.prompt = conversation.prompt or [self.template.close]  # for one that never began: a prompt needs a token
        self.context.engine.end_conversations([conversation.task.request.id])
        self._done[conversation.task.request.id] = conversation.response()
        self._call(conversation, "close", lambda: self._close(conversation))


def _drain(loop: "weakref.ref[TurnLoop]") -> None:
    """Let environments close when the process ends."""
    found = loop()
    if found is not None:
        found.drain()


class _CannotGoOn(RlgraphError):
    """A conversation cannot continue; `kind` names its metric."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind
