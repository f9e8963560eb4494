"""Notices of fallbacks and of old spellings: each is said once, in the job's output and report."""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from rlgraph.errors import escape_controls

# Notices of fallbacks: what works differently than asked, or slower than it could. Each is said once, in the job's output and report.
#
# A worker keeps its notices for its next report, and the driver prints them. A process that does not report logs them.

log = logging.getLogger("rlgraph.notices")


class Notices:
    """The notices of this process, each text once. `carried` says that a report fetches them with `take_new`.

    >>> notices = Notices()
    >>> notices.carried = True
    >>> notices.say("no NVLink: tensors go through the host"), notices.take_new(), notices.take_new()
    (None, ['no NVLink: tensors go through the host'], [])
    """

    def __init__(self) -> None:
        self.carried = False
        self._said: dict[str, bool] = {}  # the text, and whether it was taken

    def say(self, text: str) -> None:
        """Say a sentence, unless this process has said it before."""
        text = escape_controls(text)
        if text in self._said:
            return
        self._said[text] = not self.carried
        if not self.carried:
            log.warning("%s", text)

    def list_all(self) -> tuple[str, ...]:
        """List all that was said."""
        return tuple(self._said)

    def forget(self) -> None:
        """Begin as a new process does: nothing has been said."""
        self._said.clear()

    def take_new(self) -> list[str]:
        """Take the notices since the last call."""
        found = [text for text, gone in self._said.items() if not gone]
        self._said |= dict.fromkeys(found, True)
        return found


here = Notices()


# Old spellings of parameters and attributes: they work for one version, with a warning that says the new spelling.

C = TypeVar("C", bound=Callable[..., Any])


def accept_old_names(**names: str) -> Callable[[C], C]:
    """Accept parameters of a function, or fields of a dataclass, by their old names too; `names` maps each old name to the new one.

    The old name raises a DeprecationWarning at the caller's line. Raises TypeError for a call that gives both names.

    >>> @accept_old_names(freshest="latest")
    ... def edge(latest=False):
    ...     return latest
    >>> with warnings.catch_warnings(action="ignore"):
    ...     edge(freshest=True)
    True
    """

    def wrap(target: C) -> C:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc] # the one of this class

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{target.__name__}() got {new}= and its old name {old}=; pass only {new}=")
                warnings.warn(f"{target.__name__}({old}=...) is now {target.__name__}({new}=...)", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        if not isinstance(target, type):
            return cast(C, call)  # of the same parameters
        target.__init__ = call  # type: ignore[misc] # what a decorator is for
        return target

    return wrap


def old_attribute(old: str, new: str) -> Any:
    """Keep an attribute of a class under its old name, for reading and writing; both warn at the caller's line.

    >>> class Place:
    ...     listen_fd = 3
    ...     meeting = old_attribute("meeting", "listen_fd")
    >>> with warnings.catch_warnings(action="ignore"):
    ...     Place().meeting
    3
    """

    def warn(owner: Any) -> None:
        name = type(owner).__name__
        warnings.warn(f"{name}.{old} is now {name}.{new}", DeprecationWarning, stacklevel=3)

    def read(owner: Any) -> Any:
        warn(owner)
        return getattr(owner, new)

    def write(owner: Any, value: Any) -> None:
        warn(owner)
        setattr(owner, new, value)

    return property(read, write)


def accept_old_methods(cls: type, **names: str) -> None:
    """Accept methods that a class defines by their old names too; `names` maps each old name to the new one.

    The base of such classes, an ABC, calls it in `__init_subclass__`. An old name raises a DeprecationWarning at the line of the class.

    >>> from abc import ABC, abstractmethod
    >>> class Shape(ABC):
    ...     def __init_subclass__(cls):
    ...         accept_old_methods(cls, surface="area")
    ...
    ...     @abstractmethod
    ...     def area(self): ...
    >>> with warnings.catch_warnings(action="ignore"):
    ...     class Square(Shape):
    ...         def surface(self):
    ...             return 4
    >>> Square().area()
    4
    """
    for old in names.keys() & vars(cls).keys():
        warnings.warn(f"{cls.__name__}.{old} is now {cls.__name__}.{names[old]}", DeprecationWarning, stacklevel=4)
        setattr(cls, names[old], vars(cls)[old])
