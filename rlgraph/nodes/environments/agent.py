"""Environments that answer the turns of a model, and the limits of a conversation with one."""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlgraph import notices, settings
from rlgraph.engines.hf.chat_template import ChatPrompt
from rlgraph.errors import GraphError, show_value
from rlgraph.nodes.environments.messages import FORMATS, Message, ToolCall, Turn
from rlgraph.nodes.prompts import plural
from rlgraph.settings import Count, Natural, Positive, Seconds
from rlgraph.values.pool import Pool

SPECIAL = {"prompt": "prompt_texts", "messages": "prompt_messages"}  # the values of parameters with these names
METHODS = ("reset", "step", "close")


class Environment(Protocol):
    """Answers the turns of one conversation. Write a small class; `generator.rollout(prompts, agent=Class)` makes an instance for each
    response.

    The parameters of the class name fields of the prompt's item, like the parameters of a reward: `Guess(answer="4")`. `prompt`
    is the prompt's text, and `messages` its conversation.

    A class may also have `async def truncated(self, said)`, which returns a Turn. If `max_tokens`, `max_turns` or `most_cost` cuts the
    conversation off, it is called with the model's last, possibly incomplete turn, and its reward counts.

    >>> class Guess:
    ...     def __init__(self, answer: str) -> None:
    ...         self.answer = answer
    ...     async def reset(self):
    ...         return [Message("user", "Guess my number.")]
    ...     async def step(self, said):
    ...         return Turn(reward=float(said.content == self.answer), done=True)
    ...     async def close(self): ...
    >>> Agent(Guess).reads(["prompt_texts", "answers"])
    {'answer': 'answers'}
    """

    async def reset(self) -> Sequence[Message] | None:
        """Begin, and return the opening messages of the conversation, or None to start from the prompt."""

    async def step(self, said: Message) -> Turn:
        """Answer the turn `said` of the model."""

    async def close(self) -> None:
        """Free its resources. Called once, however the conversation ends."""


@settings.refuse_unknown
@dataclass(frozen=True, eq=False)
class Agent:
    """An environment with the limits of its conversations, for `generator.rollout(prompts, agent=Agent(Guess))`.

    >>> import rlgraph as rg
    >>> class Guess:
    ...     def __init__(self, answer: str) -> None:
    ...         self.answer = answer
    ...     async def reset(self):
    ...         return [rg.agents.Message("user", "Guess my number.")]
    ...     async def step(self, said):
    ...         right = said.content == self.answer
    ...         return rg.agents.Turn([rg.agents.Message("user", "No.")], reward=float(right), done=right)
    ...     async def close(self): ...
    >>> prompts = rg.prompts([{"prompt": "", "answer": "4"}], count=1)
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts, agent=rg.Agent(Guess, deadline_s=5), group_size=4)
    >>> rollout.columns[-2:]
    ('rewards', 'token_rewards')

    * `deadline_s`: the most seconds per call of `reset`, `step` or `close`.
    * `turn_tokens`: the most tokens per turn of the model. A longer turn is cut off there and answered. None: no limit.
    * `conversation_s`: the most seconds per conversation. None: no limit.
    * `output_characters`: the most characters in the messages of one turn. Longer text is cut off.
    * `most_cost`: the conversation ends after the turn at which the sum of its turns' `cost` reaches this. None: no limit.
    * `warm`: the environments beyond `concurrency` that are created and reset ahead, while their conversations wait for a place.
    * `shared`: one environment for all responses to a prompt. Its methods get the number of the response in its group as a last argument.
    * `calls`: the format in which the model writes calls of tools, parsed to `said.tool_calls`: "hermes", "llama3_json", "pythonic",
      "qwen3_coder", "vllm:NAME" for a parser of vLLM, or a function of the text and the tools' schemas. None: nothing is parsed.
    * `keep_thinking`: earlier turns stay as the model has written them, even if its template would drop their thinking.
    * `pool`: the host cores for environments. None: the cores of the generator's process.
    * `environment`: the class of your environment; its parameters name columns of the prompts, one value each.

    An environment that raises, hangs or returns a wrong value ends its conversation (`finish_reasons` 3), and the run continues.
    Raises GraphError for a class without the three async methods, or whose parameters are not names.
    """

    environment: Callable[..., Environment]
    deadline_s: Seconds = 60.0
    conversation_s: Seconds | None = None
    turn_tokens: Count | None = None
    output_characters: Count = 65536
    shared: bool = False
    most_cost: Positive | None = None
    warm: Natural = 0
    calls: str | Callable[..., Sequence[ToolCall]] | None = None
    keep_thinking: bool = False
    pool: Pool | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        if self.calls is not None:
            check_format("Agent", self.calls)
        _check_environment(f"Agent(environment={show_value(self.environment)})", self.environment)
        if self.pool is not None and self.pool.cpus is None:
            raise GraphError(f"Agent(pool=Pool('{self.pool.name}')): environments run on host cores: Pool('{self.pool.name}', cpus=n)")

    def reads(self, carried: Sequence[str]) -> Mapping[str, str]:
        """Name the column of each parameter of the environment, among the columns of the prompts."""
        known = {p.name: p for p in inspect.signature(self.environment).parameters.values()}
        columns = {name: SPECIAL.get(name, name if name in carried else plural(name)) for name in known}
        return {name: column for name, column in columns.items() if column in carried or known[name].default is inspect.Parameter.empty}

    def warn_without_outcome(self, node: str) -> None:
        """Report at the launch that a conversation which is cut off has no outcome, if the environment does not score it."""
        if isinstance(self.environment, type) and not hasattr(self.environment, "truncated"):
            notices.here.say(
                f"node '{node}': {self.environment.__name__} has no `async def truncated(self, said)`, so a conversation that a limit cuts "
                "off has only the rewards of its steps so far"
            )

    def scores_cut_off(self, made: Any) -> Callable[..., Awaitable[Turn]] | None:
        """Find the method by which an environment scores conversations that a limit cuts off; None if it has none."""
        return getattr(made, "truncated", None)  # it is optional for an environment

    def make(self, columns: Mapping[str, str], item: Mapping[str, Any]) -> Environment:
        """Make the environment of a conversation from the `item` of its prompt, a value for each column. Raises the errors of the class."""
        images = str(item.get("prompt_images", "[]"))
        return self.environment(**{name: convert_argument(name, item[column], images) for name, column in columns.items()})


def convert_argument(name: str, value: Any, images: str = "[]") -> Any:
    """Convert the value of a column for a parameter of this name, with the images of its prompt: a JSON list of data URLs."""
    if name == "messages":
        shown = iter(json.loads(images))
        return [Message.of(message, shown) for message in ChatPrompt.from_json(value).messages]
    return value.item() if isinstance(value, torch.Tensor) else value


def check_format(what: str, calls: str | Callable[..., Any]) -> None:
    """Raise GraphError for an unknown call format."""
    if isinstance(calls, str) and calls not in FORMATS and not calls.removeprefix("vllm:") != calls:
        raise GraphError(
            f"{what}(calls={show_value(calls)}): calls is one of {sorted(FORMATS)}, 'vllm:' with the name of a parser of vLLM, or a "
            "function "
            "of a turn's text and the tools' schemas"
        )


def _check_environment(where: str, environment: Callable[..., Any]) -> None:
    for name in METHODS if isinstance(environment, type) else ():
        if not inspect.iscoroutinefunction(inspect.getattr_static(environment, name, None)):
            raise GraphError(f"{where}: an environment is a class with `async def reset(self)`, `step(self, said)` and `close(self)`")
    if not inspect.iscoroutinefunction(inspect.getattr_static(environment, "truncated", _none)):
        raise GraphError(f"{where}: truncated is a method `async def truncated(self, said)` that returns an rg.agents.Turn")
    kinds = {p.kind for p in inspect.signature(environment).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
        raise GraphError(f"{where}: its parameters must name fields of the prompt, e.g. (self, answer)")


async def _none() -> None:
    """Stand in for a method that a class lacks."""
