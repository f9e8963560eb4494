"""Sessions of agent programs: each calls the model through an endpoint, and its calls become trained sequences.

The tasks of a session are its rows. The first task has its seed; when the program has ended, each task receives one of its sequences. Each
call of a program is placed into the tree of its earlier calls, so that sampled tokens stay as they were sampled.
"""

import hashlib
import logging
import queue
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from rlgraph.engines.api import Finish, Request, Response
from rlgraph.engines.hf.chat_template import ChatPrompt, TurnTemplate
from rlgraph.errors import DataError
from rlgraph.nodes.base import Context
from rlgraph.nodes.endpoint import ApiError, ChatRequest, Endpoint, Pending, Reply
from rlgraph.nodes.environments.calls import Call, EnvironmentCalls
from rlgraph.nodes.environments.messages import CallFormat, call_id, calls_of
from rlgraph.nodes.environments.program import AgentClient, Ended, Program
from rlgraph.nodes.rollout.conversation import ConversationLoop, probe_answer
from rlgraph.nodes.rollout.decode_loop import Outcome, Task
from rlgraph.nodes.rollout.session_tree import ModelCall, SessionTree
from rlgraph.values.sampling import Sampling

# The model's turn in a call of a program: text, thinking and tool calls, cut at the program's stop texts.

BLOCK = "<tool_call>"  # text before it is content; in other formats a turn with calls has no content
MOST_CALLS = 1000  # per turn: their ids start at this number times the number of earlier turns


@dataclass(frozen=True)
class Said:
    """A turn of the model: the `message` for templates, and the response to train on."""

    message: Mapping[str, Any]
    response: Response
    finish: str
    malformed: bool


def parse_turn(template: TurnTemplate, form: CallFormat | None, asked: ChatRequest, chat: ChatPrompt, response: Response) -> Said:
    """Parse the turn that follows a conversation. A turn with a malformed call stays plain text."""
    place = sum(message["role"] == "assistant" for message in chat.messages)
    response, stopped = _cut_at_stop(template, asked, response)
    text = template.content(response.tokens)
    if stopped:
        text = text[: _first(text, asked.stops)]
    reasoning, content = template.thinking(text)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in chat.tools}
    calls = calls_of(content, form, schemas) if form is not None and chat.tools else ()
    malformed = any(call.error for call in calls)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    finish = "length" if response.finish == "length" else "stop"
    if calls and not malformed:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        ids = [call_id((MOST_CALLS * place + at) % 100_000) for at in range(len(functions))]
        message["tool_calls"] = [{"id": name, "type": "function", "function": one} for name, one in zip(ids, functions, strict=True)]
        message["content"] = content.partition(BLOCK)[0].strip() if BLOCK in content else ""
        finish = "tool_calls"
    if reasoning:
        message["reasoning_content"] = reasoning
    return Said(message, response, finish, malformed)


def reply_of(name: str, template: TurnTemplate, asked: ChatRequest, said: Said, prompt: Sequence[int]) -> Reply:
    """Make the answer to a client."""
    message, wrote = said.message, said.response
    texts = [template.tokenizer.decode([token]) for token in wrote.tokens] if asked.logprobs else []
    reasoning, calls = message.get("reasoning_content", ""), message.get("tool_calls", ())
    return Reply(name, asked, message["content"], reasoning, calls, said.finish, prompt, wrote.tokens, wrote.log_probs, texts)


def _cut_at_stop(template: TurnTemplate, asked: ChatRequest, response: Response) -> tuple[Response, bool]:
    """Keep the tokens up to the one that completes a stop text of the program, and return whether there is one."""
    if _first(template.content(response.tokens), asked.stops) < 0:
        return response, False
    least, most = 1, len(response.tokens)
    while least < most:
        middle = (least + most) // 2
        found = _first(template.content(response.tokens[:middle]), asked.stops) >= 0
        least, most = (least, middle) if found else (middle + 1, most)
    cut = replace(response, tokens=response.tokens[:least], log_probs=response.log_probs[:least], versions=response.versions[:least])
    return replace(cut, finish="stop"), True


def _first(text: str, stops: Sequence[str]) -> int:
    """Find where the first of the texts begins; -1 if there is none."""
    return min((text.find(stop) for stop in stops if stop in text), default=-1)


WAIT_S = 0.1  # for a program, if nothing decodes
MOST_REFUSED = 100  # calls of a session; one more ends it
BYTES = 1 << 20  # of a request, in addition to its tokens' bytes
TOKEN_BYTES = 16
CLOSING_S = 2.0  # for programs to end after a run has failed
log = logging.getLogger("rlgraph.agents")


@dataclass(frozen=True)
class SessionRules:
    """The settings of a rollout for its sessions: `TurnRules` for programs. `describes` means that the template reads tools."""

    program: Program
    reads: Mapping[str, str]
    form: CallFormat | None
    describes: bool
    prefix: str
    sampling: Sampling
    max_turns: int
    concurrency: int | None
    most_prompt: int


@dataclass(eq=False)
class ProgramSession:
    """One run of a program, and the calls that it has made."""

    tasks: list[Task]
    key: str = ""
    begun: float = 0.0
    tree: SessionTree = field(default_factory=SessionTree)
    counts: dict[str, float] = field(default_factory=dict)
    asked: dict[bytes, int] = field(default_factory=dict)  # how often each prompt occurred, by its hash
    calls: int = 0
    waited_s: float = 0.0
    finish: Finish = "stop"
    ended: bool = False

    @property
    def name(self) -> str:
        return self.tasks[0].request.id

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + 1


@dataclass(frozen=True, eq=False)
class _Open:
    """A call whose answer decodes."""

    pending: Pending
    parent: ModelCall | None
    prompt: Sequence[int]
    read: Sequence[int]
    request: Request
    room: int
    begun: float


class SessionLoop(ConversationLoop):
    """Samples sessions of a program; a decoder of `DecodeLoop`."""

    counted: ClassVar[tuple[str, ...]] = (
        *("sequences", "dropped_sequences", "without_calls"),
        *("refused_calls", "abandoned_calls", "overridden_sampling"),
    )

    def __init__(self, rules: SessionRules, template: TurnTemplate, context: Context) -> None:
        super().__init__()
        self.rules, self.template, self.context = rules, template, context
        self._inbox: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        inbox = self._inbox  # without a reference to this loop, so that the endpoint ends with the loop
        self.calls = EnvironmentCalls(lambda: inbox.put(None))
        self._endpoint: Endpoint | None = None
        self._waiting: deque[ProgramSession] = deque()
        self._live: set[ProgramSession] = set()
        self._open: dict[str, _Open] = {}  # by the request that decodes
        self._done: dict[str, Outcome] = {}
        self._keeps: dict[str, bool] = {}  # by role: whether the template keeps earlier turns before such a message

    def submit(self, task: Task) -> None:
        if task.member % self.rules.program.sequences:
            self._waiting[-1].tasks.append(task)
        else:
            self._waiting.append(ProgramSession([task]))

    def step(self) -> Mapping[str, Outcome]:
        """Decode one step of the open calls. Waits for a program only if nothing can decode."""
        self._begin()
        self._receive()
        for call in self.calls.take_finished_calls(0.0):
            self._end_session(call)
        if self._open:
            for name, response in self.context.engine.step(self.rules.prefix).items():
                opened = self._open.pop(name, None)
                if opened is not None:  # None: another node's step completed it, and its client left before this one
                    self._answer(opened, response)
        done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """End all programs after the rollout has failed; wait a while for them."""
        self.context.engine.abort(list(self._open))
        self.calls.cancel(("session",))
        for session in list(self._live):
            self._end(session, Ended())
        end = time.monotonic() + CLOSING_S
        while len(self.calls) and time.monotonic() < end:
            self.calls.take_finished_calls(WAIT_S)
        self._waiting.clear()
        self._open.clear()
        self._done.clear()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _begin(self) -> None:
        """Begin sessions, in the order of their tasks, as long as there is room."""
        while self._waiting and (self.rules.concurrency is None or len(self._live) < self.rules.concurrency):
            session = self._waiting.popleft()
            if self._endpoint is None:
                self._endpoint = Endpoint(self._inbox.put, BYTES + TOKEN_BYTES * self.context.engine.context_length())
                weakref.finalize(self, self._endpoint.close)
            session.key, session.begun = self._endpoint.open(session), time.monotonic()
            self._live.add(session)
            task, program = session.tasks[0], self.rules.program
            client = AgentClient(self._endpoint.base_url, session.key, task.request.seed)
            self.calls.begin(
                Call(session, "session"), partial(program.session, client, self.rules.reads, task.item), program.conversation_s
            )
        self.calls.send()

    def _receive(self) -> None:
        """Handle the calls that have arrived; wait for one if nothing decodes."""
        found: list[Pending | None] = []
        if not self._open and not self._done:
            begun = time.monotonic()
            with self.context.waiting(), suppress(queue.Empty):
                found.append(self._inbox.get(timeout=WAIT_S))
            self.seconds["idle_s"] += time.monotonic() - begun
        with suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        for pending in found:
            if pending is not None:
                self._submit_call(pending)

    def _submit_call(self, pending: Pending) -> None:
        """Submit a call of a session to the engine, or refuse it."""
        session: ProgramSession = pending.session
        if pending.gone:
            self._abandon(session, lambda one: one.pending is pending)
            return
        try:
            self._submit(session, pending)
        except ApiError as error:
            session.count("refused_calls")
            pending.refuse(error)
            if session.counts["refused_calls"] > MOST_REFUSED and not session.ended:
                self._fail(session, "errors", f"the program made {MOST_REFUSED} calls that were refused; the last: {error}")

    def _submit(self, session: ProgramSession, pending: Pending) -> None:
        if session.ended:
            raise ApiError(401, "this session has ended", "invalid_api_key", "authentication_error")
        if session.calls >= self.rules.max_turns:
            session.finish = "turns"
            session.counts["limit_turns"] = 1.0
            raise ApiError(400, f"a session has at most {self.rules.max_turns} calls (max_turns)", "max_turns")
        asked = pending.chat.request
        parent, prompt, read = self._find_branch(session, pending)
        room = self.rules.sampling.max_tokens - (len(parent.tokens) if parent is not None else 0) - len(read)
        if room < 1:
            session.finish = "length"
            session.counts["limit_tokens"] = 1.0
            raise ApiError(400, f"the sequence has its {self.rules.sampling.max_tokens} tokens (max_tokens)", "context_length_exceeded")
        tokens = [*prompt, *(parent.tokens if parent is not None else ()), *read]
        sampling = self.rules.sampling.of_turn(min(room, asked.most or room), self.template.close)
        request = Request(f"{session.name}/{session.calls}", tokens, sampling, self._seed(session, tokens), session.name)
        session.calls += 1
        if asked.overrides:
            session.count("overridden_sampling")
        self._open[request.id] = _Open(pending, parent, prompt, read, request, room, time.monotonic())
        self.context.engine.submit(request)

    def _seed(self, session: ProgramSession, tokens: Sequence[int]) -> int:
        """Derive a seed from the session's seed, the prompt, and how often it occurred before: calls may arrive in any order."""
        digest = hashlib.blake2b(struct.pack(f"={len(tokens)}q", *tokens), digest_size=8).digest()
        times = session.asked[digest] = session.asked.get(digest, -1) + 1
        return (session.tasks[0].request.seed + int.from_bytes(digest, "big") + 65_537 * times) % 2**31

    def _find_branch(self, session: ProgramSession, pending: Pending) -> tuple[ModelCall | None, Sequence[int], Sequence[int]]:
        """Find the call that a call continues, the prompt of its branch, and the tokens read between; otherwise render the whole call."""
        chat = pending.chat.prompt
        if not self.rules.describes:
            chat = replace(chat, tools=())
        parent = session.tree.find_call(chat)
        try:
            if parent is not None:
                answers = list(chat.messages[len(parent.chat.messages) + 1 :])
                if self._keeps_turns(parent, answers):
                    return parent, parent.prompt, self.template.between(parent.chat, parent.said, answers, parent.tokens[-1])
            prompt = self.template.prompt(chat)
        except Exception as error:  # noqa: BLE001 (a template may raise anything for a program's messages)
            session.count("template_errors")
            raise ApiError(400, f"the chat template refuses the messages: {error!s:.300}", "invalid_messages") from None
        if len(prompt) > self.rules.most_prompt:
            session.count("overlong_prompts")
            message = f"the messages have {len(prompt)} tokens, and there is room for {self.rules.most_prompt}"
            raise ApiError(400, message, "context_length_exceeded")
        return None, prompt, []

    def _keeps_turns(self, parent: ModelCall, answers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template keeps the turns before these messages as they were written."""
        for role in {answer["role"] for answer in answers} - self._keeps.keys():
            try:
                self.template.check(parent.chat, probe_answer(role, parent.chat.tools), self.rules.program.keep_thinking)
                self._keeps[role] = True
            except DataError as error:
                log.warning("each call after a message of role '%s' begins a sequence: %s", role, error)
                self._keeps[role] = False
        return all(self._keeps[answer["role"]] for answer in answers)

    def _answer(self, call: _Open, response: Response) -> None:
        """Answer a call with the model's turn, and add it to the tree of its session."""
        session: ProgramSession = call.pending.session
        asked, chat = call.pending.chat.request, call.pending.chat.prompt
        session.waited_s += time.monotonic() - call.begun
        said: Said = parse_turn(self.template, self.rules.form, asked, chat, response)
        if said.malformed:
            session.count("malformed_calls")
        finish: Finish = "length" if said.finish == "length" and len(said.response.tokens) >= call.room else "stop"
        if finish == "length":
            session.counts["limit_tokens"] = 1.0
        if said.response.tokens:
            known = chat if self.rules.describes else replace(chat, tools=())
            session.tree.add(ModelCall(call.parent, known, said.message, call.prompt, call.read, said.response, finish))
        call.pending.answer(reply_of(f"chatcmpl-{call.request.id}", self.template, asked, said, call.request.prompt))

    def _end_session(self, call: Call) -> None:
        """End the session of a program that has ended."""
        session: ProgramSession = call.owner
        if session.ended:
            return
        self.seconds["reply_s"] += max(call.seconds - session.waited_s, 0.0)
        if call.failed is None:
            self._end(session, call.value)
        elif call.failed == "timeouts":
            self._fail(session, "limit_seconds", f"the program took longer than {self.rules.program.conversation_s:g} s")
        else:
            self._fail(session, call.failed, call.reason)

    def _fail(self, session: ProgramSession, kind: str, reason: str) -> None:
        session.count(kind)
        log.warning("a session has ended (%s): %s", kind, reason)
        session.finish = "abort"
        self._end(session, Ended())

    def _abandon(self, session: ProgramSession, which: Callable[[_Open], bool]) -> None:
        """Drop calls for which no client waits; their tokens are not trained on."""
        gone = [name for name, one in self._open.items() if one.pending.session is session and which(one)]
        if gone:
            self.context.engine.abort(gone)
        for name in gone:
            self._open.pop(name).pending.refuse(ApiError(401, "this session has ended", "invalid_api_key", "authentication_error"))
            session.count("abandoned_calls")

    def _end(self, session: ProgramSession, ended: Ended) -> None:
        """End a session: refuse its key from now on, and complete its rows."""
        session.ended = True
        self._live.discard(session)
        assert self._endpoint is not None
        self._endpoint.revoke(session.key)
        self._abandon(session, lambda one: True)
        self.context.engine.end_conversations([session.name])
        found = session.tree.sequences()
        session.counts |= {"tokens": float(sum(len(one.written) - sum(one.written) for one in found[: len(session.tasks)]))}
        session.counts |= {"sequences": float(len(found)), "dropped_sequences": float(max(len(found) - len(session.tasks), 0))}
        session.counts |= {"without_calls": float(not found)}
        seconds = time.monotonic() - session.begun
        for place, task in enumerate(session.tasks):
            counts = {"turns": float(session.calls), "seconds": seconds, **(session.counts if place == 0 else {})}
            sampled = found[place] if place < len(found) else None
            response = sampled.response if sampled is not None else Response([], [], [])
            response = replace(response, finish=session.finish if session.finish != "stop" else response.finish)
            written = sampled.written if sampled is not None else []
            last = max((at for at, own in enumerate(written) if own), default=0)
            prompt = sampled.prompt if sampled is not None else [self.template.close]  # a prompt needs a token
            self._done[task.request.id] = Outcome(prompt, response, written, {last: ended.reward}, counts, ended.output)
