"""Checks of conversations before anything starts: does the model's template render them as they will be assembled?"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.columns import Columns
from rlgraph.engines.hf_models.chat_template import ChatPrompt, reads
from rlgraph.engines.hf_models.turns import TurnTemplate
from rlgraph.engines.tool_parsers import vllm_calls
from rlgraph.errors import GraphError, shown
from rlgraph.nodes.environments.agent import Agent
from rlgraph.nodes.environments.call_formats import FORMATS, CallFormat, calls_of
from rlgraph.nodes.environments.messages import ToolCall, call_id
from rlgraph.nodes.environments.program import Program
from rlgraph.nodes.environments.tools import Tools


def chats_of(columns: Columns, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Make the conversations of prompts, as JSON. Text is a message of the user; `tools` are described where no others are given."""
    if "prompt_messages" in columns:
        chats = [ChatPrompt.from_json(str(text)) for text in columns["prompt_messages"]]
    else:
        chats = [ChatPrompt([{"role": "user", "content": str(text)}]) for text in columns["prompt_texts"]]
    described = list(tools) if tools and reads(tokenizer.chat_template, "tools") else []
    return [ChatPrompt(c.messages, c.tools or described, c.template_kwargs, c.continue_final).to_json() for c in chats]


def probe_answer(role: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a message of a role, to try a template with."""
    if role != "tool":
        return {"role": role, "content": "No."}
    return {"role": role, "content": "4", "name": tools[0]["function"]["name"] if tools else "tool", "tool_call_id": call_id(0)}


def form_of(agent: Agent | Program, tokenizer: Any) -> CallFormat | None:
    """Look up the format in which calls of tools are parsed."""
    if not isinstance(agent.calls, str):
        return agent.calls
    if agent.calls in FORMATS:
        return FORMATS[agent.calls]
    parsed = vllm_calls(agent.calls.removeprefix("vllm:"), tokenizer)
    return lambda text, schemas: [ToolCall(name, json.loads(arguments)) for name, arguments in parsed(text, schemas)]


def check_turns(template: TurnTemplate, chat: ChatPrompt, agent: Agent, tools: Tools | None) -> None:
    """Check that the template renders the turns that an agent or tools add as they will be assembled, and calls in their format.

    Raises DataError with the first difference, and GraphError for a format in which the template writes no calls.
    """
    if tools is None:
        template.check(chat, probe_answer("user", ()), agent.keep_thinking)
        return
    written = template.check(chat, probe_answer("tool", chat.tools), agent.keep_thinking)
    form = form_of(agent, template.tokenizer)
    name = chat.tools[0]["function"]["name"] if chat.tools else "tool"
    if form is not None and name in written and name not in [call.name for call in calls_of(written, form, {})]:
        raise GraphError(
            f"the chat template of '{template.path}' writes calls of tools as {shown(template.thinking(written)[1])}, in which "
            f"Tools(calls={shown(agent.calls)}) finds none: give the model's format, one of {sorted(FORMATS)}, or a function of your own"
        )
