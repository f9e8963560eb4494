"""Conversions: a value that means a number, a text or a flag becomes one of Python's own, such as numpy's numbers and paths."""

import math
import operator
import os
import sys
from typing import Any

LEAST, MOST = -(1 << 63), (1 << 63) - 1  # of whole numbers: what columns and files hold


class Wrong(Exception):
    """A field does not accept a value; the message says what to write instead, if that is known."""


def to_int(name: str, value: Any) -> int:
    """Convert every value that `operator.index` accepts, except True and False. Raises Wrong for others, as all functions here.

    >>> import numpy
    >>> to_int("size", numpy.int64(2))
    2
    """
    if type(value) is not int:
        if isinstance(value, bool | str) or not hasattr(type(value), "__index__"):
            raise Wrong(_advise_number(name, value, whole=True))
        try:
            return to_int(name, int(operator.index(value)))
        except TypeError:  # a tensor or an array of several
            raise Wrong from None
    if not LEAST <= value <= MOST:
        raise Wrong("whole numbers of more than 64 bits are not supported")
    return int(value)


def to_float(name: str, value: Any) -> float:
    """Convert every finite number, except True and False."""
    number: float = value
    if type(value) not in (int, float):
        if isinstance(value, bool | str) or not hasattr(type(value), "__float__") or dimensions(value):
            raise Wrong(_advise_number(name, value, whole=False))
        try:
            number = value if isinstance(value, int) else operator.index(value)
        except TypeError:
            number = float(value)
    if not abs(number) <= sys.float_info.max:
        raise Wrong
    return number


def to_text(name: str, value: Any) -> str:
    """Convert text and paths."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise Wrong
    return text if type(text) is str else str(text)


def to_name(name: str, value: Any) -> str:
    """Convert text that can stand in files, and paths."""
    text = to_text(name, value)
    try:
        text.encode()
    except UnicodeEncodeError:
        fix = "it has half of a surrogate pair, which UTF-8 cannot hold: decode it again, or replace that character"
        raise Wrong(fix) from None
    return text


def to_bool(name: str, value: Any) -> bool:
    """Convert True and False, and those of numpy."""
    if isinstance(value, bool) or (type(value).__name__ in ("bool", "bool_") and not dimensions(value)):
        return bool(value)
    meant = {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower()) if isinstance(value, str | int) else None
    raise Wrong("" if meant is None else f"write {name}={meant}")


def to_callable(name: str, value: Any) -> Any:
    """Accept functions and other callables."""
    if not callable(value):
        raise Wrong
    return value


def dimensions(value: Any) -> int:
    """Count the dimensions of an array or a tensor; 0 for any other value."""
    found = getattr(value, "ndim", 0)  # of the arrays of any library
    return found if isinstance(found, int) else 0


def _advise_number(name: str, value: Any, *, whole: bool) -> str:
    """Say how to write a number that was given as text, or as a float that is whole."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return ""
    if isinstance(value, bool) or not math.isfinite(number) or (whole and number != int(number)):
        return ""
    return f"write {name}={int(number) if whole or number == int(number) else number}{', without quotes' if isinstance(value, str) else ''}"
