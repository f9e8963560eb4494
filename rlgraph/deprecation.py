"""Old spellings of parameters and attributes: they work for one version, with a warning that says the new spelling."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def renamed(**names: str) -> Callable[[C], C]:
    """Accept parameters of a function, or fields of a dataclass, by their old names too; `names` maps each old name to the new one.

    The old name raises a DeprecationWarning at the caller's line. Raises TypeError for a call that gives both names.

    >>> @renamed(freshest="latest")
    ... def edge(latest=False):
    ...     return latest
    >>> with warnings.catch_warnings(action="ignore"):
    ...     edge(freshest=True)
    True
    """

    def wrap(target: C) -> C:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{target.__name__}() was given {new}= and {old}=, its old name; give {new}= alone")
                warnings.warn(f"{target.__name__}({old}=...) is now {target.__name__}({new}=...)", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        if not isinstance(target, type):
            return call  # type: ignore[return-value]
        target.__init__ = call  # type: ignore[misc]
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
