"""Every error rlgraph raises. Each message says where, what was found, the rule and the fix.

All of them cross process boundaries, so each carries one string, and a channel's error plain values beside it that say who is at its
other end. What a user gave is put into a message by `shown`.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

MOST_CHARACTERS = 80  # of a value in a message
MOST_ITEMS = 3


def shown(value: Any, most: int = MOST_CHARACTERS) -> str:
    """Print a value for a message on one line, in about `most` characters; a large one is never printed whole.

    >>> shown(0.5), shown([1, 2, 3, 4]), shown({"prompt": "1 + 1 =" * 100})
    ('0.5', '[1, 2, 3, … 4 items]', "{'prompt': '1 + 1 =1 + 1 =1 + 1 =1 +…'}")
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | bytes | bytearray):
        return _text(value, most)
    if hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape):
        return f"{_a(value)} {list(value.shape)} of {value.dtype}"
    if type(value) in (list, tuple, set, frozenset, dict):
        return _items(value, most)
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', '')}"
    if dataclasses.is_dataclass(value) and getattr(value, "__dataclass_params__").repr:  # noqa: B009 (mypy does not know it)
        return _fields(value, most)
    if isinstance(value, Sequence | Set | Mapping) or (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        return f"{_a(value)} of {len(value)} items"
    return _repr(value, most)


def _text(value: str | bytes | bytearray, most: int) -> str:
    if len(value) <= most:
        return repr(value)
    head, unit = repr(value[: max(most - 16, 8)]), "characters" if isinstance(value, str) else "bytes"
    return f"{head[:-1]}…{f' {len(value)} {unit}' if most >= MOST_CHARACTERS else ''}{head[-1]}"


def _items(value: Any, most: int) -> str:
    left, right = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    each = max(most // 2, 12)
    parts: list[str] = []
    for item in itertools.islice(value.items() if isinstance(value, dict) else value, MOST_ITEMS):
        part = f"{shown(item[0], each)}: {shown(item[1], each)}" if isinstance(value, dict) else shown(item, each)
        if parts and sum(map(len, parts)) + len(part) > most:
            break
        parts.append(part)
    if len(value) > len(parts):
        parts.append(f"… {len(value)} items")
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return f"{left}{', '.join(parts)}{comma}{right}" if value or isinstance(value, list | tuple | dict) else f"{type(value).__name__}()"


def _fields(value: Any, most: int) -> str:
    found = [f for f in dataclasses.fields(value) if f.repr and f.default is not getattr(value, f.name, f.default)]
    parts = [f"{f.name}={shown(getattr(value, f.name), max(most // 2, 12))}" for f in found[:MOST_ITEMS]]
    return f"{type(value).__name__}({', '.join([*parts, *(['…'] if len(found) > MOST_ITEMS else [])])})"


def _repr(value: Any, most: int) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 (a user's own class; the message it is printed for matters more)
        return f"{_a(value)} that cannot be printed ({type(error).__name__})"
    plain = " at 0x" not in text and "\n" not in text and len(text) <= most
    return text if plain else _a(value)


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


class RlgraphError(Exception):
    """Base of all errors that rlgraph raises on purpose."""


class GraphError(RlgraphError):
    """A graph breaks a rule; raised while it is declared."""


class PlanError(RlgraphError):
    """A sound graph does not fit the cluster it is compiled for."""


class PlanWarning(UserWarning):
    """What a plan or a comparison of plans rests on is not known; the plan is made all the same, and says it too."""


class ConfigError(RlgraphError):
    """A configuration key or value is unknown, missing or of the wrong type."""


class DataError(RlgraphError):
    """A data set, a model folder or a prompt cannot be used as it is."""


class ChannelError(RlgraphError):
    """Base of the three ways in which a channel stops a worker."""

    channel: str = ""  # its name, where the other end has stopped it
    peer: int = 0  # the process at that end, where it is known


class ChannelClosed(ChannelError):
    """The other end finished and closed the channel."""


class ChannelBroken(ChannelError):
    """The other end failed or died."""


class ChannelTimeout(ChannelError):
    """The other end was silent for longer than the deadline."""


class StalenessError(RlgraphError):
    """A batch is older than the bound of its graph: a defect of rlgraph, never of its user."""


class CertificateError(RlgraphError):
    """A run did what its plan's certificate rules out: a defect of rlgraph, never of its user."""


class NodeError(RlgraphError):
    """A node raised; the message names node, step and worker and holds the original traceback."""


class GuardError(RlgraphError):
    """An update was kept from learning what its guards refuse; the weights are those of before."""


class WorkerDied(RlgraphError):
    """A worker process ended without a word."""


class DispatchError(RlgraphError):
    """What the workers run on gave up, and no worker says why; the message is its own."""


class CheckpointError(RlgraphError):
    """A checkpoint cannot be written, or is not one that this run can go on from."""
