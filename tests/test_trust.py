"""What the library's own code may not do with what comes from elsewhere."""

import ast
from pathlib import Path

import pytest

import rlgraph

FILES = sorted(Path(rlgraph.__path__[0]).rglob("*.py"))
UNPICKLES = {
    *("gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"),
    *("send_pyobj", "recv_pyobj", "load_module", "Unpickler"),
}
PICKLE = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
ALLOWED = {
    "distributed_checkpoint.py": {"pickle", "Unpickler"},  # reads a checkpoint's table of contents with the few classes that it is made of
    "warm_worker.py": {"pickle"},  # what its own driver sends a worker of `rg.warm()`, in a file without a name
    "ray_dispatch.py": {"cloudpickle"},  # tries what Ray will send, and reads nothing back
}


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_unpickled(path: Path) -> None:
    names = named(ast.parse(path.read_text()))
    assert names & (UNPICKLES | PICKLE) == ALLOWED.get(path.name, set())
    assert "cloudpickle" not in names or not names & {"load", "loads"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_tensors_are_read_as_tensors(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
