"""A sandbox on another machine: `rg.agents.Sandbox` over HTTP, and a server of such sandboxes.

    python recipes/tasks/http_sandbox.py   # serves this machine, and prints its address and key

Each sandbox is an `rg.agents.LocalSandbox` of the server's machine. A server of containers answers the same four requests.
"""

import asyncio
import secrets
from base64 import b64decode, b64encode
from typing import Any

import aiohttp
from aiohttp import web

import rlgraph as rg

MOST_BYTES = 64 << 20  # of a request


class HttpSandbox:
    """One sandbox of a server. It begins with its first call."""

    def __init__(self, url: str, key: str, seconds: float = 60.0) -> None:
        self.url, self.seconds, self.name = url, seconds, secrets.token_hex(8)
        self.headers = {"Authorization": f"Bearer {key}"}

    async def exec(self, code: str) -> rg.agents.Executed:
        return rg.agents.Executed(**await self._asked("exec", code=code))

    async def read(self, path: str) -> bytes:
        return b64decode((await self._asked("read", path=path))["data"])

    async def write(self, path: str, data: bytes) -> None:
        await self._asked("write", path=path, data=b64encode(data).decode())

    async def close(self) -> None:
        await self._asked("close")

    async def _asked(self, what: str, **body: str) -> Any:
        timeout = aiohttp.ClientTimeout(total=self.seconds)
        try:
            async with (
                aiohttp.ClientSession(headers=self.headers, timeout=timeout) as session,
                session.post(f"{self.url}/{self.name}/{what}", json=body) as answer,
            ):
                said = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise rg.agents.ToolError(f"the sandbox does not answer: {error}") from None
        if answer.status != 200:
            raise rg.agents.ToolError(said["error"])
        return said


def server(key: str, sandboxes: dict[str, rg.agents.LocalSandbox]) -> web.Application:
    """Serve sandboxes to whoever has the key."""

    async def answered(request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return web.json_response({"error": "the key is wrong"}, status=401)
        name, what, body = request.match_info["name"], request.match_info["what"], await request.json()
        try:
            return web.json_response(await done(name, what, body))
        except (rg.agents.ToolError, KeyError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)

    async def done(name: str, what: str, body: dict[str, str]) -> dict[str, str]:
        if what == "close":
            if name in sandboxes:
                await sandboxes.pop(name).close()
            return {}
        sandbox = sandboxes.setdefault(name, rg.agents.LocalSandbox())
        if what == "exec":
            return dict(vars(await sandbox.exec(body["code"])))
        if what == "read":
            return {"data": b64encode(await sandbox.read(body["path"])).decode()}
        await sandbox.write(body["path"], b64decode(body["data"]))
        return {}

    app = web.Application(client_max_size=MOST_BYTES)
    app.router.add_post("/{name}/{what:exec|read|write|close}", answered)
    return app


async def serve(key: str) -> None:
    sandboxes: dict[str, rg.agents.LocalSandbox] = {}
    runner = web.AppRunner(server(key, sandboxes))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]} {key}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        for sandbox in sandboxes.values():
            await sandbox.close()
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(secrets.token_urlsafe(16)))
