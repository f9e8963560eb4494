"""Settings: the arguments of a user are checked where they are declared, and converted to their types.

The annotation of a field or a parameter is its rule, as in `group_size: Count`; `check` (for a dataclass) and `check_arguments` (for a
function) apply it to every value. Equivalent values are accepted: numpy's numbers, a list for a tuple, a path for text.
"""

import dataclasses
import difflib
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin

import rlgraph
from rlgraph.conversions import Wrong, to_bool, to_callable, to_float, to_int, to_name, to_text
from rlgraph.errors import GraphError, RlgraphError, show_value
from rlgraph.signatures import bind, field_annotations, parameter_annotations, show_plain_types, user_name
from rlgraph.signatures import refuse_unknown as refuse_unknown  # most modules that check the fields of a class need it

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")
R = TypeVar("R")
INFINITY = float("inf")
SPELLINGS = {"fp32": "float32", "f32": "float32", "float": "float32", "bf16": "bfloat16", "half": "bfloat16", "fp16": "bfloat16"}


class SettingType(Protocol):
    """The values that a field accepts: `rule` says which, in words."""

    @property
    def rule(self) -> str: ...

    def take(self, name: str, value: Any, /) -> Any:
        """Convert the value to its type. Raises Wrong if the field does not accept it."""


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
    """One of a few values, in an annotation, for a list that is defined elsewhere; a function returns a list that may grow."""

    choices: tuple[Any, ...] | Callable[[], tuple[Any, ...]]

    @property
    def rule(self) -> str:
        return f"one of {list(self._list_choices())}"

    def take(self, name: str, value: Any) -> Any:
        listed = self._list_choices()
        for choice in listed:
            if isinstance(value, type(choice)) and not isinstance(value, bool) and value == choice:
                return choice
        spelt = str(value).removeprefix("torch.").lower() if isinstance(value, str) or str(value).startswith("torch.") else ""
        near = difflib.get_close_matches(SPELLINGS.get(spelt, spelt), [*map(str, listed)], 1, 0.7)
        raise Wrong(f"write {name}={near[0]!r}" if near else "")

    def _list_choices(self) -> tuple[Any, ...]:
        return self.choices if isinstance(self.choices, tuple) else self.choices()


# The types of settings.


@dataclass(frozen=True)
class Plain:
    """Values that one function converts: `what` names them in words, and `range` bounds numbers, and the lengths of texts."""

    what: str
    convert: Callable[[str, Any], Any]
    range: Range | None = None

    @property
    def rule(self) -> str:
        return self.range.words(self.what) if self.range else self.what

    def take(self, name: str, value: Any) -> Any:
        taken = self.convert(name, value)
        size = len(taken) if isinstance(taken, str) else taken
        if self.range and isinstance(size, int | float) and not self.range.holds(size):
            raise Wrong
        return taken


ANYTHING = Plain("anything", lambda name, value: value)
PLAIN: dict[Any, tuple[str, Callable[[str, Any], Any]]] = {
    int: ("a whole number", to_int),
    float: ("a finite number", to_float),
    str: ("text", to_text),
    bool: ("True or False", to_bool),
    Callable: ("a function", to_callable),
}


@dataclass(frozen=True)
class Instance:
    """An object of a class. If users do not make one by calling the class, its attribute `HOW` says where to get it."""

    cls: type

    @property
    def rule(self) -> str:
        return f"{'an' if self.cls.__name__[0] in 'AEIO' else 'a'} {self.cls.__name__}"

    def take(self, name: str, value: Any) -> Any:
        if isinstance(value, self.cls):
            return value
        if isinstance(value, type) and issubclass(value, self.cls):
            raise Wrong(f"that is the class: write {name}=rg.{rlgraph.spelling(value.__name__)}()")
        if hasattr(self.cls, "HOW"):
            raise Wrong(self.cls.HOW)
        fields = [field.name for field in dataclasses.fields(self.cls)] if dataclasses.is_dataclass(self.cls) else []
        inside = repr(value) if isinstance(value, str) and len(value) < 40 and fields[:1] == ["name"] else "…"
        inside = ", ".join(f"{key}=…" for key in list(value)[:3]) if isinstance(value, Mapping) else inside
        raise Wrong(f"write {name}=rg.{rlgraph.spelling(self.cls.__name__)}({inside})")


@dataclass(frozen=True)
class Tuple:
    """A tuple; any other sequence except text is converted to one."""

    items: tuple[SettingType, ...]
    endless: bool
    range: Range = Range()

    @property
    def rule(self) -> str:
        rules = [item.rule for item in self.items]
        return self.range.rule or (f"a tuple, each {rules[0]}" if self.endless else f"a tuple of {len(rules)}: {', '.join(rules)}")

    def take(self, name: str, value: Any) -> tuple[Any, ...]:
        several = isinstance(value, Collection) or hasattr(value, "__array__")
        try:
            given = tuple(value) if several and not isinstance(value, str | bytes | Mapping) else None
        except TypeError:  # an array without dimensions
            given = None
        if given is None:
            raise Wrong(f"write {name}=({show_value(value)},)" if isinstance(value, int | float | str) else "")
        if (not self.endless and len(given) != len(self.items)) or not self.range.holds(len(given)):
            raise Wrong(f"it has {len(given)}")
        taken = []
        for place, (kind, item) in enumerate(zip(self.items * len(given) if self.endless else self.items, given, strict=True)):
            try:
                taken.append(kind.take(name, item))
            except Wrong:
                raise Wrong(f"item {place} is {show_value(item)}") from None
        return tuple(taken)


@dataclass(frozen=True)
class MappingOf:
    """A mapping."""

    key: SettingType
    value: SettingType

    @property
    def rule(self) -> str:
        return f"a mapping from {self.key.rule} to {self.value.rule}"

    def take(self, name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Wrong
        taken = {}
        for key, item in value.items():
            try:
                found = self.key.take(name, key)
                taken[found] = self.value.take(name, item)
            except Wrong as wrong:
                raise Wrong(f"{show_value(key)} is {show_value(item)}{'; ' * bool(str(wrong))}{wrong}") from None
        return value if all(a is b for a, b in zip(taken.values(), value.values(), strict=True)) else taken


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
        for kind in self.kinds:
            try:
                return kind.take(name, value)
            except Wrong as wrong:
                fixes.append((str(wrong), isinstance(kind, Plain) and kind.convert in (to_int, to_float)))
        of_numbers = [fix for fix, number in fixes if number and isinstance(value, int | float)]
        raise Wrong(next(filter(None, of_numbers or [fix for fix, _ in fixes]), ""))


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


def check(setting: "DataclassInstance", error: type[RlgraphError] = GraphError) -> None:
    """Check every field of a dataclass and convert it to its type. Called in `__post_init__`.

        >>> Sample = dataclasses.make_dataclass("Sample", [("size", Count)], namespace={"__post_init__": check})
        >>> Sample(0)
        Traceback (most recent call last):
        rlgraph.errors.GraphError: Sample(size=0): size is a whole number of at least 1

    Raises `error` with the class, the field, its value, the rule and the fix.
    """
    cls = type(setting)
    for name, kind in types_of(cls).items():
        if kind is None:
            continue
        value = getattr(setting, name)
        try:
            taken = kind.take(name, value)
        except Wrong as wrong:
            default = cls.__dataclass_fields__[name].default
            raise error(f"{cls.__name__}({name}={show_value(value)}): {_refusal(name, kind, wrong, value, default)}") from None
        if taken is not value:
            object.__setattr__(setting, name, taken)  # while it is made, by its `__post_init__`


def _refusal(name: str, kind: SettingType, wrong: Wrong, value: Any, default: Any) -> str:
    """Say the rule and the fix."""
    needed = default is dataclasses.MISSING or default is inspect.Parameter.empty
    fix = str(wrong) or ("" if needed or value is not None else f"leave it out for {show_value(default)}")
    return f"{name} is {kind.rule}{'; ' if fix else ''}{fix}"


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
            bound = bind(function, signature, args, kwargs)
            for key, kind in parameters_of(call).items():
                if kind is None or key not in bound.arguments:
                    continue
                value = bound.arguments[key]
                try:
                    bound.arguments[key] = kind.take(key, value)
                except Wrong as wrong:
                    bound.apply_defaults()
                    named = bound.arguments.get("name")
                    shown = f"{key}={show_value(value)}"
                    where = f"{what} '{named}' has {shown}; " if isinstance(named, str) else f"{user_name(function)}({shown}): "
                    raise error(where + _refusal(key, kind, wrong, value, signature.parameters[key].default)) from None
            return function(*bound.args, **bound.kwargs)

        return show_plain_types(call)

    return wrap


@functools.cache
def types_of(cls: type["DataclassInstance"]) -> Mapping[str, SettingType | None]:
    """Look up the setting type of each field of a dataclass; None where its annotation has no rule."""
    return {name: setting_type(annotation) for name, annotation in field_annotations(cls).items()}


@functools.cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, SettingType | None]:
    """Look up the setting type of each parameter of a function, without `self` and `*inputs`; None where its annotation has no rule."""
    return {name: setting_type(annotation) for name, annotation in parameter_annotations(function).items()}


def setting_type(annotation: Any, range: Range = Range()) -> SettingType | None:
    """Make the setting type of an annotation; None where it has no rule."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        rule = next((rule for rule in reversed(arguments) if isinstance(rule, Range | OneOf)), Range())
        return rule if isinstance(rule, OneOf) else setting_type(arguments[0], rule)
    if origin in (Union, types.UnionType):
        kinds = [setting_type(argument, range) for argument in arguments if argument is not type(None)]
        known = tuple(kind for kind in kinds if kind is not None)
        return AnyOf(known, type(None) in arguments) if len(known) == len(kinds) else None
    if origin is Literal:
        return OneOf(arguments)
    if origin in (tuple, list, set, frozenset, Sequence):
        endless = origin is not tuple or arguments[1:] == (...,)
        return Tuple(tuple(setting_type(item) or ANYTHING for item in arguments[: 1 if endless else None]), endless, range)
    if origin in (dict, Mapping):
        return MappingOf(*(setting_type(item) or ANYTHING for item in arguments))
    if annotation is str and range.least >= 1:
        return Plain("text", to_name, range)
    if (origin or annotation) in PLAIN:
        return Plain(*PLAIN[origin or annotation], range)
    is_class = isinstance(annotation, type) and annotation not in (object, Any) and Protocol not in annotation.__bases__
    return Instance(annotation) if is_class else None
