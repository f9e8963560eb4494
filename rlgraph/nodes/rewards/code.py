"""Code of a response, scored by running it with test cases in the sandbox."""

import inspect
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlgraph import settings
from rlgraph.errors import NOT_JSON, DataError, GraphError, RlgraphError, show_value
from rlgraph.nodes import sandbox
from rlgraph.nodes.rewards.calls import Scorer
from rlgraph.nodes.sandbox import Limits, ToolError
from rlgraph.settings import Count, Name, Seconds, check_arguments

FENCE = "```"
LANGUAGE = re.compile(r"[ \t]*+([\w+-]*+)")
Worth: TypeAlias = Literal["all", "share"]

# The program of a pair: it reads a real input, and its output excludes stderr.
WITH_INPUT = """
import os as _os, sys as _sys
_file = _os.open("input", _os.O_CREAT | _os.O_RDWR)
_os.write(_file, {given!r}.encode()); _os.lseek(_file, 0, 0); _os.dup2(_file, 0); _os.close(_file)
_sys.stdin = open(0, encoding="utf-8", closefd=False)
_os.dup2(_os.open("errors", _os.O_CREAT | _os.O_WRONLY), 2)
exec(compile({code!r}, "code", "exec"), {{"__name__": "__main__"}})
"""
# An assertion after the program, and a word that no output contains by chance.
WITH_ASSERTION = """
_names = {{"__name__": "code"}}
exec(compile({code!r}, "code", "exec"), _names)
exec(compile({given!r}, "test", "exec"), _names)
print("\\n" + {word!r}, flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A test: an input and the right output, or an assertion, whose output is None."""

    given: str
    output: str | None


@dataclass(frozen=True)
class CodeTests(Scorer):
    """Runs the code of a response with each test of the item's field `tests`, in separate processes."""

    tests: Name
    score: Worth
    limits: Limits
    accept_missing: tuple[str, ...]
    concurrency: Count
    retries: None = None

    def __post_init__(self) -> None:
        settings.check(self)
        sandbox.check_layers(self.accept_missing)
        if not self.tests.isidentifier() or self.tests == "response":
            raise GraphError(f"code(tests={show_value(self.tests)}): tests is the name of a field of the data, e.g. tests='tests'")
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("response", self.tests)]
        # While it is made: `inspect.signature` reads the fields of the data from it, as from a function.
        object.__setattr__(self, "__signature__", inspect.Signature(parameters))

    @property
    def __name__(self) -> str:
        return "code"

    def check(self) -> None:
        """Try the sandbox. Raises GraphError if this machine lacks one of its layers."""
        sandbox.check(self.limits, self.accept_missing, "rg.scorers.code", "rg.scorers.code")

    async def __call__(self, **columns: Any) -> float:
        """Score a response. Raises DataError for invalid tests."""
        cases, code = cases_of(columns[self.tests]), code_in(columns["response"])
        if not code.strip():
            return 0.0
        passed = 0
        for case in cases:
            right = await self._passes(code, case)
            if not right and self.score == "all":
                return 0.0
            passed += right
        return passed / len(cases)

    async def _passes(self, code: str, case: Case) -> bool:
        word = secrets.token_hex(16)
        program = (WITH_ASSERTION if case.output is None else WITH_INPUT).format(code=code, given=case.given, word=word)
        try:
            output = await sandbox.run(program, self.limits, self.accept_missing)
        except ToolError:
            await self._check_sound()
            return False
        return output.rstrip().endswith("\n" + word) if case.output is None else _lines(output) == _lines(case.output)

    async def _check_sound(self) -> None:
        """Raise RlgraphError if the sandbox cannot run an empty program either: then the response's code is not at fault."""
        try:
            await sandbox.run("", self.limits, self.accept_missing)
        except ToolError as error:
            raise RlgraphError(f"rg.scorers.code: the sandbox cannot run an empty program: {error}") from None


@check_arguments()
def code(
    *,
    tests: Name = "tests",
    score: Worth = "all",
    seconds: Seconds = 10.0,
    memory_bytes: Count = 1 << 30,
    output_bytes: Count = 1 << 20,
    accept_missing: tuple[str, ...] = (),
    concurrency: Count | None = None,
) -> CodeTests:
    """Make a scorer for `rlgraph.reward`: the Python code of a response, run with the test cases of the item's field `tests`.

    >>> import rlgraph as rg
    >>> double = '[{"input": "2", "output": "4"}, {"input": "-1", "output": "-2"}]'
    >>> prompts = rg.prompts([{"prompt": "Read a number and print its double.", "tests": double}], count=1)
    >>> rg.reward(rg.scorers.code(), prompts, rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts)).columns
    ('rewards',)

    The field holds JSON: pairs `[{"input": …, "output": …}]` or `{"inputs": […], "outputs": […]}`, assertions `["assert f(1) == 2"]`, or
    `{"assert_case": […]}`. The code is the last fenced block, or else the whole response. Each test runs in a process of the sandbox
    (docs/developers/security.md) with its own `seconds`, `memory_bytes` and `output_bytes`. Outputs are equal if their lines are equal,
    except for space at the ends of lines. `score` "all" gives 1 if all tests pass, else 0, and stops at the first that fails; "share" gives
    the share that pass. A pair's right output never enters the process. Code can find and forge an assertion in its own process, so prefer
    pairs.

    `accept_missing`: as for `rg.tools.python`. `concurrency` responses run at a time, by default as many as this program has cores.
    Raises GraphError before anything starts if the sandbox cannot run, and DataError for a field without tests.
    """
    limits = Limits(seconds=seconds, memory_bytes=memory_bytes, output_bytes=output_bytes)
    return CodeTests(tests, score, limits, accept_missing, concurrency or len(os.sched_getaffinity(0)))


def code_in(response: str) -> str:
    """Extract the code of a response: the last fenced block of Python or without a language, or else the whole response.

    >>> code_in("First:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = list(_blocks(response))
    python = [block for language, block in blocks if language.lower() in ("", "python", "python3", "py")]
    return str(python[-1]) if python else "" if blocks else response


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the code of each fenced block, in time linear in the text: a model writes it."""
    start = response.find(FENCE)
    while start >= 0 and (line := response.find("\n", start)) >= 0:
        end = response.find(FENCE, line)
        language = LANGUAGE.match(response, start + len(FENCE))
        yield language[1] if language else "", response[line + 1 : end if end >= 0 else None]
        start = response.find(FENCE, end + len(FENCE)) if end >= 0 else -1


def cases_of(tests: Any) -> list[Case]:
    """Read the tests of an item. Raises DataError for anything but a list of at least one test."""
    try:
        found = _cases(json.loads(tests) if isinstance(tests, str) else tests)
    except (*NOT_JSON, LookupError, TypeError) as error:
        reason = f": {type(error).__name__}: {error}"
        found = []
    else:
        reason = ""
    if not found:
        raise DataError(f'code: the tests of an item are {show_value(tests)}{reason}; write JSON, e.g. [{{"input": "2", "output": "4"}}]')
    return found


def _cases(tests: Any) -> list[Case]:
    if isinstance(tests, Mapping):
        if tests.get("fn_name"):
            raise ValueError("tests that call a function by its name are not supported; write them as assertions")
        asserted = [Case(str(given), None) for given in tests.get("assert_case") or ()]
        pairs = zip(tests.get("inputs") or (), tests.get("outputs") or (), strict=True)
        return [*asserted, *(Case(_text(given), _text(output)) for given, output in pairs)]
    if isinstance(tests, str | bytes):
        raise TypeError("a text, not a list")
    return [Case(test, None) if isinstance(test, str) else Case(_text(test["input"]), _text(test["output"])) for test in tests]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().splitlines()]
