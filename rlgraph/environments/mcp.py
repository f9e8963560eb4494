"""Tools of a server that speaks MCP over stdio, by the official SDK."""

import asyncio
import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rlgraph.errors import GraphError, show_value
from rlgraph.nodes.environments.calls import run_in_thread
from rlgraph.nodes.environments.leases import leased_command
from rlgraph.nodes.environments.tools import Tool
from rlgraph.nodes.sandbox import ToolError

START_S = 180.0  # of a server
_RUNNING: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[McpServer, list[_Session]]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class McpServer:
    """A server: its command, and how many processes of it a worker starts."""

    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    processes: int = 1


@dataclass(frozen=True)
class OwnServer:
    """Makes the server of one conversation; tools of one server share it."""

    server: McpServer

    def __call__(self) -> "OwnSession":
        return OwnSession(self.server)


@dataclass(eq=False)
class _Session:
    """A process of a server in this event loop. One task opens and closes it, as the SDK wants; `calls` counts those under way."""

    server: McpServer
    ready: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0
    task: "asyncio.Task[None] | None" = None

    async def run(self) -> None:
        """Keep the process until `ended`. A server that cannot be started is told to whoever waits for it."""
        sdk = importlib.import_module("mcp")
        client, stdio = sdk.Client, importlib.import_module("mcp.client.stdio").stdio_client
        command, lease = leased_command(self.server.command)
        given = sdk.StdioServerParameters(command=command[0], args=command[1:], env=dict(self.server.env) or None, cwd=self.server.cwd)
        try:
            async with client(stdio(given)) as connected:
                self.ready.set_result(connected)
                await self.ended.wait()
        except Exception as error:  # noqa: BLE001 (whatever the SDK raises for a server that is none)
            if not self.ready.done():
                self.ready.set_exception(
                    ToolError(f"the server {show_value(self.server.command[0])} does not start: {_inner(error)!s:.300}")
                )
        finally:
            lease.end()

    def usable(self) -> bool:
        """Whether it lives, and no call has found it dead."""
        return self.task is not None and not self.task.done() and not self.ended.is_set()


def mcp(
    *command: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    processes: int | None = None,
    own: bool = False,
    only: Sequence[str] | None = None,
) -> list[Tool]:
    """List the tools of an MCP server that `command` starts, for `rg.Tools([*rg.environments.mcp("python", "server.py")])`.

    The server is started here once, to list its tools with their schemas. A server that dies is started again at the next call. It ends
    with the worker, by SIGKILL too.

    * `processes`: servers of a worker (1), which all its conversations share: for a server that keeps no state of a conversation.
    * `own`: each conversation has a server of its own, from its first call to its end: for one that keeps state. `concurrency` of the
      rollout bounds how many there are. If it dies, the model reads so, and its next call begins a new one without that state.
    * `env`: beside PATH, HOME and a few others, all that the server sees of the environment.
    * `only`: the names of the tools to take. None: all.

    The model reads the text and the images of a result, images with `Generator(images=)`.

    Raises GraphError without the package mcp, for a server that does not start, and for a name that is none of its tools.
    """
    where = f"mcp({', '.join(map(show_value, command))})"
    if not command:
        raise GraphError("mcp(): pass the command of the server, e.g. mcp('python', 'server.py')")
    if processes is not None and processes < 1:
        raise GraphError(f"{where}: processes={processes}; it must be a whole number of at least 1")
    if own and processes is not None:
        raise GraphError(f"{where}: own=True starts one process per conversation, so processes={processes} has no effect; leave it out")
    try:
        importlib.import_module("mcp")
    except ModuleNotFoundError as error:
        raise GraphError("mcp: the package mcp is not installed: pip install 'rlgraph-dataflow[environments]'") from error
    server = McpServer(tuple(command), tuple(sorted((env or {}).items())), None if cwd is None else str(cwd), processes or 1)
    try:
        found = run_in_thread(_list_tools(server))
    except (ToolError, TimeoutError) as error:
        raise GraphError(f"{where}: {error or f'no answer within {START_S:g} s'}") from None
    missing = sorted(set(only or ()) - {tool.name for tool in found})
    if missing:
        raise GraphError(f"{where} has no tools {missing}; it has {sorted(tool.name for tool in found)}")
    taken = [tool for tool in found if only is None or tool.name in only]
    if own:
        return [Tool(tool.name, partial(_call_session, tool.name), _tool_schema(tool), OwnServer(server)) for tool in taken]
    return [Tool(tool.name, partial(_call_server, server, tool.name), _tool_schema(tool)) for tool in taken]


async def close_servers() -> None:
    """End the servers of the running event loop."""
    for sessions in _RUNNING.pop(asyncio.get_running_loop(), {}).values():
        for session in sessions:
            await _end(session)


class OwnSession:
    """The server of one conversation. It starts at the first call, and again at the call after one that found it dead."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._sessions: list[_Session] = []

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | list[dict[str, str]]:
        """Call a tool."""
        if not self._sessions or not self._sessions[-1].usable():
            self._sessions.append(_start_session(self.server))
        return await _answer(self._sessions[-1], name, arguments)

    async def close(self) -> None:
        """End the server."""
        for session in self._sessions:
            await _end(session)


async def _call_session(name: str, session: OwnSession, /, **arguments: Any) -> str | list[dict[str, str]]:
    return await session.call_tool(name, arguments)


async def _call_server(server: McpServer, name: str, /, **arguments: Any) -> str | list[dict[str, str]]:
    return await _answer(_session(server), name, arguments)


async def _answer(session: _Session, name: str, arguments: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """Call a tool. Returns its text, or the parts of a message if there are images among them."""
    session.calls += 1
    try:
        client = await asyncio.wait_for(asyncio.shield(session.ready), START_S)
        result = await client.call_tool(name, dict(arguments))
    except ToolError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever the SDK raises for a server that has died)
        session.ended.set()  # the next call starts another one, if this one has died
        raise ToolError(f"{name}: {_inner(error)!s:.300}") from None
    finally:
        session.calls -= 1
    parts = [_read_part(part) for part in result.content]
    if result.is_error:
        raise ToolError("\n".join(part.get("text", "") for part in parts))
    if any(part["type"] == "image" for part in parts):
        return [piece for part in parts for piece in (part, {"type": "text", "text": "\n"})][:-1]
    return "\n".join(part["text"] for part in parts)


def _read_part(part: Any) -> dict[str, str]:
    """Convert a part of a result to one of a message; a part that is neither text nor an image is named in a text."""
    if part.type == "image":
        return {"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"}
    found = (part.resource if part.type == "resource" else part).model_dump(include={"text"}).get("text")
    return {"type": "text", "text": f"({part.type} left out: only text and images are read)" if found is None else found}


def _session(server: McpServer) -> _Session:
    """Choose the process of the server with the fewest calls under way; start one where there is room for more."""
    mine = _RUNNING.setdefault(asyncio.get_running_loop(), {})
    sessions = mine[server] = [one for one in mine.get(server, ()) if one.usable()]
    idle = min(sessions, key=lambda one: one.calls, default=None)
    if idle is None or (idle.calls and len(sessions) < server.processes):
        idle = _start_session(server)
        sessions.append(idle)
    return idle


def _start_session(server: McpServer) -> _Session:
    session = _Session(server)
    session.task = asyncio.ensure_future(session.run())
    return session


async def _list_tools(server: McpServer) -> list[Any]:
    session = _session(server)
    try:
        client = await asyncio.wait_for(asyncio.shield(session.ready), START_S)
        return list((await client.list_tools()).tools)
    finally:
        await close_servers()


async def _end(session: _Session) -> None:
    session.ended.set()
    if session.task is not None:
        with contextlib.suppress(asyncio.CancelledError):
            await session.task


def _tool_schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


def _inner(error: BaseException) -> BaseException:
    """The error within groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
