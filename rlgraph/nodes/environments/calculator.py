"""A calculator: arithmetic of numbers, and nothing else of Python."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from rlgraph.nodes.sandbox import ToolError

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MOST_BITS = 4096  # of an intermediate whole number: a power of larger ones could take hours


def calculated(expression: str) -> float:
    """Evaluate an arithmetic expression of numbers, + - * / // % ** and brackets.

    Raises ToolError for anything else, and for numbers that grow too large.
    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ToolError(f"cannot calculate '{expression[:80]}': {error}") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and left.bit_length() * abs(right) > MOST_BITS:
            raise OverflowError("the power is too large")
        value = OPERATORS[type(node.op)](left, right)
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise OverflowError("the number is too large")
        return value
    raise ValueError("it has more than numbers, + - * / // % ** and brackets")
