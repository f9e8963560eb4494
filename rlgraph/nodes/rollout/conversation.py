"""Conversations: responses of several turns, the common part of their loops, their checks and their metrics."""

import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlgraph.columns import Columns
from rlgraph.engines.api import Finish, Images, Request, Response
from rlgraph.engines.hf.chat_template import ChatPrompt, TurnTemplate, reads
from rlgraph.engines.registry import vllm_calls
from rlgraph.errors import GraphError, show_value
from rlgraph.nodes.environments.agent import Agent, Environment
from rlgraph.nodes.environments.messages import FORMATS, CallFormat, Message, ToolCall, call_id, calls_of
from rlgraph.nodes.environments.program import Program
from rlgraph.nodes.environments.tools import Tools
from rlgraph.nodes.rollout.decode_loop import Outcome, Task

# One response of several turns: its messages, its tokens, and which tokens the model wrote.

NEXT_TURN = 7_368_787  # added to the seed for each turn


@dataclass(eq=False)
class Conversation:
    """A conversation so far. `written` marks the tokens that the model sampled; it read the others between its turns.

    `rewards` maps the place of a turn's last token to its reward, and `counts` are added to the metrics. `images` are data URLs, and
    `places` tell where in the prompt and all turns their tokens begin and end.
    """

    task: Task
    chat: ChatPrompt
    begun: float
    prompt: Sequence[int] = ()
    environment: Environment | None = None
    said: Message | None = None
    turn: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    finish: Finish = "stop"
    ended: bool = False
    images: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def room(self) -> int:
        """How many tokens the response may still receive, including tokens of answers."""
        return self.task.request.sampling.max_tokens - len(self.tokens)

    def next_request(self, close: int, most: int | None = None) -> Request:
        """Build the request of the current turn: the prompt and all turns so far.

        A turn ends at the template's token `close`, and has at most `most` tokens.
        """
        return Request(
            f"{self.task.request.id}/{self.turn}",
            [*self.prompt, *self.tokens],
            self.task.request.sampling.of_turn(self.room if most is None else min(self.room, most), close),
            (self.task.request.seed + NEXT_TURN * self.turn) % 2**31,
            self.task.request.id,
            self.images_so_far if self.images else None,
        )

    @property
    def images_so_far(self) -> Images:
        """The images so far, of the prompt and of all turns."""
        return Images(json.dumps(self.images), list(self.places))

    def append_turn(self, response: Response) -> None:
        """Append a turn of the model."""
        self.tokens += response.tokens
        self.log_probs += response.log_probs
        self.versions += response.versions
        self.written += [True] * len(response.tokens)
        self.finish = response.finish
        self.turn += 1

    def add_reward(self, reward: float) -> None:
        """Add a reward for the last turn of the model: at its last token."""
        place = len(self.written) - 1 - self.written[::-1].index(True)
        self.rewards[place] = self.rewards.get(place, 0.0) + reward

    def append_input(self, tokens: Sequence[int], images: Sequence[str] = (), places: Sequence[tuple[int, int]] = ()) -> None:
        """Append tokens that the model reads, with their images. They are not trained on, since the policy did not write them.

        What there is no room for is left out: tokens, and of an image all.
        """
        cut = [begin for begin, end in places if end > self.room]
        said = list(tokens)[: min([self.room, *cut])]
        before = len(self.prompt) + len(self.tokens)
        self.places += [(before + begin, before + end) for begin, end in places[: len(places) - len(cut)]]
        self.images += images[: len(places) - len(cut)]
        self.tokens += said
        self.log_probs += [0.0] * len(said)
        self.versions += [self.versions[-1] if self.versions else 0] * len(said)
        self.written += [False] * len(said)

    def response(self) -> Outcome:
        """The response as a rollout writes it."""
        counts = {
            "turns": self.turn,
            "seconds": time.monotonic() - self.begun,
            "tokens": len(self.written) - sum(self.written),
            **self.counts,
        }
        response = Response(self.tokens, self.log_probs, self.versions, self.finish)
        return Outcome(self.prompt, response, self.written, self.rewards, counts, images=self.images_so_far)


# The common part of loops that sample conversations.


class ConversationLoop(ABC):
    """Samples conversations; a decoder of `DecodeLoop`.

    `seconds` has the times of `reply` and `idle`, and the errors of `close`, since they were last read. `counted` names its further counts.
    """

    counted: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Queue a task."""

    @abstractmethod
    def step(self) -> Mapping[str, Outcome]:
        """Decode one step, or wait a while if nothing can decode; return the responses that have ended, by request id."""

    @abstractmethod
    def close(self) -> None:
        """End all conversations after the rollout has failed."""


# Check before anything starts that the model's template renders conversations as they will be assembled.


def chats_of(columns: Columns, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Make the conversations of prompts, as JSON. Text becomes a message of the user; prompts without tools receive `tools`."""
    if "prompt_messages" in columns:
        chats = [ChatPrompt.from_json(str(text)) for text in columns["prompt_messages"]]
    else:
        chats = [ChatPrompt([{"role": "user", "content": str(text)}]) for text in columns["prompt_texts"]]
    described = list(tools) if tools and reads(tokenizer.chat_template, "tools") else []
    return [ChatPrompt(c.messages, c.tools or described, c.template_kwargs, c.continue_final).to_json() for c in chats]


def probe_answer(role: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a message of a role, to test a template."""
    if role != "tool":
        return {"role": role, "content": "No."}
    return {"role": role, "content": "4", "name": tools[0]["function"]["name"] if tools else "tool", "tool_call_id": call_id(0)}


def form_of(agent: Agent | Program, tokenizer: Any) -> CallFormat | None:
    """Look up the format of tool calls."""
    if not isinstance(agent.calls, str):
        return agent.calls
    if agent.calls in FORMATS:
        return FORMATS[agent.calls]
    parsed = vllm_calls(agent.calls.removeprefix("vllm:"), tokenizer)
    return lambda text, schemas: [ToolCall(name, json.loads(arguments)) for name, arguments in parsed(text, schemas)]


def check_turns(template: TurnTemplate, chat: ChatPrompt, agent: Agent, tools: Tools | None) -> None:
    """Check that the template renders the turns of an agent or tools as they will be assembled, and calls in their format.

    Raises DataError with the first difference, and GraphError if the template does not write calls in this format.
    """
    if tools is None:
        template.check(chat, probe_answer("user", ()), agent.keep_thinking)
        return
    written = template.check(chat, probe_answer("tool", chat.tools), agent.keep_thinking)
    form = form_of(agent, template.tokenizer)
    name = chat.tools[0]["function"]["name"] if chat.tools else "tool"
    if form is not None and name in written and name not in [call.name for call in calls_of(written, form, {})]:
        raise GraphError(
            f"the chat template of '{template.path}' writes calls of tools as {show_value(template.thinking(written)[1])}, in which "
            f"Tools(calls={show_value(agent.calls)}) finds no calls: pass the model's format, one of {sorted(FORMATS)}, or a custom "
            "function"
        )


# The metrics of a batch of conversations: turns, calls, and how often each limit was hit.

LIMITS = (
    *("limit_tokens", "limit_turns", "limit_seconds", "limit_cost", "limit_images"),
    *("overlong_prompts", "cut_turns", "cut_messages", "malformed_calls"),
)
FAILURES = ("errors", "timeouts", "blocked", "template_errors")
TOOL_COUNTS = ("calls", "failures")  # of tool calls


def turn_metrics(
    sampled: Sequence[Outcome], seconds: MutableMapping[str, float], of_tools: bool, share: int, more: Sequence[str] = ()
) -> dict[str, float]:
    """Compute the metrics of conversations, and clear `seconds`, the loop's times since the last batch. `more` names further counts.

    Metrics are averaged over ranks and chunks of a batch: a count is reported `share` times, so that the average is the total.
    """
    rows = max(len(sampled), 1)
    totals: dict[str, float] = defaultdict(float)
    for one in sampled:
        for name, value in one.counts.items():
            totals[name] += value
    counted = (*LIMITS, *FAILURES, "tokens", "cost", *more)
    found = {name: float(totals[name]) * share for name in counted}
    found |= {name: seconds.get(name, 0.0) * share for name in ("close_errors", "reply_s")}
    found |= {"idle_s": seconds.get("idle_s", 0.0), "turns_mean": totals["turns"] / rows}
    found |= _quantiles("turns", [one.counts["turns"] for one in sampled])
    found |= _quantiles("seconds", [one.counts["seconds"] for one in sampled])
    seconds.clear()
    infos = {name: value for name, value in totals.items() if name.startswith("info/")}
    if of_tools:
        found |= {name: float(totals[f"info/{name}"]) * share for name in TOOL_COUNTS}
        return {f"tools/{name}": value for name, value in found.items()}
    metrics = {f"agent/{name}": value for name, value in (found | {name: value / rows for name, value in infos.items()}).items()}
    return metrics | _spread([sum(one.rewards.values()) for one in sampled])


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median, the 90th and 99th percentiles and the maximum, without interpolation."""
    ordered = sorted(values) or [0.0]
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {f"{name}/{key}": float(ordered[min(int(share * len(ordered)), len(ordered) - 1)]) for key, share in places.items()}


def _spread(rewards: Sequence[float]) -> dict[str, float]:
    if not rewards:
        return {}
    spread = {"mean": sum(rewards) / len(rewards), "max": max(rewards), "min": min(rewards)}
    return {f"critic/rewards/{name}": value for name, value in spread.items()}
