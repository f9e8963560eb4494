"""What the model has said in a call of a program: text, thinking and calls of tools, cut where the program wants it to stop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlgraph.engines.api import Response
from rlgraph.engines.hf_models.chat_template import ChatPrompt
from rlgraph.engines.hf_models.turns import TurnTemplate
from rlgraph.nodes.endpoint.answers import Reply
from rlgraph.nodes.endpoint.requests import ChatRequest
from rlgraph.nodes.environments.call_formats import CallFormat, calls_of
from rlgraph.nodes.environments.messages import call_id

BLOCK = "<tool_call>"  # text before it is content; of other formats a turn with calls has none
MOST_CALLS = 1000  # of a turn: their ids are numbered from this much times the turns before it


@dataclass(frozen=True)
class Said:
    """A turn of the model: the `message` as templates read it, and the response as it is trained."""

    message: Mapping[str, Any]
    response: Response
    finish: str
    malformed: bool


def read_said(template: TurnTemplate, form: CallFormat | None, asked: ChatRequest, chat: ChatPrompt, response: Response) -> Said:
    """Read the turn after a conversation. A call that is written wrongly leaves it plain text."""
    place = sum(message["role"] == "assistant" for message in chat.messages)
    response, stopped = _stopped(template, asked, response)
    text = template.content(response.tokens)
    if stopped:
        text = text[: _first(text, asked.stops)]
    reasoning, content = template.thinking(text)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in chat.tools}
    calls = calls_of(content, form, schemas) if form is not None and chat.tools else ()
    malformed = any(call.error for call in calls)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    finish = "length" if response.finish == "length" else "stop"
    if calls and not malformed:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        ids = [call_id((MOST_CALLS * place + at) % 100_000) for at in range(len(functions))]
        message["tool_calls"] = [{"id": name, "type": "function", "function": one} for name, one in zip(ids, functions, strict=True)]
        message["content"] = content.partition(BLOCK)[0].strip() if BLOCK in content else ""
        finish = "tool_calls"
    if reasoning:
        message["reasoning_content"] = reasoning
    return Said(message, response, finish, malformed)


def reply_of(name: str, template: TurnTemplate, asked: ChatRequest, said: Said, prompt: Sequence[int]) -> Reply:
    """Make the answer that a client gets."""
    message, wrote = said.message, said.response
    texts = [template.tokenizer.decode([token]) for token in wrote.tokens] if asked.logprobs else []
    reasoning, calls = message.get("reasoning_content", ""), message.get("tool_calls", ())
    return Reply(name, asked, message["content"], reasoning, calls, said.finish, prompt, wrote.tokens, wrote.log_probs, texts)


def _stopped(template: TurnTemplate, asked: ChatRequest, response: Response) -> tuple[Response, bool]:
    """Leave the tokens up to the one that completes a text at which the program wants the answer to stop, and say whether there is one."""
    if _first(template.content(response.tokens), asked.stops) < 0:
        return response, False
    least, most = 1, len(response.tokens)
    while least < most:
        middle = (least + most) // 2
        found = _first(template.content(response.tokens[:middle]), asked.stops) >= 0
        least, most = (least, middle) if found else (middle + 1, most)
    cut = replace(response, tokens=response.tokens[:least], log_probs=response.log_probs[:least], versions=response.versions[:least])
    return replace(cut, finish="stop"), True


def _first(text: str, stops: Sequence[str]) -> int:
    """Find where the first of the texts begins; -1 if none is there."""
    return min((text.find(stop) for stop in stops if stop in text), default=-1)
