"""Environments of Gymnasium, played in text."""

import asyncio
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlgraph import settings
from rlgraph.errors import GraphError, show_value
from rlgraph.nodes.environments.messages import Message, Turn
from rlgraph.settings import Name

# How actions are read in what a model has said, and how observations are shown to it: what the adapters share.

Act: TypeAlias = Callable[[Message], Any]  # raises ValueError, which the model reads, if the text has no action
Show: TypeAlias = Callable[[Any], str]


def shown_value(value: Any) -> str:
    """Write an observation as text: text as it is, a mapping with one value as that value, and others as JSON.

    >>> shown_value("Go on."), shown_value({"message": "Go on."}), shown_value({"row": 1, "column": [2, 3]})
    ('Go on.', 'Go on.', '{"row": 1, "column": [2, 3]}')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and len(value) == 1:
        return shown_value(next(iter(value.values())))
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Convert an array or a number of numpy."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@dataclass(frozen=True, eq=False)
class Gymnasium:
    """Makes environments of Gymnasium for conversations: see `gymnasium`."""

    make: str | Callable[..., Any]
    instruction: Name
    actions: Mapping[str, Any] | None = None
    act: Act | None = None
    show: Show = shown_value
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings.check(self)
        if self.actions is not None and self.act is not None:
            raise GraphError(
                "gymnasium(actions=…, act=…): pass one of the two: the words of the actions, or a function that finds an action in a text"
            )

    def __call__(self, seed: int | None = None) -> "GymnasiumGame":
        return GymnasiumGame(self, seed)

    def make_environment(self) -> Any:
        """Make an environment."""
        if not isinstance(self.make, str):
            return self.make(**self.settings)
        try:
            package = importlib.import_module("gymnasium")
        except ModuleNotFoundError as error:
            raise GraphError("gymnasium: the package gymnasium is not installed: pip install 'rlgraph-dataflow[environments]'") from error
        return package.make(self.make, **self.settings)


def gymnasium(
    make: str | Callable[..., Any],
    *,
    instruction: str,
    actions: Sequence[str] | Mapping[str, Any] | None = None,
    act: Act | None = None,
    show: Show = shown_value,
    **settings: Any,
) -> Gymnasium:
    """Play an environment of Gymnasium in text, as `agent=rg.environments.gymnasium("FrozenLake-v1", instruction=…, actions=…)`.

    >>> import rlgraph as rg
    >>> lake = rg.environments.gymnasium(
    ...     "FrozenLake-v1", instruction="Reach G. Say left, down, right or up.", actions=["left", "down", "right", "up"], desc=["SF", "FG"]
    ... )
    >>> prompts = rg.prompts([{"prompt": "", "seed": n} for n in range(100)], count=8)
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts, agent=lake, group_size=4, max_turns=10)

    * `make`: an id, or a function that makes the environment. `settings` are passed to it.
    * `instruction`: the beginning of the first message; the first observation follows.
    * `actions`: the word of each action, in their order, or with their values. The last of the words in a turn is its action.
    * `act`: a function of what the model has said that returns the action. It raises ValueError with what the model reads where it finds
      none. Without `actions` and `act`, an action is the turn's text, or for whole numbers the last number in it.
    * `show`: a function of an observation that returns its text. For a game that renders text, leave it out and pass
      `render_mode="ansi"`: that text follows.

    A turn without an action is answered, and counted as `agent/info/invalid`. `seed` of a prompt seeds its environments. Each call runs
    in a thread. An episode that is terminated or truncated ends the conversation.
    """
    words = actions if isinstance(actions, Mapping | None) else {word: number for number, word in enumerate(actions)}
    return Gymnasium(make, instruction, words, act, show, settings)


class GymnasiumGame:
    """One episode."""

    def __init__(self, of: Gymnasium, seed: int | None) -> None:
        self.of, self.seed = of, seed
        self.game: Any = None

    async def reset(self) -> list[Message]:
        self.game = await asyncio.to_thread(self.of.make_environment)
        seen, _ = await asyncio.to_thread(lambda: self.game.reset(seed=self.seed))
        return [Message("user", f"{self.of.instruction}\n\n{await self._render(seen)}")]

    async def step(self, said: Message) -> Turn:
        try:
            action = self._action(said)
        except ValueError as error:
            return Turn([Message("user", str(error))], info={"invalid": 1.0})
        seen, reward, ended, cut, _ = await asyncio.to_thread(self.game.step, action)
        return Turn([Message("user", await self._render(seen))], reward=float(reward), done=bool(ended or cut))

    async def close(self) -> None:
        if self.game is not None:
            await asyncio.to_thread(self.game.close)

    async def _render(self, seen: Any) -> str:
        drawn = await asyncio.to_thread(self.game.render) if self.game.render_mode == "ansi" else None
        return drawn if isinstance(drawn, str) else self.of.show(seen)

    def _action(self, said: Message) -> Any:
        if self.of.act is not None:
            return self.of.act(said)
        if self.of.actions is not None:
            words = {word.lower(): value for word, value in self.of.actions.items()}
            found = re.findall("|".join(rf"\b{re.escape(word)}\b" for word in words), said.content.lower())
            if not found:
                raise ValueError(f"Say one of: {', '.join(self.of.actions)}.")
            return words[found[-1]]
        return _action_of(self.game.action_space, said.content.strip())


def _action_of(space: Any, text: str) -> Any:
    """Read an action of a space in a text. Raises ValueError, which the model reads."""
    if space.contains(text):
        return text
    found = re.findall(r"-?\d+", text)
    if found and space.contains(int(found[-1])):
        return int(found[-1])
    raise ValueError(f"{show_value(text)} is not an action: {space}.")
