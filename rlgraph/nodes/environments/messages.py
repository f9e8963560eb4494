"""The values of a conversation, and the formats in which models write tool calls."""

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rlgraph import settings
from rlgraph.data.images import MARK, data_url, parts_of, read_parts
from rlgraph.errors import DataError
from rlgraph.settings import AtLeastZero, Finite, Name


def whole_text(text: str) -> str:
    """Replace lone surrogates, which no tokenizer encodes, with U+FFFD: external JSON and file names may contain them.

    >>> whole_text("a" + chr(0xD83D)) == "a" + chr(0xFFFD)
    True
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def whole_value(value: Any) -> Any:
    """Replace lone surrogates in the texts of a JSON value. Raises ValueError for NaN and infinity, which JSON does not have."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number of JSON")
    if isinstance(value, Mapping):
        return {whole_value(key): whole_value(entry) for key, entry in value.items()}
    return [whole_value(entry) for entry in value] if isinstance(value, list) else value


@settings.refuse_unknown
@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a turn of the model.

    >>> ToolCall("add", {"a": 1, "b": 2}).arguments["b"]
    2

    * `name`: the tool's name.
    * `arguments`: its arguments by name.
    * `error`: the reason why a malformed call cannot be made; else empty.
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

    Lone surrogates become U+FFFD. Raises GraphError for a role or a content that is not text, and DataError for an image that cannot be
    read, or if the content has another number of marks `<image>`.

    * `role`: "system", "user", "assistant" or "tool".
    * `content`: the text, of a message of the model without its end-of-turn token and its thinking.
    * `reasoning`: the model's thinking.
    * `tool_calls`: the calls in the model's text.
    * `name`, `tool_call_id`: for the answer of a tool, the tool's name and the id of the call.
    * `images`: what rows of data may hold: images of PIL, paths, data URLs. Each has the place of an `<image>` in the content, or all
      come before it. They are kept as data URLs.
    """

    role: Name
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""
    images: Sequence[Any] = ()

    def __post_init__(self) -> None:
        settings.check(self)
        for name in ("content", "reasoning", "name", "tool_call_id"):  # at construction: a text that can be sent and written
            object.__setattr__(self, name, whole_text(getattr(self, name)))
        if not self.images:
            return
        where = f"the answer of the tool '{self.name}'" if self.name else f"a message of role '{self.role}'"
        text = self.content if MARK in self.content else MARK * len(self.images) + self.content
        if text.count(MARK) != len(self.images):
            raise DataError(f"{where} has {len(self.images)} images, and {text.count(MARK)} marks in its text; write one mark per image")
        urls = tuple(data_url(f"{where}: image {number}", image, Path.cwd()) for number, image in enumerate(self.images))
        object.__setattr__(self, "content", text)
        object.__setattr__(self, "images", urls)

    @classmethod
    def of(cls, message: Mapping[str, Any], images: Iterable[Any] = ()) -> "Message":
        """Make a message from a mapping, as in data sets. Parts that are images without data get the next of `images`."""
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = tuple(ToolCall(function["name"], function.get("arguments") or {}) for function in functions)
        others = {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)}
        text, own = read_parts(message.get("content")) or (message.get("content") or "", [])
        rest = iter(images)
        shown = [next(rest, None) if image is None else image for image in own]
        return cls(message["role"], text, str(message.get("reasoning_content") or ""), calls, **others, images=shown)

    def as_dict(self) -> dict[str, Any]:
        """Make the mapping that a chat template reads: images are parts without data. Malformed calls have no arguments in it."""
        made: dict[str, Any] = {"role": self.role, "content": parts_of(self.content) if self.images else self.content}
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

    Raises GraphError for a reward that is not a finite number, and for wrong messages.

    * `messages`: the messages that the model reads next.
    * `reward`: the reward of the answered turn.
    * `done`: ends the conversation.
    * `info`: numbers for the metrics; they are summed over a conversation, and averaged over conversations.
    * `cost`: the cost of the answer, in a unit of your choice: see `rg.Agent(most_cost=…)`.
    """

    messages: Sequence[Message] = ()
    reward: Finite = 0.0
    done: bool = False
    info: Mapping[str, Finite] = field(default_factory=dict)
    cost: AtLeastZero = 0.0

    def __post_init__(self) -> None:
        settings.check(self)


def call_id(place: int) -> str:
    """Make the id of the call at a place of its turn: nine letters and digits, as Mistral's template requires."""
    return f"call{place:05d}"


# Formats in which models write tool calls, and their parsers.
#
# A malformed call has an `error`, which the model reads as the tool's answer. vLLM's parsers return such text as if it had no call, so the
# common formats are parsed here, and the parsers of vLLM by name: `format="vllm:glm45"`.

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's arguments, by the tool's name
CallFormat: TypeAlias = Callable[[str, Schemas], Sequence[ToolCall]]

HERMES = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QWEN = "<tool_call><function=add><parameter=a>\n1\n</parameter></function></tool_call>"
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
PYTHONIC = "[add(a=1)]"
BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*\Z", re.DOTALL)
PARAMETER, PARAMETER_END = re.compile(r"<parameter=([^<>\s]++)>\n?"), "</parameter>"
LISTED = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


def hermes(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of Hermes, Qwen 2.5 and Qwen 3.

    >>> hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {})
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    return [_of_json(body, "arguments", HERMES) if end else _unclosed_call(HERMES) for body, end in BLOCK.findall(text)]


def qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of Qwen 3 Coder, whose values have the types of the tool's schema.

    >>> text = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    >>> qwen3_coder(text, {"add": {"properties": {"a": {"type": "integer"}}}})
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    calls = []
    for body, end in BLOCK.findall(text):
        found = FUNCTION.match(body)
        if not end or found is None:
            calls.append(_unclosed_call(QWEN) if not end else ToolCall("unknown", {}, f"a call is {QWEN}"))
            continue
        name, inner = found.groups()
        kinds = schemas.get(name, {}).get("properties", {})
        calls.append(ToolCall(name, {key: _convert_to_schema(value, kinds.get(key, {})) for key, value in _parameters(inner)}))
    return calls


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each parameter, in time linear in the text: a model writes it."""
    at = 0
    while (opened := PARAMETER.search(text, at)) and (end := text.find(PARAMETER_END, opened.end())) >= 0:
        yield opened[1], text[opened.end() : end].removesuffix("\n")
        at = end + len(PARAMETER_END)


def llama3_json(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of Llama 3.1 and newer: a turn of only JSON, one object per call, with `;` between them.

    >>> llama3_json('{"name": "add", "parameters": {"a": 1}}', {})
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    tag, left = "<|python_tag|>", text.strip()
    tagged, left = left.startswith(tag), left.removeprefix(tag).strip()
    if not tagged and not left.startswith("{"):
        return []
    calls: list[ToolCall] = []
    while left:
        try:
            call, end = json.JSONDecoder().raw_decode(left)
        except ValueError:
            return [*calls, ToolCall("unknown", {}, f"a call is {LLAMA}")]
        if not tagged and not calls and (not isinstance(call, dict) or "name" not in call):
            return []  # an answer in JSON
        calls.append(_of_json(left[:end], "parameters", LLAMA))
        left = left[end:].lstrip("; \n")
    return calls


def pythonic(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of Llama 4 and others: a turn that is a list of Python calls with named arguments.

    >>> pythonic("[add(a=1), add(a=2)]", {})[1]
    ToolCall(name='add', arguments={'a': 2}, error='')
    """
    text = text.strip()
    if not LISTED.match(text):
        return []
    try:
        body = ast.parse(text, mode="eval").body
        calls = body.elts if isinstance(body, ast.List) else []
        return [ToolCall(ast.unparse(call.func), _keywords(call)) for call in calls if isinstance(call, ast.Call)]
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return [ToolCall("unknown", {}, f"calls are {PYTHONIC}, and this is not such a list ({error!s:.80})")]


FORMATS: dict[str, CallFormat] = {"hermes": hermes, "llama3_json": llama3_json, "pythonic": pythonic, "qwen3_coder": qwen3_coder}


def calls_of(text: str, form: CallFormat, schemas: Schemas) -> tuple[ToolCall, ...]:
    """Parse a turn. If a user's format raises, the turn is one call with that error.

    Lone surrogates in a call become U+FFFD, and a call with NaN or infinity is an error.
    """
    try:
        return tuple(_whole_call(call) for call in form(text, schemas))
    except Exception as error:  # noqa: BLE001 (a user's format, on any text that a model may write)
        return (ToolCall("unknown", {}, f"{type(error).__name__}: {error!s:.200}"),)


def _whole_call(call: ToolCall) -> ToolCall:
    name = whole_text(call.name)
    try:
        return ToolCall(name, whole_value(call.arguments), whole_text(call.error))
    except ValueError as error:
        return ToolCall(name, {}, f"its arguments are JSON: {error}")


def _of_json(body: str, key: str, example: str) -> ToolCall:
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get(key, call.get("arguments", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(name, str) and name and isinstance(arguments, dict):
            return ToolCall(name, arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return ToolCall("unknown", {}, f"a call is {example}")


def _unclosed_call(example: str) -> ToolCall:
    return ToolCall("unknown", {}, f"the call is not closed; a call is {example}")


def _keywords(call: ast.Call) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("its arguments are named")
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def _convert_to_schema(value: str, schema: Mapping[str, Any]) -> Any:
    """Convert a value to the type of the schema, if possible; else it stays text."""
    if schema.get("type") in (None, "string"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)
