"""Check before anything starts that the user's objects can be sent to other processes, and name objects that cannot."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

try:
    import cloudpickle
except ImportError:  # an environment without rlgraph's requirements
    from ray import cloudpickle  # a copy of it, which needs a second to import

from rlgraph.errors import GraphError, function_name
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Operation


def pickle_value(value: Any) -> bytes:
    """Pickle a value as for a worker: functions and classes without an importable module are sent by value."""
    found: bytes = cloudpickle.dumps(value)
    return found


def sendable(value: Any) -> bool:
    """Whether a value can be sent to a worker."""
    try:
        pickle_value(value)
    except Exception:  # noqa: BLE001 (a user's object may raise anything)
        return False
    return True


DEPTH = 4  # of attributes and items to search


def check_sendable(graph: Graph) -> None:
    """Raise GraphError if an object cannot be sent, with the node, the function and the part that is the reason."""
    for node in graph.nodes:
        given = node.traits.given
        for value in (node.operation,) if given is None else given:
            if sendable(value):
                continue
            *way, culprit = _way(value, ())
            what = f"its '{'.'.join(way)}' is {_describe_type(culprit)}" if way else f"it is {_describe_type(culprit)}"
            raise GraphError(
                f"node '{node.name}': {_title(value)} cannot be sent to a worker: {what}, which cannot leave its process; "
                "create it inside the function, at its first call"
            )


def _way(value: Any, way: tuple[str, ...]) -> tuple[Any, ...]:
    """Find the innermost object that cannot be sent, and the names that lead to it."""
    if len(way) < DEPTH:
        for name, part in _parts(value):
            if part is not value and not sendable(part):
                return _way(part, (*way, name) if name else way)
    return (*way, value)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from value.keywords.items()
        yield from ((str(place), part) for place, part in enumerate(value.args))
    elif inspect.ismethod(value):
        yield "", value.__self__
    elif inspect.isfunction(value):
        found = inspect.getclosurevars(value)
        yield from {**found.nonlocals, **found.globals}.items()
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(place), part) for place, part in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from (("" if name in ("function", "scoring") else name, part) for name, part in vars(value).items())


def _title(value: Any) -> str:
    if isinstance(value, Operation):
        return f"operation '{type(value).__name__}'"
    function = getattr(value, "function", value)  # of an object that wraps a function
    function = function.func if isinstance(function, functools.partial) else function
    return f"function '{function_name(function)}'"


def _describe_type(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind}" if type(value).__module__ in ("builtins", "_thread", "_io") else f"a {type(value).__module__}.{kind}"
