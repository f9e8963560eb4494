"""Requests of chat completions: what of OpenAI's protocol is answered, checked, and errors in its shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rlgraph.engines.hf_models.chat_template import ChatPrompt
from rlgraph.errors import DataError, shown
from rlgraph.nodes.conversations import checked_messages

MODEL = "policy"  # what the endpoint calls its model; it answers under any name
SAMPLED_OTHERWISE = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed")


class ApiError(Exception):
    """A request that is refused. OpenAI's clients raise it as the exception of its status; 400 to 404 are not tried again."""

    def __init__(self, status: int, message: str, code: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}}


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """The fields of a request that are read. Others are ignored, as OpenAI's newest ones."""

    messages: list[dict[str, Any]]
    model: str = MODEL
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None

    @property
    def most(self) -> int | None:
        """The most tokens that the program wants."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> list[str]:
        """The texts at which the answer ends."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def overrides(self) -> bool:
        """Whether it asks for a sampling of its own. The rollout's is used, since its log-probs are trained on."""
        given = msgspec.structs.asdict(self)
        return any(given[name] is not None for name in SAMPLED_OTHERWISE)


@dataclass(frozen=True)
class ChatAsked:
    """A checked request, with its conversation as templates read it."""

    request: ChatRequest
    prompt: ChatPrompt


def read_chat(body: bytes) -> ChatAsked:
    """Read a request. Raises ApiError for one that is none, or that asks for what is not there."""
    try:
        request = msgspec.json.decode(body, type=ChatRequest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the request is no chat completion: {error!s:.300}", "invalid_request") from None
    _check_supported(request)
    try:
        messages = checked_messages("the request", "messages", request.messages)
        tools = [_tool(tool) for tool in request.tools or ()] if request.tool_choice != "none" else []
    except DataError as error:
        raise ApiError(400, str(error), "invalid_request") from None
    for message in messages:
        if message["role"] == "developer":  # OpenAI's word, which templates do not know
            message["role"] = "system"
    return ChatAsked(request, ChatPrompt(messages, tools, request.chat_template_kwargs or None))


def _check_supported(request: ChatRequest) -> None:
    wrong = {
        "n": request.n not in (None, 1),
        "top_logprobs": bool(request.top_logprobs),
        "response_format": (request.response_format or {"type": "text"}).get("type") != "text",
        "max_tokens": request.most is not None and request.most < 1,
        "messages": not request.messages or request.messages[-1].get("role") == "assistant",
    }
    rules = {
        "n": "one answer a request",
        "top_logprobs": "log-probs of sampled tokens alone",
        "response_format": "text alone",
        "max_tokens": "at least 1",
        "messages": "a conversation whose last message is not the assistant's",
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            value = request.most if name == "max_tokens" else msgspec.structs.asdict(request)[name]
            raise ApiError(400, f"{name}={shown(value)}: this endpoint takes {rules[name]}", "unsupported_value")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"the tool {shown(dict(tool))}; a tool is {{'type': 'function', 'function': {{'name': …, 'parameters': …}}}}")
    return {"type": "function", "function": dict(function)}
