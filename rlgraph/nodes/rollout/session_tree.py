"""The calls of one session as a tree of histories, and the sequences to train on.

If a call's messages begin with the history of an earlier call, including its answer, it continues this call: its tokens follow the tokens
that were read and sampled before. Any other call begins a new branch. Each leaf is a sequence; tokens that branches share are trained on
in only one of them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlgraph.engines.api import Finish, Response
from rlgraph.engines.hf.chat_template import ChatPrompt


@dataclass(eq=False)
class ModelCall:
    """A call of the model: `chat` before its answer `said`, the tokens `read` since the previous call, and the response.

    `prompt` has the tokens before the first answer of its branch.
    """

    parent: "ModelCall | None"
    chat: ChatPrompt
    said: Mapping[str, Any]
    prompt: Sequence[int]
    read: Sequence[int]
    response: Response
    finish: Finish = "stop"

    @cached_property
    def tokens(self) -> list[int]:
        """All tokens of its branch so far, without the prompt."""
        before = self.parent.tokens if self.parent is not None else []
        return [*before, *self.read, *self.response.tokens]

    @property
    def path(self) -> list["ModelCall"]:
        """The calls of its branch, in order."""
        return [*(self.parent.path if self.parent is not None else ()), self]

    @cached_property
    def sampled_tokens(self) -> int:
        """How many tokens of its branch the model wrote."""
        return len(self.response.tokens) + (self.parent.sampled_tokens if self.parent is not None else 0)

    @property
    def order(self) -> tuple[int, list[int], list[int]]:
        """The sort key among the calls of its session, independent of their arrival: most sampled tokens first."""
        return -self.sampled_tokens, list(self.prompt), self.tokens


@dataclass(frozen=True)
class SampledSequence:
    """A branch to train on: `written` marks the tokens that the model sampled and that no earlier sequence has."""

    prompt: Sequence[int]
    response: Response
    written: Sequence[bool]


class SessionTree:
    """The calls of a session."""

    def __init__(self) -> None:
        self._calls: dict[str, list[ModelCall]] = {}  # by their history, including the answer

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def add(self, call: ModelCall) -> None:
        self._calls.setdefault(_key(call.chat, [*call.chat.messages, call.said]), []).append(call)

    def find_call(self, chat: ChatPrompt) -> ModelCall | None:
        """Find the call whose history, including its answer, these messages continue; None if there is none."""
        last = next((place for place in range(len(chat.messages) - 1, -1, -1) if chat.messages[place]["role"] == "assistant"), None)
        if last is None:
            return None
        found = self._calls.get(_key(chat, chat.messages[: last + 1]), ())
        return min(found, key=lambda call: call.order, default=None)

    def sequences(self) -> list[SampledSequence]:
        """List the branches, most sampled tokens first. A token of several branches is trained on in the first."""
        calls = [call for several in self._calls.values() for call in several]
        inner = {id(call.parent) for call in calls}
        leaves = sorted((call for call in calls if id(call) not in inner), key=lambda call: call.order)
        taken: set[int] = set()
        return [_sequence(leaf, taken) for leaf in leaves]


def _sequence(leaf: ModelCall, taken: set[int]) -> SampledSequence:
    tokens, log_probs, versions, written = [], [], [], []  # type: list[int], list[float], list[int], list[bool]
    for call in leaf.path:
        wrote, new = call.response, id(call) not in taken
        taken.add(id(call))
        begun = versions[-1] if versions else wrote.versions[0]
        tokens += [*call.read, *wrote.tokens]
        log_probs += [*[0.0] * len(call.read), *(wrote.log_probs if new else [0.0] * len(wrote.tokens))]
        versions += [*[begun] * len(call.read), *wrote.versions]
        written += [*[False] * len(call.read), *[new] * len(wrote.tokens)]
    return SampledSequence(leaf.prompt, Response(tokens, log_probs, versions, leaf.finish), written)


def _key(chat: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
    """Encode a history such that two are equal if a client may send one for the other."""
    return json.dumps([list(chat.tools), chat.template_kwargs, [_plain(message) for message in messages]], sort_keys=True)


def _plain(message: Mapping[str, Any]) -> list[Any]:
    """The relevant part of a message: clients choose call ids, leave out thinking, and write empty content in several ways."""
    calls = [[call["function"]["name"], call["function"].get("arguments") or {}] for call in message.get("tool_calls") or ()]
    return [message["role"], (message.get("content") or "").strip(), calls]
