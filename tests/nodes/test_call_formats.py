"""Formats of tool calls: what is a call, what is none, and what is one that is written wrongly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.nodes.environments.messages import FORMATS, ToolCall, calls_of

ADD = {"add": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}}}}
HALF = ToolCall("add", {"a": 1})
BOTH = [HALF, ToolCall("add", {"a": 2, "b": "x"})]

RIGHT: dict[str, tuple[str, str, list[ToolCall]]] = {
    "hermes": (
        "hermes",
        'First <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": \\"x\\"}"}</tool_call>',  # noqa: E501
        BOTH,
    ),
    "llama": ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2, "b": "x"}}', BOTH),
    "llama with its tag": ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [HALF]),
    "llama, an answer": ("llama3_json", '{"sum": 3}', []),
    "llama, text": ("llama3_json", "The sum is 3.", []),
    "pythonic": ("pythonic", "[add(a=1), add(a=2, b='x')]", BOTH),
    "pythonic, a list": ("pythonic", "[1, 2]", []),
    "pythonic, of a module": ("pythonic", "[math.add(a=1)]", [ToolCall("math.add", {"a": 1})]),
    "qwen": (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        "<tool_call><function=add><parameter=a>2</parameter><parameter=b>\nx\n</parameter></function></tool_call>",
        BOTH,
    ),
    "qwen, its types": (
        "qwen3_coder",
        '<tool_call><function=add><parameter=a>\nten\n</parameter><parameter=b>\n7\n</parameter><parameter=c>\n["x", 1]\n</parameter></function></tool_call>',  # noqa: E501
        [ToolCall("add", {"a": "ten", "b": "7", "c": ["x", 1]})],
    ),
}
WRONG = {
    "hermes, no JSON": ("hermes", "<tool_call>add 1</tool_call>"),
    "hermes, no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "hermes, a list": ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    "hermes, not closed": ("hermes", '<tool_call>{"name": "add", "arguments": {}}'),
    "llama, cut off": ("llama3_json", '{"name": "add", "parameters": {'),
    "pythonic, by place": ("pythonic", "[add(1)]"),
    "pythonic, cut off": ("pythonic", "[add(a="),
    "pythonic, a calculation": ("pythonic", "[add(a=open('x'))]"),
    "qwen, no function": ("qwen3_coder", "<tool_call>add</tool_call>"),
    "qwen, not closed": ("qwen3_coder", "<tool_call><function=add>"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_calls_are_found_with_their_arguments(name: str) -> None:
    form, text, calls = RIGHT[name]
    assert list(calls_of(text, FORMATS[form], ADD)) == calls


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_is_written_wrongly_is_a_call_with_an_error(name: str) -> None:
    form, text = WRONG[name]
    [call] = calls_of(text, FORMATS[form], ADD)
    assert call.error
    assert call.arguments == {}


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": ',
    '"add"',
    ', "arguments": ',
    "{",
    "}",
    "[",
    "]",
    "add(",
    "a=",
    "1",
    ")",
    "<function=add>",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12), st.sampled_from(sorted(FORMATS)))
def test_no_text_makes_a_format_raise(pieces: list[str], form: str) -> None:
    for call in FORMATS[form]("".join(pieces), ADD):
        assert isinstance(call, ToolCall)


def test_a_format_of_ones_own_may_raise() -> None:
    def mine(text: str, schemas: object) -> list[ToolCall]:
        raise ValueError("CALL(name, …)")

    assert calls_of("x", mine, {}) == (ToolCall("unknown", {}, "ValueError: CALL(name, …)"),)
