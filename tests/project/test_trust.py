"""What the library's own code may not do with what comes from elsewhere."""

import ast
from pathlib import Path

import pytest

import rlgraph

PACKAGE = Path(rlgraph.__path__[0])
UNPICKLES = {
    *("gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"),
    *("send_pyobj", "recv_pyobj", "load_module", "Unpickler"),
}
PICKLE = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
ALLOWED = {
    "engines/fsdp/distributed_checkpoint.py": {
        "pickle",
        "Unpickler",
    },  # reads a checkpoint's table of contents with the few classes that it is made of
    "runtime/worker/warm_worker.py": {"pickle"},  # what its own driver sends a worker of `rg.runs.warm()`, in a file without a name
    "runtime/driver/sendable.py": {"cloudpickle"},  # writes what its own workers read, and reads nothing back
}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def named(tree: ast.AST) -> set[str]:
    """Every module, attribute and name that a file uses."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(alias.name for alias in node.names)}
    return found


def test_nothing_is_unpickled(trees: dict[str, ast.Module]) -> None:
    names = {path: named(tree) for path, tree in trees.items()}
    found = {path: used & (UNPICKLES | PICKLE) for path, used in names.items() if used & (UNPICKLES | PICKLE)}
    assert found == ALLOWED
    assert [path for path, used in names.items() if "cloudpickle" in used and used & {"load", "loads"}] == []


def test_tensors_are_read_as_tensors(trees: dict[str, ast.Module]) -> None:
    calls = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [(path, node) for path, node in calls if ast.unparse(node.func) == "torch.load"]
    safe = [any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords) for _, node in loads]
    assert loads
    assert [path for (path, _), is_safe in zip(loads, safe, strict=True) if not is_safe] == []
