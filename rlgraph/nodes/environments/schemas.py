"""The JSON schema of a tool, from the signature of its function: what a chat template shows to the model."""

import inspect
import types
from collections.abc import Callable, Collection
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

KINDS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def schema_of(name: str, function: Callable[..., Any], hidden: Collection[str] = ()) -> dict[str, Any]:
    """Make the schema of a function's arguments, but for `hidden` ones. Its docstring's first paragraph is the description.

    >>> async def search(query: str, most: int = 3) -> str:
    ...     "Search the web."
    >>> schema = schema_of("search", search)["function"]
    >>> schema["description"], schema["parameters"]["properties"]
    ('Search the web.', {'query': {'type': 'string'}, 'most': {'type': 'integer'}})
    """
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # an annotation that only a type checker knows
        hints = {}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in hidden and p.kind is not p.VAR_KEYWORD]
    described = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    properties = {p.name: _kind(hints.get(p.name, str)) for p in parameters}
    required = [p.name for p in parameters if p.default is p.empty]
    arguments = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": described, "parameters": arguments}}


def _kind(hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": KINDS.get(type(inner[0]), "string"), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        some = [part for part in inner if part is not type(None)]
        return _kind(some[0]) if len(some) == 1 else {}
    found = KINDS.get(origin or hint)
    items = {"items": _kind(inner[0])} if found == "array" and inner else {}
    return {"type": found, **items} if found else {}
