"""Mistakes that users make with conversations. Read by `test_mistakes.py`."""

from typing import Any

from support.user_mistakes import call_mistake, graph_mistake, launch_mistake

import rlgraph as rg
from rlgraph.errors import DataError

ASKED = {"role": "user", "content": "hi"}
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{1, 2}"}}]}


def conversation_items(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Items of one conversation, whose messages these are."""
    return [{"prompt": list(messages), "answer": "2"}]


MISTAKES = {
    "a message without a role": graph_mistake("names its role", DataError, data=conversation_items({"content": "1 + 1 ="})),
    "a message without content": graph_mistake("'content'", DataError, data=conversation_items({"role": "user"})),
    "an image in a message": graph_mistake(
        "content is text", DataError, data=conversation_items({"role": "user", "content": [{"type": "image"}]})
    ),
    "arguments that are no JSON": graph_mistake("which is not JSON", DataError, data=conversation_items(CALLING)),
    "a conversation that is answered": graph_mistake(
        "leave that message out", DataError, data=conversation_items(ASKED, {"role": "assistant", "content": "hello"})
    ),
    "no messages": graph_mistake(
        "a prompt is text, or a list of messages", DataError, data=conversation_items(), prompts={"chat": rg.Chat()}
    ),
    "thinking given twice": call_mistake(
        "given twice", lambda: rg.Chat(enable_thinking=True, template_kwargs={"enable_thinking": False}), DataError
    ),
    "a tool that is a function": call_mistake("tools", lambda: rg.Chat(tools=(print,)), DataError),  # type: ignore[arg-type]
    "an argument of a template that is no JSON": call_mistake("JSON", lambda: rg.Chat(template_kwargs={"day": print}), DataError),
    "a conversation for a model without a template": launch_mistake("has no chat template", data=conversation_items(ASKED)),
    "text for a model without a template": launch_mistake("has no chat template", prompts={"chat": rg.Chat(system="Be brief.")}),
}
