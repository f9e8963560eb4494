"""Settings: the arguments of a user are checked where they are declared, and converted to their types.

The annotation of a field or a parameter is its rule, as in `group_size: Count`; `check` (for a dataclass) and `check_arguments` (for a
function) apply it to every value. Equivalent values are accepted: numpy's numbers, a list for a tuple, a path for text.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import os
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin

import rlgraph
from rlgraph.errors import GraphError, RlgraphError, choices, show_value

# Types of settings: the rule of each in words, and the conversion of accepted values to the type.

INFINITY = float("inf")
SPELLINGS = {"fp32": "float32", "f32": "float32", "float": "float32", "bf16": "bfloat16", "half": "bfloat16", "fp16": "bfloat16"}


@dataclass(frozen=True)
class Range:
    """The bounds of a number, in an annotation: `Annotated[int, Range(least=1)]`. `rule` replaces the words made from the bounds.

        >>> Range(least=0, most=1).words("a finite number")
        'a finite number of at least 0 and at most 1'

    For text and tuples it bounds the length.
    """

    least: float = -INFINITY
    above: float = -INFINITY
    most: float = INFINITY
    below: float = INFINITY
    rule: str = ""

    def holds(self, value: float) -> bool:
        """Whether the value is within the bounds."""
        return self.least <= value <= self.most and self.above < value < self.below

    def words(self, what: str) -> str:
        """Put the bounds into words, such as "a whole number of at least 1"."""
        if self.rule:
            return self.rule
        low = [f"of at least {self.least:g}"] if self.least > -INFINITY else [f"above {self.above:g}"] if self.above > -INFINITY else []
        high = [f"at most {self.most:g}"] if self.most < INFINITY else [f"below {self.below:g}"] if self.below < INFINITY else []
        return f"{what} {' and '.join(low + high)}".rstrip()


@dataclass(frozen=True)
class OneOf:
    """The texts that a field accepts, in an annotation, for a list that is defined elsewhere."""

    choices: tuple[str, ...]


class Wrong(Exception):
    """A field does not accept a value; the message says what to write instead, if that is known."""


class SettingType(Protocol):
    """The values that a field accepts: `rule` says which, in words."""

    @property
    def rule(self) -> str: ...

    def take(self, name: str, value: Any) -> Any:
        """Convert the value to its type. Raises Wrong if the field does not accept it."""


LEAST, MOST = -(1 << 63), (1 << 63) - 1  # of whole numbers: what columns and files hold


@dataclass(frozen=True)
class Whole:
    """Whole numbers: every value that `operator.index` accepts, except True and False."""

    range: Range = Range()

    @property
    def rule(self) -> str:
        return self.range.words("a whole number")

    def take(self, name: str, value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, bool | str) or not hasattr(type(value), "__index__"):
                raise Wrong(_as_number(name, value, whole=True))
            try:
                value = operator.index(value)
            except TypeError:  # a tensor or an array of several
                raise Wrong from None
        if not LEAST <= value <= MOST:
            raise Wrong("no whole number of more than 64 bits is taken")
        if not self.range.holds(value):
            raise Wrong
        return int(value)


@dataclass(frozen=True)
class Real:
    """Finite numbers."""

    range: Range = Range()

    @property
    def rule(self) -> str:
        return self.range.words("a finite number")

    def take(self, name: str, value: Any) -> float:
        if type(value) not in (int, float):
            if isinstance(value, bool | str) or not hasattr(type(value), "__float__") or _dimensions(value):
                raise Wrong(_as_number(name, value, whole=False))
            value = value if isinstance(value, int) else operator.index(value) if _is_index(value) else float(value)
        if not abs(value) <= sys.float_info.max or not self.range.holds(value):
            raise Wrong
        return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Flag:
    """True or False."""

    rule = "True or False"

    def take(self, name: str, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if type(value).__name__ in ("bool", "bool_") and not _dimensions(value):  # numpy's
            return bool(value)
        meant = {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower()) if isinstance(value, str | int) else None
        raise Wrong("" if meant is None else f"write {name}={meant}")


@dataclass(frozen=True)
class Text:
    """Text; a path is converted to text."""

    range: Range = Range()

    @property
    def rule(self) -> str:
        return self.range.rule or "text"

    def take(self, name: str, value: Any) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not self.range.holds(len(value)):
            raise Wrong
        if self.range.least >= 1:  # a name, which stands in files
            try:
                value.encode()
            except UnicodeEncodeError:
                raise Wrong(
                    "it has half of a surrogate pair, which UTF-8 cannot hold: decode it again, or replace that character"
                ) from None
        return value if type(value) is str else str(value)


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    choices: tuple[Any, ...]

    @property
    def rule(self) -> str:
        return f"one of {list(self.choices)}"

    def take(self, name: str, value: Any) -> Any:
        for choice in self.choices:
            if isinstance(value, type(choice)) and not isinstance(value, bool) and value == choice:
                return choice
        spelt = str(value).removeprefix("torch.").lower() if isinstance(value, str) or str(value).startswith("torch.") else ""
        near = difflib.get_close_matches(SPELLINGS.get(spelt, spelt), [str(choice) for choice in self.choices], 1, 0.7)
        raise Wrong(f"write {name}={near[0]!r}" if near else "")


@dataclass(frozen=True)
class Tuple:
    """A tuple; any other sequence except text is converted to one."""

    items: tuple["SettingType | None", ...]
    endless: bool
    range: Range = Range()

    @property
    def rule(self) -> str:
        if self.range.rule:
            return self.range.rule
        rules = [item.rule if item else "anything" for item in self.items]
        return f"a tuple, each {rules[0]}" if self.endless else f"a tuple of {len(rules)}: {', '.join(rules)}"

    def take(self, name: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | bytes | Mapping) or (not isinstance(value, Collection) and not hasattr(value, "__array__")):
            raise Wrong(f"write {name}=({show_value(value)},)" if isinstance(value, int | float | str) else "")
        given = tuple(value)
        if (not self.endless and len(given) != len(self.items)) or not self.range.holds(len(given)):
            raise Wrong(f"it has {len(given)}")
        kinds = self.items * len(given) if self.endless else self.items
        taken = []
        for place, (kind, item) in enumerate(zip(kinds, given, strict=True)):
            try:
                taken.append(item if kind is None else kind.take(name, item))
            except Wrong:
                raise Wrong(f"item {place} is {show_value(item)}") from None
        return tuple(taken)


@dataclass(frozen=True)
class MappingOf:
    """A mapping."""

    key: "SettingType | None"
    value: "SettingType | None"

    @property
    def rule(self) -> str:
        keys, values = (kind.rule if kind else "anything" for kind in (self.key, self.value))
        return f"a mapping from {keys} to {values}"

    def take(self, name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Wrong
        taken = {}
        for key, item in value.items():
            try:
                found = key if self.key is None else self.key.take(name, key)
                taken[found] = item if self.value is None else self.value.take(name, item)
            except Wrong as wrong:
                raise Wrong(f"{show_value(key)} is {show_value(item)}{'; ' * bool(str(wrong))}{wrong}") from None
        return value if all(a is b for a, b in zip(taken.values(), value.values(), strict=True)) else taken


@dataclass(frozen=True)
class Function:
    """A function, or another callable."""

    range: Range = Range()

    @property
    def rule(self) -> str:
        return self.range.rule or "a function"

    def take(self, name: str, value: Any) -> Any:
        if not callable(value):
            raise Wrong
        return value


@dataclass(frozen=True)
class Instance:
    """An object of a class. If users do not make one by calling the class, its attribute `HOW` says where to get it."""

    cls: type

    @property
    def rule(self) -> str:
        return _article(self.cls.__name__)

    def take(self, name: str, value: Any) -> Any:
        if isinstance(value, self.cls):
            return value
        made = _public_name(self.cls)
        if isinstance(value, type) and issubclass(value, self.cls):
            raise Wrong(f"that is the class: write {name}={_public_name(value)}()")
        if hasattr(self.cls, "HOW"):
            raise Wrong(self.cls.HOW)
        if isinstance(value, Mapping):
            raise Wrong(f"write {name}={made}({', '.join(f'{key}=…' for key in list(value)[:3])})")
        first = next(iter(dataclasses.fields(self.cls)), None) if dataclasses.is_dataclass(self.cls) else None
        inside = repr(value) if isinstance(value, str) and len(value) < 40 and first is not None and first.name == "name" else "…"
        raise Wrong(f"write {name}={made}({inside})")


@dataclass(frozen=True)
class AnyOf:
    """One of several types."""

    kinds: tuple[SettingType, ...]
    none: bool

    @property
    def rule(self) -> str:
        rule = " or ".join(kind.rule for kind in self.kinds)
        return f"{rule} or None" if self.none and "None" not in rule else rule

    def take(self, name: str, value: Any) -> Any:
        if value is None and self.none:
            return None
        fixes = []
        numbers = tuple(kind for kind in self.kinds if isinstance(kind, Whole | Real)) if isinstance(value, int | float) else ()
        for kind in self.kinds:
            try:
                return kind.take(name, value)
            except Wrong as wrong:
                fixes.append(str(wrong) if not numbers or kind in numbers else "")
        raise Wrong(next((fix for fix in fixes if fix), ""))


@dataclass(frozen=True)
class Named:
    """A name from a table that may grow, or an object of a class, in an annotation."""

    names: Callable[[], tuple[str, ...]]
    cls: type

    @property
    def rule(self) -> str:
        return self._either().rule

    def take(self, name: str, value: Any) -> Any:
        return self._either().take(name, value)

    def _either(self) -> AnyOf:
        return AnyOf((Choice(self.names()), Instance(self.cls)), none=False)


def _dimensions(value: Any) -> int:
    """Count the dimensions of an array or a tensor; 0 for any other value."""
    found = getattr(value, "ndim", 0)
    return found if isinstance(found, int) else 0


def _is_index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _as_number(name: str, value: Any, *, whole: bool) -> str:
    """Say how to write a number that was given as text, or as a float that is whole."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return ""
    if isinstance(value, bool) or not math.isfinite(number) or (whole and number != int(number)):
        return ""
    return f"write {name}={int(number) if whole or number == int(number) else number}{', without quotes' if isinstance(value, str) else ''}"


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _public_name(cls: type) -> str:
    return f"rg.{rlgraph.spelling(cls.__name__)}"


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
            raise error(f"{cls.__name__}({name}={show_value(value)}): {name} is {kind.rule}{_fix(wrong, default)}") from None  # type: ignore[union-attr]
        if taken is not value:
            object.__setattr__(setting, name, taken)  # while it is made, by its `__post_init__`


def refuse_unknown(cls: type[C]) -> type[C]:
    """Decorate a dataclass that users make: an argument that it does not have is an error that lists those it has.

    >>> refuse_unknown(dataclasses.make_dataclass("Sample", [("size", int)]))(sise=1)
    Traceback (most recent call last):
    rlgraph.errors.GraphError: Sample(sise=1): there is no setting 'sise'; did you mean 'size'? The settings are size
    """
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    names, plain = frozenset(known), cls.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= names:
            name = next(name for name in kwargs if name not in names)
            said = choices(name, known, "the settings are")
            raise GraphError(f"{cls.__name__}({name}={show_value(kwargs[name])}): there is no setting '{name}'; {said}")
        plain(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign]
    return document_arguments(cls)


def document_arguments(cls: type[C]) -> type[C]:
    """Decorate a dataclass: `help` shows plain types, and the arguments that its bases document. `refuse_unknown` does it too."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    cls.__init__.__signature__ = _readable(inspect.signature(cls.__init__), cls)  # type: ignore[attr-defined]
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


def _readable(signature: inspect.Signature, cls: Any = None) -> inspect.Signature:
    """The signature without the rules in its annotations, and with the defaults that a dataclass makes."""
    factories: dict[str, Any] = {field.name: field.default_factory for field in dataclasses.fields(cls)} if cls else {}
    made = {name: factory for name, factory in factories.items() if factory is not dataclasses.MISSING}
    defaults = {name: _Text(f"{factory.__name__}()") for name, factory in made.items()}
    return signature.replace(
        parameters=[
            parameter.replace(annotation=_without_rules(parameter.annotation), default=defaults.get(name, parameter.default))
            for name, parameter in signature.parameters.items()
        ]
    )


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


def check_arguments(error: type[RlgraphError] = GraphError, what: str = "node") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: check each of its arguments and convert it to its type.

        >>> @check_arguments(what="pool")
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
                    raise TypeError(f"{_user_name(function)}() got an unexpected keyword argument '{key}'; {said}") from None
                return function(*args, **kwargs)  # raises a TypeError that names the function
            for key, kind in parameters_of(call).items():
                if kind is None or key not in bound.arguments:
                    continue
                value = bound.arguments[key]
                try:
                    bound.arguments[key] = kind.take(key, value)
                except Wrong as wrong:
                    named = bound.arguments.get("name", getattr(signature.parameters.get("name"), "default", None))
                    where = f"{what} '{named}' has {key}={show_value(value)}; " if isinstance(named, str) else ""
                    where = where or f"{_user_name(function)}({key}={show_value(value)}): "
                    default = signature.parameters[key].default
                    left = f"leave it out for {show_value(default)}" if value is None and default is not inspect.Parameter.empty else ""
                    raise error(f"{where}{key} is {kind.rule}{_fix(wrong, left)}") from None
            return function(*bound.args, **bound.kwargs)

        call.__signature__ = _readable(signature)  # type: ignore[attr-defined]
        return call

    return wrap


@functools.cache
def types_of(cls: Any) -> Mapping[str, SettingType | None]:
    """Look up the setting type of each field of a dataclass; None where its annotation has no rule."""
    found: dict[str, Any] = {}
    for owner in reversed(cls.__mro__):
        for name, annotation in inspect.get_annotations(owner).items():
            found[name] = (annotation, owner.__module__)
    return {f.name: _type(_resolve_annotation(*found[f.name])) for f in dataclasses.fields(cls)}


@functools.cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, SettingType | None]:
    """Look up the setting type of each parameter of a function, without `self` and `*inputs`; None where its annotation has no rule."""
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()  # as written: what `help` shows has no rules
    given = {p.name: p.annotation for p in parameters if p.kind not in skipped and p.name != "self"}
    return {name: _type(_resolve_annotation(annotation, function.__module__)) for name, annotation in given.items()}


def _resolve_annotation(annotation: Any, module: str) -> Any:
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


def _user_name(function: Callable[..., Any]) -> str:
    """Name the function as a user calls it: by the class, for an `__init__`."""
    return function.__qualname__.removesuffix(".__init__").rpartition(".")[2]


def _default(cls: type, name: str) -> str:
    default = next(f.default for f in dataclasses.fields(cls) if f.name == name)
    return "" if default is dataclasses.MISSING else f"leave it out for {show_value(default)}"


def _fix(wrong: Wrong, otherwise: str) -> str:
    fix = str(wrong) or otherwise
    return f"; {fix}" if fix else ""
