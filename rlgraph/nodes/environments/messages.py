"""The values that a conversation is made of: messages, calls of tools, and what an environment answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlgraph import settings
from rlgraph.settings import AtLeastZero, Finite, Name


def whole_text(text: str) -> str:
    """Replace lone surrogates, which no tokenizer encodes, with U+FFFD: JSON and file names of outside may hold them.

    >>> whole_text("a" + chr(0xD83D)) == "a" + chr(0xFFFD)
    True
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def whole_value(value: Any) -> Any:
    """Replace lone surrogates in the texts of a value of JSON. Raises ValueError for NaN and infinity, which JSON does not have."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if isinstance(value, Mapping):
        return {whole_value(key): whole_value(entry) for key, entry in value.items()}
    return [whole_value(entry) for entry in value] if isinstance(value, list) else value


@settings.refuse_unknown
@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a turn of the model. `error` says why it cannot be made, if the model wrote it wrongly.

    >>> ToolCall("add", {"a": 1, "b": 2}).arguments["b"]
    2
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def __post_init__(self) -> None:
        settings.check(self)


@settings.refuse_unknown
@dataclass(frozen=True)
class Message:
    """A message of a conversation, as chat templates read it.

    >>> Message("user", "1 + 1 =").as_dict()
    {'role': 'user', 'content': '1 + 1 ='}

    In what the model has said, `content` is the text without its end-of-turn token and its thinking; that is `reasoning`, and
    `tool_calls` are the calls in the text. The answer of a tool has the role "tool", and may tell the tool's `name` and the
    `tool_call_id`. Lone surrogates become U+FFFD.

    Raises GraphError for a role or a content that is no text.
    """

    role: Name
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""

    def __post_init__(self) -> None:
        settings.check(self)
        for name in ("content", "reasoning", "name", "tool_call_id"):
            object.__setattr__(self, name, whole_text(getattr(self, name)))

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Message":
        """Make a message of a mapping, as data sets have it."""
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = tuple(ToolCall(function["name"], function.get("arguments") or {}) for function in functions)
        others = {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)}
        return cls(message["role"], message.get("content") or "", str(message.get("reasoning_content") or ""), calls, **others)

    def as_dict(self) -> dict[str, Any]:
        """Make the mapping that a chat template reads. Calls that were written wrongly have no arguments in it."""
        made: dict[str, Any] = {"role": self.role, "content": self.content}
        made |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        if self.tool_calls:
            calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in self.tool_calls]
            made["tool_calls"] = [{"id": call_id(place), "type": "function", "function": call} for place, call in enumerate(calls)]
        return made | {key: value for key, value in (("name", self.name), ("tool_call_id", self.tool_call_id)) if value}


@settings.refuse_unknown
@dataclass(frozen=True)
class Turn:
    """The answer of an environment to a turn of the model.

    >>> Turn([Message("user", "Too low.")], reward=-0.1).done
    False

    The model reads `messages` next, unless the conversation is `done`. `reward` is for the turn that is answered. `info` holds numbers
    for the metrics: they are summed over a conversation, and averaged over conversations. `cost` is the cost of the answer, in a unit
    of your own: see `rg.Agent(most_cost=…)`.

    Raises GraphError for a reward that is no finite number, and for messages that are none.
    """

    messages: Sequence[Message] = ()
    reward: Finite = 0.0
    done: bool = False
    info: Mapping[str, Finite] = field(default_factory=dict)
    cost: AtLeastZero = 0.0

    def __post_init__(self) -> None:
        settings.check(self)


def call_id(place: int) -> str:
    """Make the id of the call at a place of its turn: nine letters and digits, as Mistral's template wants it."""
    return f"call{place:05d}"
