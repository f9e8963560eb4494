"""Environments of an OpenEnv server, each in a session of its own over a WebSocket."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlgraph import settings
from rlgraph.environments.gymnasium import Act, Show, shown_value
from rlgraph.errors import GraphError, show_value
from rlgraph.nodes.environments.messages import Message, Turn
from rlgraph.settings import Name

MOST_BYTES = 64 << 20  # of one answer


def _show_fields(seen: Mapping[str, Any]) -> str:
    """Show the fields of an observation that have a value, without what is about it."""
    return shown_value({name: value for name, value in seen.items() if name != "metadata" and value is not None})


@dataclass(frozen=True, eq=False)
class OpenEnv:
    """Makes sessions with a server of OpenEnv: see `openenv`."""

    url: Name
    act: str | Act = "message"
    show: str | Show = _show_fields
    instruction: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings.check(self)
        if self.url.partition("://")[0] not in ("http", "https", "ws", "wss"):
            raise GraphError(f"openenv({show_value(self.url)}): pass the server's address, e.g. 'http://127.0.0.1:8000'")

    def __call__(self, seed: int | None = None) -> "OpenEnvSession":
        return OpenEnvSession(self, seed)

    @property
    def socket(self) -> str:
        """The address of its sessions."""
        return "ws" + self.url.removeprefix("http").removeprefix("ws").rstrip("/") + "/ws"


def openenv(url: str, *, act: str | Act = "message", show: str | Show = _show_fields, instruction: str = "", **options: Any) -> OpenEnv:
    """Play the environment of an OpenEnv server: `agent=rg.environments.openenv("http://127.0.0.1:8000", act="code")`.

    * `act`: the field of the action that gets the turn's text, or a function of what the model has said that returns the action, a
      mapping. It may raise ValueError with what the model reads instead.
    * `show`: the field of an observation that the model reads, or a function of the observation, a mapping.
    * `instruction`: the beginning of the first message; the first observation follows.
    * `options`: passed to `reset`. `seed` of a prompt is, too.

    Each conversation is a session of its own, so the server has to take as many at once (`max_concurrent_envs`) as the rollout's
    `concurrency`. An action that the server refuses is answered with its words, and counted as `agent/info/invalid`; any other error of
    the server ends the conversation. The session ends with its connection: when the worker dies, the server's side does too.
    Tested with openenv 0.10.0.
    """
    return OpenEnv(url, act, show, instruction, options)


class OpenEnvSession:
    """A session with a server of OpenEnv."""

    def __init__(self, of: OpenEnv, seed: int | None) -> None:
        self.of, self.seed = of, seed
        self.connection: Any = None

    async def reset(self) -> list[Message]:
        from websockets.asyncio.client import connect

        self.connection = await connect(self.of.socket, max_size=MOST_BYTES, proxy=None)
        given = dict(self.of.options) | ({} if self.seed is None else {"seed": self.seed})
        seen = (await self._request("reset", given))["observation"]
        return [Message("user", "\n\n".join(text for text in (self.of.instruction, self._show(seen)) if text))]

    async def step(self, said: Message) -> Turn:
        try:
            action = self.of.act(said) if callable(self.of.act) else {self.of.act: said.content}
            found = await self._request("step", action)
        except ValueError as error:
            return Turn([Message("user", str(error))], info={"invalid": 1.0})
        return Turn([Message("user", self._show(found["observation"]))], reward=float(found.get("reward") or 0.0), done=bool(found["done"]))

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message, and return the data of its answer. Raises ValueError for an action that the server refuses."""
        await self.connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self.connection.recv())
        if answer["type"] == "error":
            wrong = ValueError if answer["data"].get("code") == "VALIDATION_ERROR" else RuntimeError
            raise wrong(f"{answer['data'].get('code')}: {answer['data'].get('message')}")
        return dict(answer["data"])

    def _show(self, seen: Mapping[str, Any]) -> str:
        if callable(self.of.show):
            return self.of.show(seen)
        return shown_value(seen[self.of.show])
