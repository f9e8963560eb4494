"""Copies functions of a script into a recipe, with the definitions that they read."""

import ast
import builtins
import textwrap
from collections.abc import Iterable

from rlgraph_cli.from_trl.values import Binding, Source, Unreadable

OWN = {"rg", "Config", "rows", "steps", "graph", "cluster", "cfg", "dataclass", "score", "json"}  # names of a recipe itself


def copy(text: str, source: Source, nodes: Iterable[ast.AST]) -> tuple[list[str], list[str]]:
    """Collect the imports and the definitions that expressions read, as the script writes them, in its order.

    Raises Unreadable for what is TRL's, what is known only when the script runs, and a name that the recipe has itself.
    """
    found: dict[str, Binding] = {}
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        for name in _reads(node):
            if name.id in found or (not any(name.id in scope.names for scope in source.scopes) and hasattr(builtins, name.id)):
                continue
            binding = found[name.id] = source.find(name)
            if isinstance(binding.node, ast.Import | ast.ImportFrom):
                continue
            if name.id in OWN:
                raise Unreadable(name, f"is also a name of the recipe; rename it, to none of {', '.join(sorted(OWN))}")
            if not isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and binding.place is not None:
                raise Unreadable(name, "is assigned together with other names; assign it in a statement of its own")
            waiting.append(binding.node)
    imports = [_import(name, each.node) for name, each in found.items() if isinstance(each.node, ast.Import | ast.ImportFrom)]
    lines = text.splitlines()
    defined = sorted({_extent(each) for each in found.values() if not isinstance(each.node, ast.Import | ast.ImportFrom)})
    return imports, [textwrap.dedent("\n".join(lines[first - 1 : last])) for first, last in defined]


def _extent(binding: Binding) -> tuple[int, int]:
    decorators = [each.lineno for each in getattr(binding.node, "decorator_list", ())]
    return min([binding.line, *decorators]), binding.last


def _import(name: str, node: ast.Import | ast.ImportFrom) -> str:
    module = node.module if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        if (alias.asname or alias.name).partition(".")[0] == name:
            if (module or alias.name).partition(".")[0] == "trl":
                raise Unreadable(node, "is TRL's, which a recipe does not import; write a function without it")
            one = ast.ImportFrom(module, [alias], node.level) if isinstance(node, ast.ImportFrom) else ast.Import([alias])
            return ast.unparse(one)
    raise AssertionError(name)


def _reads(node: ast.AST) -> list[ast.Name]:
    """List the names that are read in a node and not bound in it."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    own = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    own |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    own |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.ClassDef) and each is not node}
    own |= {each.name for each in ast.walk(node) if isinstance(each, ast.ExceptHandler) and each.name}
    return [each for each in names if isinstance(each.ctx, ast.Load) and each.id not in own]
