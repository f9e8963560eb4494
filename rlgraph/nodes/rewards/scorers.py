"""Ready-made scorers for `rlgraph.reward`: `reasoning_gym` tasks, mathematics by `math-verify`, code by its tests, and judges."""

import atexit
import functools
import importlib
import importlib.util
import json
import math
import os
import queue
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from rlgraph import settings
from rlgraph.errors import DataError, RlgraphError, show_value
from rlgraph.nodes.rewards.calls import Scorer
from rlgraph.nodes.rewards.code import code
from rlgraph.nodes.rewards.judge import judge, score_in
from rlgraph.nodes.rewards.scoring import Score
from rlgraph.settings import Count, Seconds, check_arguments

# Comparison of mathematical answers by `math-verify`, each within a time limit.

START_S = 180.0  # for a process to load the package: a busy machine is slow


@dataclass(frozen=True)
class MathVerify(Scorer):
    """Scores a response by `math-verify`: does it state a mathematical answer equal to the right one?"""

    limit_s: Seconds
    concurrency: Count
    retries: None = None

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, response: str, answer: str | float) -> Score:
        """Compare the answers: 1 if they are equal, 0 if they differ or the comparison exceeds the limit twice.

        `pred` is the answer found.
        """
        children = _children.setdefault(self.limit_s, Children(self.limit_s))
        equal, found = children.compare(response, text_of(answer))
        return Score(float(equal), pred=found)

    @property
    def __name__(self) -> str:
        return "math_verify"


@check_arguments()
def math_verify(*, limit_s: Seconds = 10.0, concurrency: Count | None = None) -> MathVerify:
    """Make a scorer for `rlgraph.reward`: 1 for a response whose mathematical answer equals the field `answer`, else 0.

    >>> import rlgraph as rg
    >>> right = rg.scorers.math_verify(concurrency=1)
    >>> float(right("It is $1/2$.", answer="0.5")), float(right("It is $2$.", answer="0.5"))
    (1.0, 0.0)

    The score has the answer that it found (`Score.pred`), so `rg.evaluate` has `maj@k`. All right answers count as one answer, however they
    are written. `concurrency` comparisons run at a time, each in a separate process; by default as many as the cores that this program may
    use. A policy can write an expression whose comparison never ends, so a comparison is killed after `limit_s`, repeated once in a new
    process, and then scores 0.

    Raises DataError if the package `math-verify` is missing. A call raises it if the right answer itself is at fault.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise DataError("math_verify: the package math-verify is not installed: pip install 'rlgraph-dataflow[rewards]'")
    return MathVerify(limit_s, concurrency or len(os.sched_getaffinity(0)))


@dataclass
class Children:
    """The comparing processes, as many as there are concurrent calls."""

    limit_s: float
    idle: "queue.LifoQueue[subprocess.Popen[str]]" = field(default_factory=queue.LifoQueue)

    def __post_init__(self) -> None:
        atexit.register(self.close)

    def close(self) -> None:
        """Kill the idle processes. Busy ones end when their pipe closes."""
        while not self.idle.empty():
            child = self.idle.get()
            child.kill()
            child.communicate()

    def compare(self, response: str, answer: str) -> tuple[bool, str]:
        """Compare in an idle process, or a new one; return the answer found too.

        A process that exceeds the limit, or dies, is replaced, and the pair compared once more: the machine may have been busy. If it fails
        again, the response is at fault and counts as unequal, without an answer. If the right answer also fails by itself, raises
        DataError.
        """
        try:
            child = self.idle.get_nowait()
        except queue.Empty:
            child = _start_child()
        found = self._ask_child(child, response, answer) or self._ask_child(_start_child(), response, answer)
        if found is None and self._ask_child(_start_child(), answer, answer) is None:
            raise DataError(
                f"math_verify: the right answer {show_value(answer)} cannot be compared with itself within {self.limit_s:g} s; fix "
                "it, leave the row out, or raise limit_s"
            )
        return found or (False, "")

    def _ask_child(self, child: "subprocess.Popen[str]", response: str, answer: str) -> tuple[bool, str] | None:
        """Have a process compare, and keep the process; None if it fails and is killed."""
        assert child.stdout is not None
        line = child.stdout.readline() if _send_pair(child, (response, answer), self.limit_s) else ""
        if not line:
            child.kill()
            child.communicate()
            return None
        self.idle.put(child)
        equal, found = json.loads(line)
        return bool(equal), str(found)


def text_of(answer: object) -> str:
    """Write a right answer as text: a number without an exponent. Raises DataError for anything but text and numbers."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
        raise DataError(f"math_verify: the field answer is {show_value(answer)}; it is text, or a finite number")
    return format(Decimal(repr(answer)), "f")


_children: dict[float, Children] = {}  # of this process, by time limit


def _start_child() -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", str(Path(__file__).with_name("math_child.py"))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    if not (_send_pair(child, ("1", "1"), START_S) and child.stdout.readline().startswith("[true")):
        child.kill()
        child.communicate()
        raise RlgraphError(f"math_verify: a test process did not find 1 equal to 1 within {START_S:g} s")
    return child


def _send_pair(child: "subprocess.Popen[str]", pair: tuple[str, str], limit_s: float) -> bool:
    """Send a pair, and return whether the process answers, or ends, within the limit."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(pair) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return False
    return bool(select.select([child.stdout], [], [], limit_s)[0])


__all__ = ["Score", "answer_in", "code", "judge", "math_verify", "reasoning_gym", "score_in"]

TAG_OR_BOX = re.compile(r"<answer>|\\boxed\{([^{}]*)\}")
END = "</answer>"


@dataclass(frozen=True)
class ReasoningGym:
    """A task of `reasoning_gym`: a data set for `rlgraph.prompts`, and `score` for `rlgraph.reward`.

    Each process makes the items again from `seed`, so a batch carries only their numbers.
    """

    task: str
    size: int
    seed: int
    settings: tuple[tuple[str, Any], ...] = ()
    instruction: str = field(default="{question}")

    def __post_init__(self) -> None:
        if "{question}" not in self.instruction:
            raise DataError(f"reasoning_gym: instruction={show_value(self.instruction)} has no {{question}}, where the question goes")
        _entries(self)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        question = _entries(self)[index]["question"]
        return {"prompt": self.instruction.replace("{question}", question), "item": index, "data_source": self.task}

    def score(self, response: str, item: int) -> float:
        """Score the answer of a response by `reasoning_gym`, from 0 to 1. See `answer_in` for the answer."""
        return float(_entries(self).score_answer(answer=answer_in(response), entry=_entries(self)[item]))


@functools.cache
def _entries(task: ReasoningGym) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise DataError("reasoning_gym: the package reasoning-gym is not installed: pip install 'rlgraph-dataflow[rewards]'") from error
    try:
        return gym.create_dataset(task.task, size=task.size, seed=task.seed, **dict(task.settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"reasoning_gym: task '{task.task}' with {dict(task.settings)} cannot be created: {error}") from error


def reasoning_gym(task: str, *, size: int, seed: int = 0, instruction: str = "{question}", **settings: Any) -> ReasoningGym:
    """Make a task of `reasoning_gym`, such as `reasoning_gym("chain_sum", size=500, max_terms=3)`.

    >>> import rlgraph as rg
    >>> task = rg.scorers.reasoning_gym("chain_sum", size=10, max_terms=2, instruction="{question} End with \\\\boxed{}.")
    >>> rg.prompts(task, count=4).columns
    ('prompt_texts', 'prompt_ids', 'items', 'data_sources')
    >>> task.score("I do not know.", item=0)
    0.0

    Pass it to `rlgraph.prompts` and its `score` to `rlgraph.reward`. `instruction` wraps each question at `{question}`.
    Raises DataError if the package is missing, or has no such task or setting.
    """
    return ReasoningGym(task, size, seed, tuple(sorted(settings.items())), instruction)


def answer_in(response: str) -> str:
    r"""Extract the answer: the content of the last `<answer>…</answer>` or `\boxed{…}`, or else the whole response, stripped.

    >>> answer_in("So it is <answer> 42 </answer>."), answer_in(r"So it is \boxed{42}."), answer_in(" 42 ")
    ('42', '42', '42')
    """
    found, at, ends = "", 0, True  # in time linear in the text: a model writes it
    while opened := TAG_OR_BOX.search(response, at):
        at = opened.end()
        if opened[1] is not None:
            found = opened[1]
        elif ends and (ends := (end := response.find(END, at)) >= 0):
            found, at = response[at:end], end + len(END)
    return (found or response).strip()
