"""Signatures: read the annotations of fields and parameters, bind arguments, and show `help` plain types without rules."""

import dataclasses
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin

from rlgraph.errors import GraphError, choices, show_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
P = ParamSpec("P")
R = TypeVar("R")


def field_annotations(cls: type["DataclassInstance"]) -> dict[str, Any]:
    """Resolve the annotation of each field of a dataclass, each in the module of its class."""
    found: dict[str, tuple[Any, str]] = {}
    for owner in reversed(cls.__mro__):
        found |= {name: (annotation, owner.__module__) for name, annotation in inspect.get_annotations(owner).items()}
    return {field.name: _resolve_annotation(*found[field.name]) for field in dataclasses.fields(cls)}


def parameter_annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Resolve the annotation of each parameter of a function, without `self` and `*inputs`."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()  # as written: what `help` shows has no rules
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
    return {p.name: _resolve_annotation(p.annotation, function.__module__) for p in named}


def _resolve_annotation(annotation: Any, module: str) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[module]))
    except NameError:  # imported only for the type checker
        return Any


def bind(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind arguments to parameters. Raises TypeError as Python does, and says which argument was meant by an unknown one."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        there = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for key in (key for key in kwargs if key not in there):
            said = choices(key, [each for each in there if each != "self"], "its arguments are")
            raise TypeError(f"{user_name(function)}() got an unexpected keyword argument '{key}'; {said}") from None
        function(*args, **kwargs)  # raises a TypeError that names the function
        raise


def user_name(function: Callable[..., Any]) -> str:
    """Name the function as a user calls it: by the class, for an `__init__`."""
    return function.__qualname__.removesuffix(".__init__").rpartition(".")[2]


def refuse_unknown(cls: type[C]) -> type[C]:
    """Decorate a dataclass that users make: an argument that it does not have is an error that lists those it has.

    >>> refuse_unknown(dataclasses.make_dataclass("Sample", [("size", int)]))(sise=1)
    Traceback (most recent call last):
    rlgraph.errors.GraphError: Sample(sise=1): there is no setting 'sise'; did you mean 'size'? The settings are size
    """
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    names, plain = frozenset(known), cls.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= names:
            name = next(name for name in kwargs if name not in names)
            said = choices(name, known, "the settings are")
            raise GraphError(f"{cls.__name__}({name}={show_value(kwargs[name])}): there is no setting '{name}'; {said}")
        plain(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign] # what a decorator is for
    return document_arguments(cls)


def document_arguments(cls: type[C]) -> type[C]:
    """Decorate a dataclass: `help` shows plain types, and the arguments that its bases document. `refuse_unknown` does it too."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    show_plain_types(cls.__init__, {field.name: field.default_factory for field in dataclasses.fields(cls)})
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}{_inherited_arguments(cls, known)}"
    return cls


def _inherited_arguments(cls: type, known: Sequence[str]) -> str:
    """List the fields that the bases of a class document, and it does not: `help` and the pages of the API then have each."""
    inherited: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:-1]):
        for item in f"\n{inspect.cleandoc(base.__doc__ or '')}".split("\n* `")[1:]:
            name, text = item.partition("`")[0], item.partition("\n\n")[0].rstrip()
            if name in known and f"`{name}" not in (cls.__doc__ or ""):
                inherited[name] = f"* `{text}"  # the words of the nearest base stay
    return "\n".join(["\n\nInherited arguments:\n", *inherited.values()]) if inherited else ""


class _Text(str):
    """A default that a signature shows as it is written."""

    __repr__ = str.__str__


def show_plain_types(function: Callable[P, R], factories: Mapping[str, Any] = MappingProxyType({})) -> Callable[P, R]:
    """Let `help` show a function without the rules in its annotations, and with the defaults that a dataclass makes."""
    signature = inspect.signature(function)
    made = {name: factory for name, factory in factories.items() if factory is not dataclasses.MISSING}
    defaults = {name: _Text(f"{factory.__name__}()") for name, factory in made.items()}
    parameters = [
        parameter.replace(annotation=_without_rules(parameter.annotation), default=defaults.get(name, parameter.default))
        for name, parameter in signature.parameters.items()
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # what `inspect` looks for
    return function


def _without_rules(annotation: Any) -> Any:
    """An annotation without what `Annotated` adds to its types."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _without_rules(arguments[0])
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_without_rules, arguments))
    if origin in (tuple, list, Sequence, Mapping):
        return origin[tuple(map(_without_rules, arguments))]
    return annotation
