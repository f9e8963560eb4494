"""Settings: the arguments of a user are checked where they are declared, and converted to their types.

The annotation of a field or a parameter is its rule, as in `group_size: Count`; `check` (for a dataclass) and `checked` (for a
function) apply it to every value. Equivalent values are accepted: numpy's numbers, a list for a tuple, a path for text.
"""

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, ParamSpec, TypeAlias, TypeVar, Union, get_args, get_origin

from rlgraph.errors import GraphError, RlgraphError, choices, shown
from rlgraph.setting_types import (
    AnyOf,
    Choice,
    Flag,
    Function,
    Instance,
    MappingOf,
    Named,
    OneOf,
    Range,
    Real,
    SettingType,
    Text,
    Tuple,
    Whole,
    Wrong,
)

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
ANY = Range()

Count: TypeAlias = Annotated[int, Range(least=1)]
Natural: TypeAlias = Annotated[int, Range(least=0)]
Finite: TypeAlias = Annotated[float, Range()]
Positive: TypeAlias = Annotated[float, Range(above=0)]
AtLeastZero: TypeAlias = Annotated[float, Range(least=0)]
Fraction: TypeAlias = Annotated[float, Range(least=0, most=1)]
PositiveFraction: TypeAlias = Annotated[float, Range(above=0, most=1)]
Seconds: TypeAlias = Annotated[float, Range(above=0, rule="a number of seconds above 0")]
Dtype: TypeAlias = Literal["auto", "bfloat16", "float32"]  # of a pass's computations
Recompute: TypeAlias = bool | Literal["selective"]  # what a layer computes again in the backward pass: nothing, all, the cheap part
RECOMPUTE: Final[tuple[Recompute, ...]] = (False, "selective", True)  # from least to most
Name: TypeAlias = Annotated[str, Range(least=1, rule="a non-empty text")]


def check(setting: Any, error: type[RlgraphError] = GraphError) -> None:
    """Check every field of a dataclass and convert it to its type. Called in `__post_init__`.

        >>> Sample = dataclasses.make_dataclass("Sample", [("size", Count)], namespace={"__post_init__": check})
        >>> Sample(0)
        Traceback (most recent call last):
        rlgraph.errors.GraphError: Sample(size=0): size is a whole number of at least 1

    Raises `error` with the class, the field, its value, the rule and the fix.
    """
    cls: Any = type(setting)
    for name, kind in types_of(cls).items():
        value = getattr(setting, name)
        try:
            taken = value if kind is None else kind.take(name, value)
        except Wrong as wrong:
            default = _default(cls, name) if value is None else ""
            raise error(f"{cls.__name__}({name}={shown(value)}): {name} is {kind.rule}{_fix(wrong, default)}") from None  # type: ignore[union-attr]
        if taken is not value:
            object.__setattr__(setting, name, taken)


def refuse_unknown(cls: type[C]) -> type[C]:
    """Decorate a dataclass that users make: an argument that it does not have is an error that lists those it has.

    >>> refuse_unknown(dataclasses.make_dataclass("Sample", [("size", int)]))(sise=1)
    Traceback (most recent call last):
    rlgraph.errors.GraphError: Sample(sise=1): there is no setting 'sise'; did you mean 'size'? The settings are size
    """
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                said = choices(name, known, "the settings are")
                raise GraphError(f"{cls.__name__}({name}={shown(kwargs[name])}): there is no setting '{name}'; {said}")
        plain(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def checked(error: type[RlgraphError] = GraphError, what: str = "node") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: check each of its arguments and convert it to its type.

        >>> @checked(what="pool")
        ... def pool(name: Name, *, cpus: Count):
        ...     return name, cpus
        >>> pool("host", cpus="four")
        Traceback (most recent call last):
        rlgraph.errors.GraphError: pool 'host' has cpus='four'; cpus is a whole number of at least 1

    If the function has a parameter `name`, errors begin with `what` and that name. The function itself checks `*inputs` and the
    parameters whose annotation has no rule.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                there = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
                for key in (key for key in kwargs if key not in there):
                    said = choices(key, [each for each in there if each != "self"], "its arguments are")
                    raise TypeError(f"{_called(function)}() got an unexpected keyword argument '{key}'; {said}") from None
                return function(*args, **kwargs)  # raises a TypeError that names the function
            for key, kind in parameters_of(call).items():
                if kind is None or key not in bound.arguments:
                    continue
                value = bound.arguments[key]
                try:
                    bound.arguments[key] = kind.take(key, value)
                except Wrong as wrong:
                    named = bound.arguments.get("name", getattr(signature.parameters.get("name"), "default", None))
                    where = f"{what} '{named}' has {key}={shown(value)}; " if isinstance(named, str) else ""
                    where = where or f"{_called(function)}({key}={shown(value)}): "
                    default = signature.parameters[key].default
                    left = f"leave it out for {shown(default)}" if value is None and default is not inspect.Parameter.empty else ""
                    raise error(f"{where}{key} is {kind.rule}{_fix(wrong, left)}") from None
            return function(*bound.args, **bound.kwargs)

        return call

    return wrap


@functools.cache
def types_of(cls: Any) -> Mapping[str, SettingType | None]:
    """Look up the setting type of each field of a dataclass; None where its annotation has no rule."""
    found: dict[str, Any] = {}
    for owner in reversed(cls.__mro__):
        for name, annotation in inspect.get_annotations(owner).items():
            found[name] = (annotation, owner.__module__)
    return {f.name: _type(_resolved(*found[f.name])) for f in dataclasses.fields(cls)}


@functools.cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, SettingType | None]:
    """Look up the setting type of each parameter of a function, without `self` and `*inputs`; None where its annotation has no rule."""
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = {p.name: p.annotation for p in inspect.signature(function).parameters.values() if p.kind not in skipped and p.name != "self"}
    return {name: _type(_resolved(annotation, function.__module__)) for name, annotation in given.items()}


def _resolved(annotation: Any, module: str) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[module]))
    except NameError:  # imported only for the type checker
        return Any


def _type(annotation: Any, range: Range = ANY) -> SettingType | None:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        rules = [rule for rule in arguments[1:] if isinstance(rule, Range | OneOf | Named)]
        if rules and isinstance(rules[-1], Named):
            return rules[-1]
        if rules and isinstance(rules[-1], OneOf):
            return Choice(rules[-1].choices)
        return _type(arguments[0], rules[-1] if rules else Range())  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        kinds = [_type(argument, range) for argument in arguments if argument is not type(None)]
        known = tuple(kind for kind in kinds if kind is not None)
        return AnyOf(known, type(None) in arguments) if len(known) == len(kinds) else None
    if origin is Literal:
        return Choice(arguments)
    if origin in (ClassVar, Final):
        return None
    if origin in (tuple, list, set, frozenset, Sequence):
        endless = origin is not tuple or (len(arguments) == 2 and arguments[1] is Ellipsis)
        return Tuple(tuple(_type(argument) for argument in arguments[: 1 if endless else None]), endless, range)
    if origin in (dict, Mapping):
        return MappingOf(*(_type(argument) for argument in arguments))
    if origin is Callable or annotation is Callable:
        return Function(range)
    return _plain(annotation, range)


def _plain(annotation: Any, range: Range) -> SettingType | None:
    simple: dict[Any, SettingType] = {int: Whole(range), float: Real(range), str: Text(range), bool: Flag()}
    if annotation in simple:
        return simple[annotation]
    plain = isinstance(annotation, type) and annotation not in (object, Any) and not getattr(annotation, "_is_protocol", False)
    return Instance(annotation) if plain else None


def _called(function: Callable[..., Any]) -> str:
    """Name the function as a user calls it: by the class, for an `__init__`."""
    return function.__qualname__.removesuffix(".__init__").rpartition(".")[2]


def _default(cls: type, name: str) -> str:
    default = next(f.default for f in dataclasses.fields(cls) if f.name == name)
    return "" if default is dataclasses.MISSING else f"leave it out for {shown(default)}"


def _fix(wrong: Wrong, otherwise: str) -> str:
    fix = str(wrong) or otherwise
    return f"; {fix}" if fix else ""
