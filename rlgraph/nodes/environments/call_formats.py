"""Formats in which models write calls of tools: what a turn's text is parsed to.

A call that is written wrongly is a call with an `error`, which the model reads as the tool's answer. vLLM's parsers return such text as
if there were no call, so the common formats are parsed here, and the parsers of vLLM by name: `format="vllm:glm45"`.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rlgraph.nodes.environments.messages import ToolCall, whole_text, whole_value

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
    return [_of_json(body, "arguments", HERMES) if end else _unclosed(HERMES) for body, end in BLOCK.findall(text)]


def qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of Qwen 3 Coder, whose values have the types that the tool's schema says.

    >>> text = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    >>> qwen3_coder(text, {"add": {"properties": {"a": {"type": "integer"}}}})
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    calls = []
    for body, end in BLOCK.findall(text):
        found = FUNCTION.match(body)
        if not end or found is None:
            calls.append(_unclosed(QWEN) if not end else ToolCall("unknown", {}, f"a call is {QWEN}"))
            continue
        name, inner = found.groups()
        kinds = schemas.get(name, {}).get("properties", {})
        calls.append(ToolCall(name, {key: _typed(value, kinds.get(key, {})) for key, value in _parameters(inner)}))
    return calls


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each parameter, in time linear in the text: a model writes it."""
    at = 0
    while (opened := PARAMETER.search(text, at)) and (end := text.find(PARAMETER_END, opened.end())) >= 0:
        yield opened[1], text[opened.end() : end].removesuffix("\n")
        at = end + len(PARAMETER_END)


def llama3_json(text: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of Llama 3.1 and newer: a turn of JSON alone, one object for each call, with `;` between them.

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
        return [ToolCall("unknown", {}, f"calls are {PYTHONIC}, and this is no such list ({error!s:.80})")]


FORMATS: dict[str, CallFormat] = {"hermes": hermes, "llama3_json": llama3_json, "pythonic": pythonic, "qwen3_coder": qwen3_coder}


def calls_of(text: str, form: CallFormat, schemas: Schemas) -> tuple[ToolCall, ...]:
    """Parse a turn. If a user's format raises, the turn is one call, whose error is what it raised.

    Lone surrogates in a call become U+FFFD, and a call with NaN or infinity is an error.
    """
    try:
        return tuple(_whole(call) for call in form(text, schemas))
    except Exception as error:  # noqa: BLE001 (a user's format, on any text that a model may write)
        return (ToolCall("unknown", {}, f"{type(error).__name__}: {error!s:.200}"),)


def _whole(call: ToolCall) -> ToolCall:
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


def _unclosed(example: str) -> ToolCall:
    return ToolCall("unknown", {}, f"the call is not closed; a call is {example}")


def _keywords(call: ast.Call) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("its arguments are named")
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """Convert a value to the type that the schema says, if it is one; else it stays text."""
    if schema.get("type") in (None, "string"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)
