"""Tools that a response can call between its turns, and the environments that answer it."""

import ast
import inspect
import json
import operator
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlgraph import settings
from rlgraph.errors import GraphError, shown
from rlgraph.graph.nodes import Pool
from rlgraph.nodes import sandbox
from rlgraph.nodes.sandbox import Limits, ToolError
from rlgraph.settings import Count, Name, Seconds

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_EXAMPLE = '<tool_call>{"name": "python", "arguments": {"code": "print(2 ** 10)"}}</tool_call>'
MOST_CALLS = 8  # of one turn


class Environment(Protocol):
    """Answers the turns of one conversation. Write a small class; `Tools(environment=Class)` makes one object for each response.

    The parameters of the class name the prompt's columns that it gets, as those of a reward do: `Class(answers="4")`.
    """

    async def reply(self, text: str) -> str | None:
        """Answer the `text` of a turn with the text that the model reads next, or with None to end the conversation."""


@dataclass(frozen=True)
class Tool:
    """A tool that a model calls by name: an async function of keyword arguments. The model reads the `str` of its result."""

    name: Name
    function: Callable[..., Awaitable[object]]

    def __post_init__(self) -> None:
        settings.check(self)


async def _python(code: str, limits: Limits, accept_missing: tuple[str, ...]) -> str:
    return await sandbox.run(code, limits, accept_missing)


@dataclass(frozen=True)
class Python(Tool):
    """Runs Python code in a process of its own, within `limits`: no network, no files but a folder of its own, no new processes.

    The launch fails if this machine lacks a layer of the sandbox, `namespaces`, `landlock` or `seccomp`, unless `accept_missing` names
    it. `rg.tools.python` has the default limits. Call it for a tool with others:
    `rg.tools.python(accept_missing=("namespaces",), limits=Limits(seconds=5))`.

    Raises GraphError for a name that is no layer.
    """

    name: Name = "python"
    function: Callable[..., Awaitable[object]] = _python
    limits: Limits = field(default_factory=Limits)
    accept_missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        sandbox.check_layers(self.accept_missing)

    def __call__(self, *, limits: Limits | None = None, accept_missing: tuple[str, ...] | None = None) -> "Python":
        """Copy this tool with other limits or other layers in `accept_missing`."""
        accepted = self.accept_missing if accept_missing is None else accept_missing
        return replace(self, limits=limits or self.limits, accept_missing=accepted)

    @property
    def settings(self) -> dict[str, object]:
        """The arguments of a call beside those that the model gives."""
        return {"limits": self.limits, "accept_missing": self.accept_missing}


async def _calculate(expression: str) -> str:
    return _plain(calculated(expression))


python = Python()
calculator = Tool("calculator", _calculate)


@dataclass(frozen=True, eq=False)
class Tools:
    """Tools on a pool of host cores, for `generator.rollout(prompts, tools=tools)`.

    >>> import rlgraph as rg
    >>> async def search(query): return f"no page about {query}"
    >>> tools = rg.Tools([rg.tools.calculator, search], pool=rg.Pool("tools", cpus=4))
    >>> sorted(tools.by_name())
    ['calculator', 'search']

    A tool is `rg.tools.python`, `rg.tools.calculator`, or an async function of your own. The model calls it by name with arguments,
    `<tool_call>{"name": "python", "arguments": {"code": "…"}}</tool_call>`, and reads `<tool_response>…</tool_response>`. With
    `environment=` a class of your own answers instead. As many calls run at once as the pool has cores. The model reads an error in
    place of the result if a call raises or exceeds `deadline_s`.

    Raises GraphError for no tool, a tool that is not async, two tools of one name, or a pool of GPUs.
    """

    tools: Sequence[Tool | Callable[..., Awaitable[object]]] = ()
    pool: Pool = field(default_factory=lambda: Pool("tools", cpus=2))
    environment: Callable[..., Environment] | None = None
    deadline_s: Seconds = 30.0
    output_characters: Count = 4096

    def __post_init__(self) -> None:
        settings.check(self)
        if not self.tools and self.environment is None:
            raise GraphError("Tools([]) has no tool; pass at least one, as Tools([rg.tools.python], pool=...)")
        if self.tools and self.environment is not None:
            raise GraphError("Tools(tools, environment=...) has both; an environment of your own answers by itself: leave the tools out")
        if self.environment is not None and not inspect.iscoroutinefunction(getattr(self.environment, "reply", None)):
            raise GraphError(f"Tools(environment={shown(self.environment)}): an environment is a class with `async def reply(self, text)`")
        if self.environment is not None:
            kinds = {p.kind for p in inspect.signature(self.environment).parameters.values()}
            if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
                raise GraphError(
                    f"Tools(environment={shown(self.environment)}): its parameters name the columns it is made with, as (answers)"
                )
        names = [tool.name for tool in self.by_name().values()]
        for tool in self.tools:
            if not isinstance(tool, Tool) and not inspect.iscoroutinefunction(tool):
                raise GraphError(f"Tools: {shown(tool)} is no tool; pass rg.tools.python, or an async function: `async def search(query)`")
        if len(names) < len(self.tools):
            raise GraphError(f"Tools: two tools have one name among {names}; a model calls a tool by its name")
        if self.pool.cpus is None:
            raise GraphError(
                f"tools are on pool '{self.pool.name}', which is of GPUs; tools run on host cores: Pool('{self.pool.name}', cpus=n)"
            )

    def by_name(self) -> dict[str, Tool]:
        """Map each name to its tool; a plain function becomes a tool of its own name."""
        found = [tool if isinstance(tool, Tool) else Tool(getattr(tool, "__name__", repr(tool)), tool) for tool in self.tools]
        return {tool.name: tool for tool in found}

    @property
    def reads(self) -> tuple[str, ...]:
        """The prompt's columns that a user's environment is made with."""
        return () if self.environment is None else tuple(inspect.signature(self.environment).parameters)

    def answering(self, item: Mapping[str, Any]) -> Environment:
        """Make the environment of a conversation from the columns of its prompt."""
        if self.environment is None:
            return ToolCalls(self)
        return self.environment(**{name: item[name] for name in self.reads})

    def check(self) -> None:
        """Raise GraphError where this machine cannot run one of the tools."""
        for tool in self.by_name().values():
            if isinstance(tool, Python):
                sandbox.check(tool.limits, tool.accept_missing)


@dataclass
class ToolCalls:
    """Calls the tools that a turn asks for, one after the other, and answers with their results. A turn without a call is the last."""

    tools: Tools
    calls: int = 0
    failures: int = 0

    async def reply(self, text: str) -> str | None:
        asked = CALL.findall(text)[:MOST_CALLS]
        if not asked:
            return None
        results = [await self._call(call) for call in asked]
        return "".join(f"\n<tool_response>\n{result}\n</tool_response>\n" for result in results)

    async def _call(self, text: str) -> str:
        self.calls += 1
        try:
            tool, arguments = self._parsed(text)
            result = await tool.function(**arguments, **(tool.settings if isinstance(tool, Python) else {}))
        except ToolError as error:
            self.failures += 1
            return self._cut(f"error: {error}")
        except Exception as error:  # noqa: BLE001 (a tool's failure is for the model to read, whatever it is)
            self.failures += 1
            return self._cut(f"error: {type(error).__name__}: {error}")
        return self._cut(_plain(result))

    def _parsed(self, text: str) -> tuple[Tool, Mapping[str, Any]]:
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ToolError(f"a call is {CALL_EXAMPLE}") from None
        known = self.tools.by_name()
        if name not in known:
            raise ToolError(f"there is no tool '{name}'; there are {sorted(known)}")
        if not isinstance(arguments, dict):
            raise ToolError("the arguments of a call are named: " + CALL_EXAMPLE)
        return known[name], arguments

    def _cut(self, text: str) -> str:
        most = self.tools.output_characters
        return text.rstrip() if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def may_go_on(environment: Environment, text: str) -> bool:
    """Tell whether another turn could follow this text. True for a user's environment: only its reply would tell."""
    return CALL.search(text) is not None if isinstance(environment, ToolCalls) else True


def _plain(value: object) -> str:
    return value if isinstance(value, str) else str(value)


OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MOST_BITS = 4096  # of an intermediate whole number: a power of larger ones could take hours


def calculated(expression: str) -> float:
    """Evaluate an arithmetic expression of numbers, + - * / // % ** and brackets.

    Raises ToolError for anything else, and for numbers that grow too large.
    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ToolError(f"cannot calculate '{expression[:80]}': {error}") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and left.bit_length() * abs(right) > MOST_BITS:
            raise OverflowError("the power is too large")
        value = OPERATORS[type(node.op)](left, right)
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise OverflowError("the number is too large")
        return value
    raise ValueError("it has more than numbers, + - * / // % ** and brackets")
