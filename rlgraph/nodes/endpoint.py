"""An HTTP server of OpenAI's chat completions on loopback: a key for each session, checked requests, answers or streams."""

import asyncio
import contextlib
import json
import logging
import resource
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlgraph.engines.hf.chat_template import ChatPrompt
from rlgraph.errors import NOT_JSON, DataError, show_value
from rlgraph.nodes.conversations import check_json, checked_messages

# Requests of chat completions: the supported part of OpenAI's protocol, its checks, and errors in its format.

MODEL = "policy"  # the name of the endpoint's model; it accepts any name
SAMPLED_OTHERWISE = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed")


class ApiError(Exception):
    """A refused request. OpenAI's clients raise it as the exception of its status; they do not retry 400 to 404."""

    def __init__(self, status: int, message: str, code: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}}


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """The fields of a request that are read. Others are ignored, e.g. OpenAI's newest ones."""

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
        """Whether it asks for its own sampling. The rollout's sampling is used, since its log-probs are trained on."""
        given = msgspec.structs.asdict(self)
        return any(given[name] is not None for name in SAMPLED_OTHERWISE)


@dataclass(frozen=True)
class ChatAsked:
    """A checked request, with its conversation as templates read it."""

    request: ChatRequest
    prompt: ChatPrompt


def read_chat(body: bytes) -> ChatAsked:
    """Read a request. Raises ApiError for an invalid request, or for unsupported features."""
    try:
        request = msgspec.json.decode(body, type=ChatRequest)
    except NOT_JSON as error:  # UnicodeDecodeError too
        raise ApiError(400, f"the request is not a chat completion: {error!s:.300}", "invalid_request") from None
    _check_supported(request)
    try:
        messages = checked_messages("the request", "messages", request.messages)
        tools = [_tool(tool) for tool in request.tools or ()] if request.tool_choice != "none" else []
        check_json("the request", [tools, request.chat_template_kwargs])
    except DataError as error:
        raise ApiError(400, str(error), "invalid_request") from None
    for message in messages:
        if message["role"] == "developer":  # OpenAI's role, which templates do not know
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
            raise ApiError(400, f"{name}={show_value(value)}: this endpoint takes {rules[name]}", "unsupported_value")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"the tool {show_value(dict(tool))}; a tool is {{'type': 'function', 'function': {{'name': …, 'parameters': …}}}}")
    return {"type": "function", "function": dict(function)}


# Answers of chat completions in OpenAI's format: one object, or the chunks of a stream.


@dataclass(frozen=True)
class Reply:
    """The answer of the model to one request. `texts` are its tokens one by one; `prompt` is the text that it read."""

    id: str
    request: ChatRequest
    content: str
    reasoning: str
    tool_calls: Sequence[dict[str, Any]]
    finish: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    texts: Sequence[str]

    def completion(self) -> dict[str, Any]:
        """Make the answer as one object."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [_on_the_wire(call) for call in self.tool_calls]
        choice = {"index": 0, "message": message, "finish_reason": self.finish, "logprobs": self._log_probs()}
        ids: dict[str, Any] = {}
        if self.request.return_token_ids:
            choice["token_ids"], ids = list(self.tokens), {"prompt_token_ids": list(self.prompt)}
        return self._head("chat.completion") | {"choices": [choice], "usage": self._usage()} | ids

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Make the answer as the chunks of a stream: the role, the text, the tool calls, and the finish reason."""
        first: dict[str, Any] = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": list(self.prompt)} if self.request.return_token_ids else {}
        yield self._chunk(first) | ids
        if self.reasoning:
            yield self._chunk({"reasoning_content": self.reasoning})
        if self.content or self.request.logprobs or self.request.return_token_ids:
            text = self._chunk({"content": self.content})
            text["choices"][0]["logprobs"] = self._log_probs()
            if self.request.return_token_ids:
                text["choices"][0]["token_ids"] = list(self.tokens)
            yield text
        for place, call in enumerate(self.tool_calls):
            yield self._chunk({"tool_calls": [{"index": place, **_on_the_wire(call)}]})
        yield self._chunk({}, self.finish)
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage()}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.request.model}

    def _usage(self) -> dict[str, int]:
        read, wrote = len(self.prompt), len(self.tokens)
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}

    def _log_probs(self) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        pairs = zip(self.texts, self.log_probs, strict=True)
        return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]}


def _on_the_wire(call: dict[str, Any]) -> dict[str, Any]:
    """Write a call's arguments as JSON text: templates read a mapping, clients read text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


# The HTTP server of chat completions: on loopback, in a separate thread, with a key for each session.
#
# A request waits as a `Pending` until the decode loop answers it. If its client disconnects, it is marked, and not answered.

HOST = "127.0.0.1"
PATHS = "POST /v1/chat/completions and GET /v1/models"
START_S = 180.0
LAST_TURNS = 8  # turns of the event loop, for closed connections to release their sockets
log = logging.getLogger("rlgraph.agents")
http_log = logging.getLogger("rlgraph.agents.http")  # aiohttp would log a traceback for anything that a process of this host sends
http_log.setLevel(logging.CRITICAL)


class Pending:
    """A request of `session` that waits for its answer."""

    def __init__(self, session: Any, chat: ChatAsked) -> None:
        self.session, self.chat = session, chat
        self.gone = False  # its client no longer waits
        self._loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[Reply] = self._loop.create_future()

    def answer(self, reply: Reply) -> None:
        self._loop.call_soon_threadsafe(self._settle, reply)

    def refuse(self, error: ApiError) -> None:
        self._loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, result: Reply | ApiError) -> None:
        if self.answered.done():
            return
        if isinstance(result, ApiError):
            self.answered.set_exception(result)
        else:
            self.answered.set_result(result)


class Endpoint:
    """Serves sessions. The server's thread calls `deliver` with each request, and again if its client disconnects.

    `most_bytes` bounds a request. Raises OSError if no port is free.
    """

    def __init__(self, deliver: Callable[[Pending], None], most_bytes: int) -> None:
        self.deliver, self.most_bytes, self.port = deliver, most_bytes, 0
        self._sessions: dict[str, Any] = {}
        self._strangers: dict[Any, None] = {}  # connections without a valid key so far, the oldest first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="chat completions", daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start_server(), self._loop).result(START_S)

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def open(self, session: Any) -> str:
        """Admit a session, and return its key."""
        key = f"rlgraph-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        return key

    def revoke(self, key: str) -> None:
        """Refuse the key from now on."""
        self._sessions.pop(key, None)

    def close(self) -> None:
        """Stop serving, and let the thread end, without waiting for it, since any thread may call this."""
        self._sessions.clear()
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._stop_server()))

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _stop_server(self) -> None:
        self._listener.close()
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for _ in range(LAST_TURNS):
            await asyncio.sleep(0)
        self._loop.stop()

    async def _start_server(self) -> Any:
        from aiohttp import web

        app = web.Application(client_max_size=self.most_bytes)
        app.router.add_post("/v1/chat/completions", self._wrap_handler(self._complete))
        app.router.add_get("/v1/models", self._wrap_handler(self._models))
        app.router.add_route("*", "/{path:.*}", self._wrap_handler(self._refuse_path))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=http_log, shutdown_timeout=1.0)
        await runner.setup()
        server = runner.server
        assert server is not None
        self._listener = await self._loop.create_server(lambda: self._admit(server()), HOST, 0, backlog=128)
        self.port = self._listener.sockets[0].getsockname()[1]
        return runner

    def _admit(self, connection: Any) -> Any:
        """Count a new connection as unauthenticated, and close the oldest of these if they use a quarter of this process's descriptors."""
        self._strangers[connection] = None
        if len(self._strangers) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self._loop.call_soon(oldest.force_close)  # after this connection is set up: many arrive at once
        return connection

    def _wrap_handler(self, handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """Wrap a handler: check the key, and answer errors in OpenAI's format."""
        from aiohttp import web

        async def answer(request: Any) -> Any:
            try:
                key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
                if key not in self._sessions:
                    raise ApiError(401, "this is not the key of an open session", "invalid_api_key", "authentication_error")
                self._strangers.pop(request.protocol, None)
                return await handler(request, self._sessions[key])
            except ApiError as error:
                return web.json_response(error.body(), status=error.status)
            except web.HTTPRequestEntityTooLarge:
                large = ApiError(413, f"a request has at most {self.most_bytes} bytes", "request_too_large")
                return web.json_response(large.body(), status=413)
            except web.RequestPayloadError as error:  # e.g. invalid compressed bytes
                broken = ApiError(400, f"the body cannot be read: {error!s:.300}", "invalid_request")
                return web.json_response(broken.body(), status=400)

        return answer

    async def _refuse_path(self, request: Any, session: Any) -> Any:
        raise ApiError(404, f"there is no {request.method} {request.path}; this endpoint has {PATHS}", "not_found")

    async def _models(self, request: Any, session: Any) -> Any:
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rlgraph"}]})

    async def _complete(self, request: Any, session: Any) -> Any:
        from aiohttp import web

        pending = Pending(session, read_chat(await request.read()))
        self.deliver(pending)
        try:
            reply = await pending.answered
        except asyncio.CancelledError:
            pending.gone = True
            self.deliver(pending)
            raise
        if not pending.chat.request.stream:
            return web.json_response(reply.completion())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in reply.chunks():
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
