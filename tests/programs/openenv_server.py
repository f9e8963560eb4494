"""A server of the real OpenEnv, run by the Python of its own environment: a number is guessed. Prints its port."""

import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Said(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Said:
        self.number = (seed or 0) % 10
        return Said(text="Find my number.", done=False, reward=None)

    def step(self, action: Guess, timeout_s: float | None = None, **others: Any) -> Said:
        if action.number < 0:
            raise RuntimeError("the game has crashed")
        found = action.number == self.number
        return Said(text="Found." if found else "Higher." if self.number > action.number else "Lower.", done=found, reward=float(found))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=8)
    config = uvicorn.Config(app, log_level="error", ws="websockets")
    uvicorn.Server(config).run(sockets=[listening])
    sys.exit(0)
