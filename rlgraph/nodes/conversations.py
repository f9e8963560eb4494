"""Conversations as prompts: the settings of a chat, and the checks of a row's messages."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlgraph import settings
from rlgraph.conversions import dimensions
from rlgraph.data.images import PARTS, images_of, place_images, unwrap_image
from rlgraph.engines.hf.chat_template import ChatPrompt
from rlgraph.errors import NOT_JSON, DataError, show_value
from rlgraph.settings import Name

TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"  # fields of a row that its conversation uses, named as in TRL
SYSTEM = ("system", "developer")
DEEPEST = 100  # the deepest nesting of lists and mappings, into which templates and workers recurse


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Chat:
    """How prompts become conversations, for `rg.prompts(data, count, chat=rg.options.Chat(…))`. The model's own chat template renders them.

    >>> import rlgraph as rg
    >>> chat = rg.options.Chat(system="Reason step by step.", enable_thinking=False)
    >>> rg.prompts([{"prompt": "1 + 1 ="}], count=1, chat=chat)
    the batch of 'prompts'

    * `system`: the first message of every conversation without a system message.
    * `enable_thinking`: passed to the template, e.g. Qwen 3's. None: the template decides.
    * `template_kwargs`: further arguments of the template: `{"date_string": "1 Jan 2025"}`. A row's `chat_template_kwargs` replace them.
    * `tools`: JSON schemas of the tools that the template describes to the model. A row's `tools` replace them.
    * `continue_final`: a conversation that ends with an assistant's message has the model continue that message.

    Raises DataError for a tool or an argument that is not JSON. The launch raises it for an argument that the template does not read.
    """

    system: Name | None = None
    enable_thinking: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    continue_final: bool = False

    def __post_init__(self) -> None:
        settings.check(self, DataError)
        if self.enable_thinking is not None and "enable_thinking" in self.template_kwargs:
            raise DataError("Chat: enable_thinking is given twice, by name and in template_kwargs; leave out one of them")
        for name, value in (("template_kwargs", self.template_kwargs), ("tools", self.tools)):
            check_json(f"Chat({name}={show_value(value)}): {name}", value)

    def conversation(self, where: str, item: Mapping[str, Any], prompt: str, images: list[Any] | None = None) -> ChatPrompt:
        """Make the conversation of a row, and add the row's images to `images`, in the order of its parts; None: it has only text.

        Raises DataError, which begins with `where`, for invalid messages, and for more or fewer images than places for them.
        """
        messages = checked_messages(where, prompt, item[prompt], images)
        if images is not None:
            place_images(where, messages, images, images_of(where, item, prompt))
        if self.system is not None and messages[0]["role"] not in SYSTEM:
            messages.insert(0, {"role": "system", "content": self.system})
        answers = messages[-1]["role"] == "assistant"
        if answers and not self.continue_final:
            raise DataError(
                f"{where} has a conversation that ends with the assistant's message {show_value(messages[-1]['content'])}; the "
                "model writes "
                "what follows: leave that message out, or pass chat=rg.options.Chat(continue_final=True) to have it continued"
            )
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        tools = _read_list(where, TOOLS, item.get(TOOLS)) or list(self.tools)
        given = {**thinking, **self.template_kwargs, **_read_mapping(where, TEMPLATE_KWARGS, item.get(TEMPLATE_KWARGS))}
        return ChatPrompt(messages, tools, given, answers)


def last_question(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the user's last message, or of the last message if none is the user's."""
    return next((text_of(message) for message in reversed(messages) if message["role"] == "user"), text_of(messages[-1]))


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, one line per part; empty if it has none."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if part["type"] == "text")


def is_conversation(value: Any) -> bool:
    """Whether a prompt is a list of messages, or an array of them, as pandas reads from parquet."""
    value = _plain_list(value)
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(message, Mapping) for message in value)


def check_text(where: str, name: str, text: str) -> None:
    """Raise DataError for a text with a lone surrogate, which no tokenizer and no file can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has {name}={show_value(text[error.start : error.end])} at character {error.start}, a lone surrogate, which is "
            "half of a "
            "character: fix the text, e.g. text.encode(errors='replace').decode()"
        ) from None


def check_prompt(where: str, name: str, text: str) -> None:
    """Raise DataError for a prompt that no tokenizer can read, or a conversation written as JSON, which would be read as plain text."""
    check_text(where, name, text)
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return
    with contextlib.suppress(*NOT_JSON):
        found = json.loads(text)
        if is_conversation(found) and all("role" in message for message in found):
            raise DataError(
                f"{where} has {name}={show_value(text)}, a conversation written as JSON; pass its messages as a list, e.g. json.loads(text)"
            )


def starts_with_system(value: Any) -> bool:
    """Whether a prompt is a conversation with its own system message."""
    return is_conversation(value) and _plain_list(value)[0].get("role") in SYSTEM


def _plain_list(value: Any) -> Any:
    """Convert an array to a list; pass other values through."""
    return value.tolist() if dimensions(value) == 1 else value


def checked_messages(where: str, prompt: str, value: Any, images: list[Any] | None = None) -> list[dict[str, Any]]:
    """Copy the messages of a prompt as templates read them; text is one message of the user.

    Arguments of tool calls become dicts, parts of text are joined, and keys that are None are left out, except `content`. The images of
    parts are added to `images`, None for a part that only marks a place. Raises DataError, which begins with `where`, for an invalid
    message, and for an image if `images` is None.
    """
    if isinstance(value, str):
        check_prompt(where, prompt, value)
        value = [{"role": "user", "content": value}]
    if not is_conversation(value):
        raise DataError(f"{where} has {prompt}={show_value(value)}; a prompt is text, or a list of messages {{'role': …, 'content': …}}")
    return [_message(f"{where}, message {number}", message, images) for number, message in enumerate(_plain_list(value))]


def _message(where: str, message: Mapping[str, Any], images: list[Any] | None) -> dict[str, Any]:
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{where} is {show_value(dict(message))}; a message names its role, e.g. 'user'")
    if "content" not in message and not message.get("tool_calls"):
        raise DataError(f"{where} is {show_value(dict(message))}; a message has its text under 'content'")
    made = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "content" in message:
        made["content"] = _content(where, message["content"], bool(message.get("tool_calls")), images)
    if "tool_calls" in made:
        made["tool_calls"] = [_tool_call(where, call) for call in _read_list(where, "tool_calls", made["tool_calls"])]
    check_json(where, made)
    return made


def _content(where: str, content: Any, calls: bool, images: list[Any] | None) -> str | list[dict[str, str]] | None:
    if isinstance(content, str) or (content is None and calls):
        return content
    content = _plain_list(content)
    parts = content if isinstance(content, list | tuple) else [content]
    found = [made for part in parts if isinstance(part, Mapping) and (made := _part(part, images))]
    if len(found) < len(parts) or not found:
        also = "" if images is None else " and {'type': 'image', 'image': …}"
        raise DataError(
            f"{where} has content={show_value(content)}; content is text, or a list of parts {{'type': 'text', 'text': …}}{also}"
        )
    return found if any(part["type"] == "image" for part in found) else text_of({"content": found})


def _part(part: Mapping[str, Any], images: list[Any] | None) -> dict[str, str] | None:
    """Copy a part without its image, which is added to `images`; None for a part of another kind."""
    kind, text = part.get("type", "text"), part.get("text")
    if kind in PARTS and images is not None:
        images.append(unwrap_image(part))
        return {"type": "image"}
    return {"type": "text", "text": text} if kind == "text" and isinstance(text, str) else None


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has the tool call {show_value(call)}; a call is {{'function': {{'name': …, 'arguments': …}}}}")
    arguments = _read_mapping(where, "arguments", function.get("arguments"))
    kept = {key: value for key, value in call.items() if value is not None}
    return {**kept, "function": {**function, "arguments": arguments}}


def _read_mapping(where: str, name: str, value: Any) -> dict[str, Any]:
    found = _parse_json(where, name, value)
    if not isinstance(found, Mapping | None):
        raise DataError(f"{where} has {name}={show_value(value)}; {name} are a mapping, or its JSON")
    return dict(found or {})


def _read_list(where: str, name: str, value: Any) -> list[Any]:
    found = _parse_json(where, name, value)
    if not isinstance(found, list | tuple | None):
        raise DataError(f"{where} has {name}={show_value(value)}; {name} are a list of mappings, or its JSON")
    return list(found or ())


def _parse_json(where: str, name: str, value: Any) -> Any:
    """Parse a value that may be given as JSON; an empty text is no value."""
    found = _plain_list(value)
    try:
        if isinstance(value, str):
            found = json.loads(value) if value.strip() else None
    except NOT_JSON as error:
        raise DataError(
            f"{where} has {name}={show_value(value)}, which is not JSON ({error}): pass a list or a mapping, or its JSON"
        ) from None
    check_json(f"{where}: {name}", found)
    return found


def check_json(where: str, value: Any) -> None:
    """Raise DataError for a value that JSON cannot hold, or that is nested deeper than `DEEPEST`."""
    layer, depth = [value], 0
    while layer := [item for each in layer if isinstance(each, Mapping | list | tuple) for item in _values(each)]:
        depth += 1
        if depth > DEEPEST:
            raise DataError(f"{where} holds more than {DEEPEST} nested lists and mappings; flatten them")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # which refuses lone surrogates
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} holds a value that JSON cannot hold ({error}); pass text, numbers, and lists and mappings of these"
        ) from None


def _values(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value
