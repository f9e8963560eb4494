"""Mistakes that users make with conversations. Read by `test_mistakes.py`."""

from typing import Any

from support.user_mistakes import declared, launched, made

import rlgraph as rg
from rlgraph.errors import DataError

ASKED = {"role": "user", "content": "hi"}
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{1, 2}"}}]}


def said(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Items of one conversation, whose messages these are."""
    return [{"prompt": list(messages), "answer": "2"}]


MISTAKES = {
    "a message without a role": declared("names its role", DataError, data=said({"content": "1 + 1 ="})),
    "a message without content": declared("'content'", DataError, data=said({"role": "user"})),
    "an image in a message": declared("content is text", DataError, data=said({"role": "user", "content": [{"type": "image"}]})),
    "arguments that are no JSON": declared("which is not JSON", DataError, data=said(CALLING)),
    "a conversation that is answered": declared(
        "leave that message out", DataError, data=said(ASKED, {"role": "assistant", "content": "hello"})
    ),
    "no messages": declared("a prompt is text, or a list of messages", DataError, data=said(), prompts={"chat": rg.Chat()}),
    "thinking given twice": made(
        "given twice", lambda: rg.Chat(enable_thinking=True, template_kwargs={"enable_thinking": False}), DataError
    ),
    "a tool that is a function": made("tools", lambda: rg.Chat(tools=(print,)), DataError),  # type: ignore[arg-type]
    "an argument of a template that is no JSON": made("JSON", lambda: rg.Chat(template_kwargs={"day": print}), DataError),
    "a conversation for a model without a template": launched("has no chat template", data=said(ASKED)),
    "text for a model without a template": launched("has no chat template", prompts={"chat": rg.Chat(system="Be brief.")}),
}
