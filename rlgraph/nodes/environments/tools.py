"""Tools that a response can call between its turns, and the environment that calls them."""

import ast
import asyncio
import inspect
import operator
import types
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from rlgraph import settings
from rlgraph.data.images import MARK, read_parts
from rlgraph.errors import GraphError, function_name, show_value
from rlgraph.nodes import sandbox
from rlgraph.nodes.environments.agent import Agent, check_format
from rlgraph.nodes.environments.messages import Message, ToolCall, Turn, call_id
from rlgraph.nodes.sandbox import Limits, LocalSandbox, ToolError
from rlgraph.settings import Count, Name, Seconds
from rlgraph.values.pool import Pool

# A calculator: arithmetic of numbers, and nothing else of Python.

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
MOST_BITS = 4096  # bits of an intermediate whole number: a power of larger numbers could last hours


def calculate(expression: str) -> float:
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


# The JSON schema of a tool, from the signature of its function: what a chat template shows to the model.

KINDS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def schema_of(name: str, function: Callable[..., Any], hidden: Collection[str] = ()) -> dict[str, Any]:
    """Make the schema of a function's arguments, except `hidden` ones. Its docstring's first paragraph is the description.

    >>> async def search(query: str, most: int = 3) -> str:
    ...     "Search the web."
    >>> schema = schema_of("search", search)["function"]
    >>> schema["description"], schema["parameters"]["properties"]
    ('Search the web.', {'query': {'type': 'string'}, 'most': {'type': 'integer'}})
    """
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # an annotation that only a type checker knows
        hints = {}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in hidden and p.kind is not p.VAR_KEYWORD]
    described = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    properties = {p.name: _kind(hints.get(p.name, str)) for p in parameters}
    required = [p.name for p in parameters if p.default is p.empty]
    arguments = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": described, "parameters": arguments}}


def _kind(hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": KINDS.get(type(inner[0]), "string"), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        some = [part for part in inner if part is not type(None)]
        return _kind(some[0]) if len(some) == 1 else {}
    found = KINDS.get(origin or hint)
    items = {"items": _kind(inner[0])} if found == "array" and inner else {}
    return {"type": found, **items} if found else {}


T = TypeVar("T")
MOST_CALLS = 8  # of one turn
NO_DEADLINE_S = 1e9  # each tool call has its own deadline
_SLOTS: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]]" = WeakKeyDictionary()


class KeptByTools(Protocol):
    """The objects that a conversation keeps for its tools between two calls."""

    async def close(self) -> None: ...


@settings.refuse_unknown
@dataclass(frozen=True)
class Tool:
    """A tool that a model calls by name: an async function of keyword arguments. The model reads the `str` of its result.

    `described` is the JSON schema `{"type": "function", "function": {…}}` that its chat template shows to the model; None: the schema is
    made from the function's signature and docstring. `keeps` makes what a conversation keeps for the tool: the function gets it before
    its arguments, and it is closed when the conversation ends. Tools with an equal `keeps` share one.

    * `name`: the name by which the model calls it.
    * `function`: the async function.
    """

    name: Name
    function: Callable[..., Awaitable[object]]
    described: Mapping[str, Any] | None = None
    keeps: Callable[[], KeptByTools] | None = None

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the tool."""
        hidden = tuple(self.settings) if isinstance(self, Python) else ()
        return dict(self.described) if self.described is not None else schema_of(self.name, self.function, hidden)


async def _python(code: str, limits: Limits, accept_missing: tuple[str, ...]) -> str:
    """Run Python code and return what it prints."""
    return await sandbox.run(code, limits, accept_missing)


@settings.refuse_unknown
@dataclass(frozen=True)
class Python(Tool):
    """Runs Python code in a separate process, within `limits`: no network, no files outside of its own folder, no new processes.

    The launch fails if this machine lacks a layer of the sandbox, `namespaces`, `landlock` or `seccomp`, unless `accept_missing` names
    it. `rg.tools.python` has the default limits. Call it for a tool with others:
    `rg.tools.python(accept_missing=("namespaces",), limits=Limits(seconds=5))`. With `keep_files` the calls of a conversation share an
    `rg.agents.LocalSandbox`: what one call has written the next one finds.

    Raises GraphError for the name of an unknown layer.

    * `name`: the name by which the model calls it.
    * `function`: what runs the code; given by the class.
    """

    name: Name = "python"
    function: Callable[..., Awaitable[object]] = _python
    limits: Limits = field(default_factory=Limits)
    accept_missing: tuple[str, ...] = ()
    keep_files: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        sandbox.check_layers(self.accept_missing)
        if self.keeps is not None:
            raise GraphError("Python(keeps=…) has no effect: keep_files=True keeps the files of a conversation")

    def __call__(
        self, *, limits: Limits | None = None, accept_missing: tuple[str, ...] | None = None, keep_files: bool | None = None
    ) -> "Python":
        """Copy this tool with other limits, other layers in `accept_missing`, or files that stay."""
        accepted = self.accept_missing if accept_missing is None else accept_missing
        kept = self.keep_files if keep_files is None else keep_files
        return replace(self, limits=limits or self.limits, accept_missing=accepted, keep_files=kept)

    @property
    def settings(self) -> dict[str, object]:
        """The arguments of a call that the model does not provide."""
        return {"limits": self.limits, "accept_missing": self.accept_missing}


async def _calculate(expression: str) -> str:
    """Calculate an arithmetic expression of numbers, + - * / // % ** and brackets."""
    return str(calculate(expression))


python = Python()
calculator = Tool("calculator", _calculate)


@settings.refuse_unknown
@dataclass(frozen=True, eq=False)
class Tools:
    """Tools on a pool of host cores, for `generator.rollout(prompts, tools=tools)`.

    >>> import rlgraph as rg
    >>> async def search(query: str) -> str:
    ...     "Search the web."
    ...     return f"no page about {query}"
    >>> tools = rg.Tools([rg.tools.calculator, search], pool=rg.Pool("tools", cpus=4))
    >>> sorted(tools.by_name())
    ['calculator', 'search']

    A tool is `rg.tools.python`, `rg.tools.calculator`, or your async function, whose signature and docstring are described to
    the model by its chat template. The model calls it by name with arguments, and reads the `str` of the result, or the error of a call
    that raises, takes longer than `deadline_s` or is malformed. The first turn without a call is the last. A result with images is an
    image of PIL, or a list of parts `{"type": "image", "image": …}` and `{"type": "text", "text": …}`.

    * `calls`: the format of calls: "hermes" (Qwen 2.5 and 3), "llama3_json", "pythonic", "qwen3_coder", "vllm:NAME" for a parser of
      vLLM, or a function of a turn's text and the tools' schemas that returns `rg.agents.ToolCall`s. The launch refuses a format in which
      the model's template does not write calls.
    * `tools`: tools, or async functions.
    * `pool`: the host cores for the tools. One call of `rg.tools.python` runs per core at a time; calls of other tools do not wait.
    * `deadline_s`: the most seconds per call; a later result becomes an error that the model reads.
    * `output_characters`: the most characters of a result. Longer text is cut off.
    * `keep_thinking`: earlier turns stay as the model has written them, even if its template would drop their thinking.

    Raises GraphError for no tool, a tool that is not async, two tools of one name, or a pool of GPUs.
    """

    tools: Sequence[Tool | Callable[..., Awaitable[object]]] = ()
    pool: Pool = field(default_factory=lambda: Pool("tools", cpus=2))
    deadline_s: Seconds = 30.0
    output_characters: Count = 4096
    calls: str | Callable[..., Sequence[ToolCall]] = "hermes"
    keep_thinking: bool = False

    def __post_init__(self) -> None:
        settings.check(self)
        check_format("Tools", self.calls)
        if not self.tools:
            raise GraphError("Tools([]) has no tool; pass at least one, e.g. Tools([rg.tools.python], pool=...)")
        names = [tool.name for tool in self.by_name().values()]
        for tool in self.tools:
            if not isinstance(tool, Tool) and not inspect.iscoroutinefunction(tool):
                raise GraphError(
                    f"Tools: {show_value(tool)} is not a tool; pass rg.tools.python, or an async function: `async def search(query)`"
                )
        if len(names) < len(self.tools):
            raise GraphError(f"Tools: two tools have one name among {names}; a model calls a tool by its name")
        if self.pool.cpus is None:
            raise GraphError(
                f"tools are on pool '{self.pool.name}', a pool of GPUs; tools run on host cores: Pool('{self.pool.name}', cpus=n)"
            )

    def by_name(self) -> dict[str, Tool]:
        """Map each name to its tool; a plain function becomes a tool with the function's name."""
        found = [tool if isinstance(tool, Tool) else Tool(function_name(tool), tool) for tool in self.tools]
        return {tool.name: tool for tool in found}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools, as chat templates describe them to a model."""
        return [tool.schema for tool in self.by_name().values()]

    def agent(self) -> Agent:
        """Make the agent whose environment calls the tools; it bounds each call itself."""
        return Agent(
            partial(ToolCalls, self),
            deadline_s=NO_DEADLINE_S,
            output_characters=MOST_CALLS * (self.output_characters + 100),
            calls=self.calls,
            keep_thinking=self.keep_thinking,
            pool=self.pool,
        )

    def check(self) -> None:
        """Raise GraphError if this machine cannot run one of the tools."""
        for tool in self.by_name().values():
            if isinstance(tool, Python):
                sandbox.check(tool.limits, tool.accept_missing)


class ToolCalls:
    """Calls the tools that a turn asks for, one after the other, and answers with their results. A turn without a call is the last."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self._sandbox: LocalSandbox | None = None
        self._kept: dict[Callable[[], KeptByTools], KeptByTools] = {}

    async def reset(self) -> None:
        return None

    async def step(self, said: Message) -> Turn:
        if not said.tool_calls:
            return Turn(done=True)
        answers = [await self._answer(place, call) for place, call in enumerate(said.tool_calls)]
        failures = [failed for _, failed in answers[:MOST_CALLS]]
        return Turn([answer for answer, _ in answers], info={"calls": len(failures), "failures": sum(failures)})

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
        closing = [self._kept.pop(make).close() for make in list(self._kept)]
        for failed in await asyncio.gather(*closing, return_exceptions=True):
            if failed is not None:
                raise failed

    async def _answer(self, place: int, call: ToolCall) -> tuple[Message, bool]:
        """Make the call at a place of its turn. Returns the answer for the model, and whether the call failed."""
        message = partial(Message, "tool", name=call.name, tool_call_id=call_id(place))
        try:
            if place >= MOST_CALLS:
                raise ToolError(f"a turn calls at most {MOST_CALLS} tools")
            if call.error:
                raise ToolError(call.error)
            known = self.tools.by_name()
            if call.name not in known:
                raise ToolError(f"there is no tool '{call.name}'; the tools are {sorted(known)}")
            result = await self._call_tool(known[call.name], call.arguments)
            text, images = read_parts(result) or (str(result), [])
            text = self._truncate(text)
            return message(text, images=images[: text.count(MARK)]), False
        except ToolError as error:
            failure = str(error)
        except TimeoutError:
            failure = f"no answer within {self.tools.deadline_s:g} s"
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the model reads any failure of a tool)
            failure = f"{type(error).__name__}: {error}"
        return message(self._truncate(f"error: {failure}")), True

    async def _call_tool(self, tool: Tool, arguments: Mapping[str, Any]) -> object:
        if not isinstance(tool, Python):
            kept = [] if tool.keeps is None else [self._kept_for(tool.keeps)]
            return await _await_within_deadline(tool.function(*kept, **arguments), self.tools.deadline_s)
        async with slots(self.tools.pool):
            if tool.keep_files:
                return await self._ran(tool, **arguments)
            return await _await_within_deadline(tool.function(**arguments, **tool.settings), self.tools.deadline_s)

    def _kept_for(self, make: Callable[[], KeptByTools]) -> KeptByTools:
        if make not in self._kept:
            self._kept[make] = make()
        return self._kept[make]

    async def _ran(self, tool: Python, code: str) -> str:
        """Run code in the sandbox of this conversation."""
        if self._sandbox is None:
            self._sandbox = LocalSandbox(tool.limits, tool.accept_missing)
        done = await _await_within_deadline(self._sandbox.exec(code), self.tools.deadline_s)
        if done.failed:
            raise ToolError(f"{done.output}\n{done.failed}".strip())
        return done.output

    def _truncate(self, text: str) -> str:
        most = self.tools.output_characters
        return text.rstrip() if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def slots(pool: Pool) -> asyncio.Semaphore:
    """Find or make the semaphore of a pool's cores in the running event loop."""
    mine = _SLOTS.setdefault(asyncio.get_running_loop(), {})
    return mine.setdefault(pool.name, asyncio.Semaphore(pool.cpus or 1))


async def _await_within_deadline(awaited: Awaitable[T], deadline_s: float) -> T:
    """Await something for `deadline_s` seconds. Unlike `asyncio.wait_for` it does not wait for a task that ignores its cancellation.

    Raises TimeoutError at the deadline.
    """
    task = asyncio.ensure_future(awaited)
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())  # so that asyncio does not report it
        raise TimeoutError
    return task.result()
