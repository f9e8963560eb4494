"""Reads values in the source of a script, without running it: literals, names, arithmetic, and what TRL's parser would have read."""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PARSES = ("parse_args_and_config", "parse_args_into_dataclasses", "parse_args", "parse_known_args")
CHANGES = ("append", "extend", "insert", "update", "pop", "remove", "setdefault", "clear", "sort")
OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
LARGEST = 4096  # the characters or elements of a value, the bits of a number, and the names that lead to one


class Unreadable(Exception):
    """What only running the script would tell: the expression, and why."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.line = getattr(node, "lineno", 0)
        self.why = f"{ast.unparse(node).partition(chr(10))[0][:80]} {why}"


class Parsed:
    """What TRL's parser, or argparse, makes of the command line."""


@dataclass(frozen=True)
class Binding:
    """What a name is bound to: an expression, definition or import with its lines, the place in it, and whether it is always bound."""

    node: ast.AST
    line: int
    last: int = 0
    place: int | None = None
    sure: bool = True


@dataclass
class Scope:
    """The names that a module, or a function around the trainer, binds."""

    first: int
    last: int
    names: dict[str, list[Binding]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # after they were bound, in place


@dataclass
class Source:
    """The names of a script that the trainer sees, innermost scope first, and the flags that its parser reads."""

    flags: Mapping[str, Any]
    path: Path = Path()
    scopes: list[Scope] = field(default_factory=list)
    attributes: list[tuple[str, ast.Attribute, ast.expr]] = field(default_factory=list)  # `training_args.packing = True`

    def collect(self, statements: Sequence[ast.stmt], scope: Scope, sure: bool = True) -> None:
        """Note what statements bind. Of a branch whose condition can be read, only the side that runs counts."""
        for each in statements:
            end = each.end_lineno or each.lineno
            match each:
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    for alias in names:
                        self._bind(scope, (alias.asname or alias.name).partition(".")[0], Binding(each, each.lineno, end, sure=sure))
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._bind(scope, each.name, Binding(each, each.lineno, end, sure=sure))
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._assign(scope, target, Binding(value, each.lineno, end, sure=sure))
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(scope, target, Binding(value, each.lineno, end, sure=sure))
                case ast.AugAssign(target=ast.Name(id=name)):
                    scope.changed.add(name)
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr))) if attr in CHANGES:
                    scope.changed.add(name)
                case ast.If(test=test, body=body, orelse=orelse):
                    try:
                        self.collect(body if self.read(test) else orelse, scope, sure)
                    except Unreadable:
                        self.collect([*body, *orelse], scope, sure=False)
                case ast.For(body=body) | ast.While(body=body):
                    self.collect(body, scope, sure=False)
                case ast.With(body=body) | ast.Try(body=body):
                    self.collect(body, scope, sure)

    def _bind(self, scope: Scope, name: str, binding: Binding) -> None:
        scope.names.setdefault(name, []).append(binding)

    def _assign(self, scope: Scope, target: ast.expr, binding: Binding) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(scope, name, binding)
            case ast.Tuple(elts=parts):
                for place, part in enumerate(parts):
                    self._assign(scope, part, replace(binding, place=place))
            case ast.Attribute(value=ast.Name(id=name)) if isinstance(binding.node, ast.expr):
                value = binding.node if binding.sure else ast.copy_location(ast.Call(target, [], []), target)  # which nobody can read
                self.attributes.append((name, target, value))
            case ast.Subscript(value=ast.Name(id=name)):
                scope.changed.add(name)

    def find(self, name: ast.Name) -> Binding:
        """Find what a name is bound to where it stands: by the last binding before it. Raises Unreadable for none, or one of several."""
        if name.id in ("__name__", "__file__"):
            return Binding(ast.Constant("__main__" if name.id == "__name__" else str(self.path)), 0)
        inside = [scope for scope in self.scopes if scope.first <= name.lineno <= scope.last]
        for scope in inside:
            found = [each for each in scope.names.get(name.id, ()) if scope is not inside[0] or each.line < name.lineno]
            if not found:
                continue
            if name.id in scope.changed or not found[-1].sure:
                raise Unreadable(name, "changes in a way that only running the script would tell; assign it once, to a value")
            return found[-1]
        raise Unreadable(name, "is not assigned before this line; assign a value to it")

    def follow(self, node: ast.AST) -> ast.AST:
        """Follow names to the expression or definition behind them."""
        names = 0
        while isinstance(node, ast.Name):
            binding = self.find(node)
            names += 1
            if names > LARGEST:
                raise RecursionError
            if binding.place is not None:
                return ast.copy_location(ast.Subscript(binding.node, ast.Constant(binding.place), ast.Load()), node)  # type: ignore[arg-type]
            node = binding.node
        return node

    def read(self, node: ast.AST) -> Any:
        """Read a value. Raises Unreadable for anything that only running the script would tell."""
        try:
            value = self._read(node)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise Unreadable(node, f"raises an error: {error}") from None
        if (isinstance(value, str | list | dict) and len(value) > LARGEST) or (isinstance(value, int) and value.bit_length() > LARGEST):
            raise Unreadable(node, "is too large; write a smaller value")
        return value

    def _read(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name():
                binding = self.find(node)
                found = self.read(binding.node)
                return found if binding.place is None or found is Parsed else found[binding.place]
            case ast.JoinedStr(values=parts):
                if any(isinstance(part, ast.FormattedValue) and (part.format_spec or part.conversion > 0) for part in parts):
                    raise Unreadable(node, "has a format specification; write the text")
                return "".join(str(self.read(part.value if isinstance(part, ast.FormattedValue) else part)) for part in parts)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [self.read(part) for part in parts]
            case ast.Dict(keys=keys, values=values):
                pairs = [(None if key is None else self.read(key), self.read(value)) for key, value in zip(keys, values, strict=True)]
                return {name: v for key, value in pairs for name, v in (value.items() if key is None else [(key, value)])}
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                given = [(each.arg, self.read(each.value)) for each in keywords]
                return {name: v for key, value in given for name, v in (value.items() if key is None else [(key, value)])}
            case ast.Call() | ast.Attribute() | ast.Subscript():
                return self._look_up(node)
        return self._compute(node)

    def _compute(self, node: ast.AST) -> Any:
        """Compute arithmetic, comparisons and conditions."""
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                a, b = self.read(left), self.read(right)
                repeated = isinstance(op, ast.Mult) and (isinstance(a, str | list) or isinstance(b, str | list))
                if (isinstance(op, ast.Pow) and abs(b) > 64) or (repeated and max(_size(a), 1) * max(_size(b), 1) > LARGEST):
                    raise Unreadable(node, "is too large; write a smaller value")
                return OPERATORS[type(op)](a, b)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
                return OPERATORS[type(op)](self.read(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return OPERATORS[type(op)](self.read(left), self.read(right))
            case ast.BoolOp(op=op, values=parts):
                value = None
                for part in parts:
                    value = self.read(part)
                    if bool(value) is isinstance(op, ast.Or):
                        break
                return value
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.read(body if self.read(test) else orelse)
        raise Unreadable(node, "is known only when the script runs; write its value")

    def _look_up(self, node: ast.AST) -> Any:
        """Look up a field of what the parser or a configuration holds, an element, and paths."""
        match node:
            case ast.Call(func=ast.Attribute(attr=attr)) if attr in PARSES:
                return Parsed
            case ast.Call(func=ast.Name(id="Path" | "str" as kind), args=[argument]):
                return (Path if kind == "Path" else str)(self.read(argument))
            case ast.Attribute(value=of, attr="parent"):
                return self.read(of).parent
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
                return attr
            case ast.Attribute(value=ast.Name(id=name) as of, attr=attr):
                made = self.follow(of)
                named = [each.value for each in made.keywords if each.arg == attr] if isinstance(made, ast.Call) else []
                if not (isinstance(made, ast.Call) and ast.unparse(made.func).endswith("Config")) and self.read(of) is not Parsed:
                    raise Unreadable(node, "is read from an object; write its value")
                changed = [
                    value
                    for owner, target, value in self.attributes
                    if (owner, target.attr, target.lineno < node.lineno) == (name, attr, True)
                ]
                return self.read([*named, *changed][-1]) if named or changed else self.flags.get(attr)
            case ast.Subscript(value=of, slice=place):
                found = self.read(of)
                return Parsed if found is Parsed else found[self.read(place)]
        raise Unreadable(node, "is known only when the script runs; write its value")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list) else int(value)
