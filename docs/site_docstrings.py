"""An extension of griffe: examples of docstrings become blocks of code, classes list inherited arguments, and types have no rules."""

import ast
import inspect
import re
from importlib import import_module
from typing import Any

import griffe

import rlgraph as rg
from rlgraph import algorithms

PUBLIC = {*rg.__all__, *algorithms.__all__, *(name for subject in rg._SUBJECTS for name in vars(getattr(rg, subject)))}
BLOCK = re.compile(r"(?m)^(?P<indent> *)>>> .*(?:\n(?! *$).*)*")


class Examples(griffe.Extension):
    """Fence each run of lines that begins with `>>>`, up to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show the docstring that the class has when it is imported: it lists the arguments that its bases document."""
        if cls.docstring is not None and cls.parent is not None and cls.name in PUBLIC:
            cls.docstring.value = fenced(inspect.cleandoc(getattr(import_module(cls.parent.path), cls.name).__doc__ or ""))

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Leave the rules of `Annotated` out of the types of parameters."""
        for parameter in func.parameters:
            if "Annotated" in str(parameter.annotation):
                parameter.annotation = without_rules(str(parameter.annotation))


def without_rules(annotation: str) -> str:
    """Write an annotation without what `Annotated` adds to its types."""

    class Types(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            node = super().generic_visit(node)  # type: ignore[assignment]
            of_types = isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple)
            return node.slice.elts[0] if of_types else node  # type: ignore[attr-defined]

    return ast.unparse(Types().visit(ast.parse(annotation, mode="eval")))


def fenced(text: str) -> str:
    """Fence the doctests of a docstring."""

    def fence(found: re.Match[str]) -> str:
        indent = len(found["indent"])
        lines = [line[indent:] for line in found[0].splitlines()]
        return "\n".join(["", "```pycon", *lines, "```"])

    return BLOCK.sub(fence, text)
