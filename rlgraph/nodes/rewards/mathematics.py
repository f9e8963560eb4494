"""Mathematical answers compared by `math-verify`, each comparison within a time limit."""

import atexit
import importlib.util
import json
import queue
import select
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rlgraph.errors import DataError, RlgraphError

START_S = 60.0  # for a process to load the package, which a busy machine may take long for


@dataclass(frozen=True)
class MathVerify:
    """Whether a response states a mathematical answer equal to the right one, by `math-verify`."""

    limit_s: float

    def __call__(self, response: str, answer: str) -> float:
        """Return 1 where the answers are equal, 0 where not or where comparing them takes longer than the limit."""
        children = _children.setdefault(self.limit_s, Children(self.limit_s))
        return float(children.equal(response, answer))

    @property
    def __name__(self) -> str:
        return "math_verify"


def math_verify(*, limit_s: float = 10.0) -> MathVerify:
    """Return a scorer for `rlgraph.reward`: 1 for a response whose mathematical answer equals the field `answer`, else 0.

    Comparisons run in processes of their own, `concurrency` of them, which are ended after `limit_s`: a policy may well write an
    expression that takes for ever, and scores 0 for it as for any other wrong answer.
    Raises DataError if the package `math-verify` is missing.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise DataError("math_verify: the package math-verify is not installed: pip install 'rlgraph-dataflow[rewards]'")
    return MathVerify(limit_s)


@dataclass
class Children:
    """Processes that compare, as many as calls run at the same time."""

    limit_s: float
    idle: "queue.LifoQueue[subprocess.Popen[str]]" = field(default_factory=queue.LifoQueue)

    def __post_init__(self) -> None:
        atexit.register(self.close)

    def close(self) -> None:
        """End the idle processes; the others end when their pipe does."""
        while not self.idle.empty():
            child = self.idle.get()
            child.kill()
            child.communicate()

    def equal(self, response: str, answer: str) -> bool:
        """Return what a process says within the limit; one that does not answer is ended and counts as no."""
        try:
            child = self.idle.get_nowait()
        except queue.Empty:
            child = _started()
        if not _said(child, (response, answer), self.limit_s):
            child.kill()
            child.communicate()
            return False
        assert child.stdout is not None
        equal = bool(json.loads(child.stdout.readline() or "false"))
        if child.poll() is None:
            self.idle.put(child)
        return equal


_children: dict[float, Children] = {}  # of this process, by their limit


def _started() -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", str(Path(__file__).with_name("math_child.py"))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    if not (_said(child, ("1", "1"), START_S) and child.stdout.readline().strip() == "true"):
        child.kill()
        child.communicate()
        raise RlgraphError(f"math_verify: a process that compares 1 with 1 did not say that they are equal within {START_S:g} s")
    return child


def _said(child: "subprocess.Popen[str]", pair: tuple[str, str], limit_s: float) -> bool:
    """Ask, and return whether the process says something, or ends, within the limit."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(pair) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return False
    return bool(select.select([child.stdout], [], [], limit_s)[0])
