"""The HTTP server of chat completions: on loopback, in a thread of its own, a key for each session.

A request waits as a `Pending` until the loop that decodes answers it. If its client goes away, it is marked, and not answered.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rlgraph.nodes.endpoint.answers import Reply
from rlgraph.nodes.endpoint.requests import MODEL, ApiError, ChatAsked, read_chat

HOST = "127.0.0.1"
PATHS = "POST /v1/chat/completions and GET /v1/models"
START_S = 180.0
LAST_TURNS = 8  # of the event loop, in which connections that were closed let go of their sockets
log = logging.getLogger("rlgraph.agents")


class Pending:
    """A request of `session` that waits for its answer."""

    def __init__(self, session: Any, chat: ChatAsked) -> None:
        self.session, self.chat = session, chat
        self.gone = False  # its client does not wait any more
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
    """Serves sessions. `deliver` gets each request, and again each whose client has gone, from the server's thread.

    `most_bytes` bounds a request. Raises OSError where no port can be had.
    """

    def __init__(self, deliver: Callable[[Pending], None], most_bytes: int) -> None:
        self.deliver, self.most_bytes, self.port = deliver, most_bytes, 0
        self._sessions: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="chat completions", daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._started(), self._loop).result(START_S)

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def open(self, session: Any) -> str:
        """Admit a session, and return its key."""
        key = f"rlgraph-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        return key

    def shut(self, key: str) -> None:
        """Refuse the key from now on."""
        self._sessions.pop(key, None)

    def close(self) -> None:
        """Stop serving, and let the thread end; does not wait for it, since any thread may call this."""
        self._sessions.clear()
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._stopped()))

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _stopped(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for _ in range(LAST_TURNS):
            await asyncio.sleep(0)
        self._loop.stop()

    async def _started(self) -> Any:
        from aiohttp import web

        app = web.Application(client_max_size=self.most_bytes)
        app.router.add_post("/v1/chat/completions", self._answering(self._complete))
        app.router.add_get("/v1/models", self._answering(self._models))
        app.router.add_route("*", "/{path:.*}", self._answering(self._unknown))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    def _answering(self, handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """Wrap a handler: check the key, and answer errors in OpenAI's shape."""
        from aiohttp import web

        async def answered(request: Any) -> Any:
            try:
                key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
                if key not in self._sessions:
                    raise ApiError(401, "this is no key of an open session", "invalid_api_key", "authentication_error")
                return await handler(request, self._sessions[key])
            except ApiError as error:
                return web.json_response(error.body(), status=error.status)
            except web.HTTPRequestEntityTooLarge:
                large = ApiError(413, f"a request has at most {self.most_bytes} bytes", "request_too_large")
                return web.json_response(large.body(), status=413)

        return answered

    async def _unknown(self, request: Any, session: Any) -> Any:
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
