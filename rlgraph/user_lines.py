"""The user's lines of an error: what a traceback is without the frames of rlgraph and of libraries, unless RLGRAPH_TRACE is set."""

import os
import sys
import sysconfig
import traceback
from functools import cache
from types import TracebackType

MOST = 4  # lines of code


def whole_traces() -> bool:
    """Whether the user asks for whole tracebacks."""
    return os.environ.get("RLGRAPH_TRACE", "0") not in ("", "0")


def user_lines(error: BaseException) -> str:
    """Format the last frames of the user's own code that lead to an error, or to its cause; empty if there are none."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    frames = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__) if _is_users(frame.filename)]
    once = {(frame.filename, frame.lineno): frame for frame in frames}
    return "".join(traceback.format_list(list(once.values())[-MOST:]))


def short(error: BaseException) -> str:
    """Format an error with the user's lines before it; with its whole traceback if it has none, or if RLGRAPH_TRACE is set."""
    lines = "" if whole_traces() else user_lines(error)
    return lines + "".join(traceback.format_exception_only(error)) if lines else "".join(traceback.format_exception(error))


def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends a program: one of rlgraph's on purpose without the frames of rlgraph."""
    errors = sys.modules.get("rlgraph.errors")
    if errors is None or not isinstance(error, errors.RlgraphError):
        sys.__excepthook__(kind, error, trace)
    else:
        print(short(error), end="", file=sys.stderr)


@cache
def _is_users(file: str) -> bool:
    here = os.path.dirname(os.path.abspath(__file__))
    paths = sysconfig.get_paths()
    roots = (here, f"{here}_cli", paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"])
    inside = any(os.path.abspath(file).startswith(root + os.sep) for root in roots)
    return not inside and not file.startswith("<frozen") and os.path.basename(file) != "rlgraph"  # the script of the command
