"""All errors that rlgraph raises. Each message says where, what was found, the rule and the fix.

Errors cross process boundaries, so each carries one string; a channel's error also carries plain values that say which process is at
the other end. `shown` prints the values of a user in a message.
"""

import dataclasses
import difflib
import inspect
import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache
from types import TracebackType
from typing import Any

MOST_CHARACTERS = 80  # of a value in a message
MOST_ITEMS = 3
LEAST_CHARACTERS = 12  # of an item; deeper lists are not printed
# All but tabs and ends of lines: a terminal obeys them.
CONTROLS = {c: f"\\x{c:02x}" for c in (*range(9), *range(11, 32), *range(127, 160))}
NOT_JSON = (ValueError, RecursionError)  # what json.loads raises for a text of outside: a deep list is a RecursionError


def choices(name: str, known: Iterable[str], they: str = "there are", most: int = 40) -> str:
    """Say for an unknown name which one was meant, if one is near, and what there is.

    >>> choices("anwers", ["answers", "levels"]), choices("x", ["answers", "levels"], "they have")
    ("did you mean 'answers'? There are answers, levels", 'they have answers, levels')
    """
    names = [str(each) for each in known]
    near = difflib.get_close_matches(str(name), names, 1)
    if near and len(names) > most:
        return f"did you mean {near[0]!r}?"
    listed = ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "") if names else "none"
    return f"did you mean {near[0]!r}? {they[:1].upper()}{they[1:]} {listed}" if near else f"{they} {listed}"


def escape_controls(text: str) -> str:
    """Replace the characters that a terminal obeys by their escapes.

    >>> escape_controls("a \\x1b[31mred\\x1b[0m line")
    'a \\\\x1b[31mred\\\\x1b[0m line'
    """
    return text.translate(CONTROLS)


def show_value(value: Any, most: int = MOST_CHARACTERS) -> str:
    """Print a value on one line of a message, in about `most` characters; a large value is never printed whole.

    >>> show_value(0.5), show_value([1, 2, 3, 4]), show_value({"prompt": "1 + 1 =" * 100})
    ('0.5', '[1, 2, 3, … 4 items]', "{'prompt': '1 + 1 =1 + 1 =1 + 1 =1 +…'}")
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | bytes | bytearray):
        return _text(value, most)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{_a(value)} {list(value.shape)} of {value.dtype}" if len(value.shape) else _repr(value, most)
    if type(value) in (list, tuple, set, frozenset, dict):
        return _items(value, most)
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if dataclasses.is_dataclass(value) and getattr(value, "__dataclass_params__").repr:  # noqa: B009 (mypy does not know it)
        return _fields(value, most)
    if isinstance(value, Sequence | Set | Mapping) or (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        return f"{_a(value)} of {len(value)} items"
    return _repr(value, most)


def function_name(function: object) -> str:
    """Name a function; an object that is called as one has no name, and is shown.

    >>> function_name(len), function_name(3)
    ('len', '3')
    """
    name = getattr(function, "__name__", None)  # any callable may be given
    return name if isinstance(name, str) else show_value(function)


def _text(value: str | bytes | bytearray, most: int) -> str:
    if len(value) <= most:
        return repr(value)
    head, unit = repr(value[: max(most - 16, 8)]), "characters" if isinstance(value, str) else "bytes"
    return f"{head[:-1]}…{f' {len(value)} {unit}' if most >= MOST_CHARACTERS else ''}{head[-1]}"


def _items(value: Any, most: int) -> str:
    left, right = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    if most < LEAST_CHARACTERS and value:
        return f"{left}…{right}"
    each = max(most // 2, LEAST_CHARACTERS) if most > LEAST_CHARACTERS else LEAST_CHARACTERS - 1
    parts: list[str] = []
    for item in itertools.islice(value.items() if isinstance(value, dict) else value, MOST_ITEMS):
        part = f"{show_value(item[0], each)}: {show_value(item[1], each)}" if isinstance(value, dict) else show_value(item, each)
        if parts and sum(map(len, parts)) + len(part) > most:
            break
        parts.append(part)
    if len(value) > len(parts):
        parts.append(f"… {len(value)} items")
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return f"{left}{', '.join(parts)}{comma}{right}" if value or isinstance(value, list | tuple | dict) else f"{type(value).__name__}()"


def _fields(value: Any, most: int) -> str:
    # One that fails as it is made lacks some.
    found = [f for f in dataclasses.fields(value) if f.repr and f.default is not getattr(value, f.name, f.default)]
    parts = [f"{f.name}={show_value(getattr(value, f.name), max(most // 2, 12))}" for f in found[:MOST_ITEMS]]
    return f"{type(value).__name__}({', '.join([*parts, *(['…'] if len(found) > MOST_ITEMS else [])])})"


def _repr(value: Any, most: int) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 (a class of the user; the message that it is for matters more)
        return f"{_a(value)} that cannot be printed ({type(error).__name__})"
    plain = " at 0x" not in text and "\n" not in text and len(text) <= most
    return text if plain else _a(value)


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


class RlgraphError(Exception):
    """Base of all errors that rlgraph raises on purpose.

    >>> import rlgraph as rg
    >>> try:
    ...     rg.Pool("train", share=0)
    ... except rg.RlgraphError as error:
    ...     print(error)
    Pool(share=0): share is a positive number, or None to let the compiler choose
    """

    def __str__(self) -> str:  # it quotes names, data and errors of users
        return escape_controls(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Format the error of a notebook's cell as `hook` does that of a program; IPython calls this."""
        return escape_controls(short(self)).splitlines()


class GraphError(RlgraphError):
    """A graph breaks a rule; raised where it is declared.

    >>> import rlgraph as rg
    >>> rg.feedback("weights", depth=-1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rlgraph.errors.GraphError: feedback 'weights' has depth=-1; depth is ...
    """


class PlanError(RlgraphError):
    """A valid graph does not fit its cluster or its costs, or an argument of a plan is wrong.

    >>> import rlgraph as rg
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("gpu", gpus=2)).rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1))
    >>> rg.compile(rg.Graph("sampling", rollout), rg.Cluster(gpus=1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rlgraph.errors.PlanError: graph 'sampling' needs at least 2 GPUs ...
    """


class PlanWarning(UserWarning):
    """A plan, or a comparison of plans, rests on an assumption that may not hold. The plan is made, and its text repeats the warning."""


class ConfigError(RlgraphError):
    """A configuration key or value is unknown, missing or of the wrong type.

    >>> import dataclasses, rlgraph as rg
    >>> rg.config(dataclasses.make_dataclass("Config", [("steps", int, 100)]), ["step=3"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rlgraph.errors.ConfigError: setting 'step': Key 'step' not in 'Config'. Did you mean: 'steps'?...
    """


class DataError(RlgraphError):
    """A data set, a model folder or a column cannot be used as it is."""


class ChannelError(RlgraphError):
    """Base of the three errors by which a channel stops a worker."""

    channel: str = ""  # its name, if the other end stopped it
    peer: int = 0  # the process at that end, if it is known
    host: str = ""  # the address of the host that it is on, if that is another one


class ChannelClosed(ChannelError):
    """The other end finished and closed the channel."""


class ChannelBroken(ChannelError):
    """The other end failed or died."""


class ChannelTimeout(ChannelError):
    """The other end did nothing for longer than the deadline."""


class StalenessError(RlgraphError):
    """A batch is older than its graph allows. This is a bug in rlgraph; please report it."""


class CertificateError(RlgraphError):
    """A run violated the certificate of its plan, or found different bits with `exact=True`. This is a bug in rlgraph; please report it."""


class NodeError(RlgraphError):
    """A node raised an error; the message names node, step and worker, and includes the original traceback."""


class GuardError(RlgraphError):
    """The guards of an update refused a step and stop the job; the weights are unchanged."""


class WorkerDied(RlgraphError):
    """A worker process ended without a report."""


class DispatchError(RlgraphError):
    """The dispatch (Ray) failed: it names the process of Ray that ended, or has the message of Ray if no worker reported a cause."""


class CheckpointError(RlgraphError):
    """A checkpoint cannot be written, or this run cannot continue from it."""


class ExportError(RlgraphError):
    """The export of a model failed. No partial folder is left behind."""


# The user's lines of an error: what a traceback is without the frames of rlgraph and of libraries, unless RLGRAPH_TRACE is set.

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
        print(escape_controls(short(error)), end="", file=sys.stderr)


@cache
def _is_users(file: str) -> bool:
    here = os.path.dirname(os.path.abspath(__file__))
    paths = sysconfig.get_paths()
    roots = (here, f"{here}_cli", paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"])
    inside = any(os.path.abspath(file).startswith(root + os.sep) for root in roots)
    inside = inside or not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))  # another one, e.g. of PYTHONPATH
    return not inside and not file.startswith("<frozen") and os.path.basename(file) != "rlgraph"  # the script of the command
