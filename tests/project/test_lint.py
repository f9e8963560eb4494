"""The rules of the house that no linter has: who may import what, sizes, and what belongs to others. Each is seen to fail once."""

import ast
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import worth

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rlgraph"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
FUNCTION_LINES, ACCESSOR_LINES = 60, 5
DISTRIBUTED = (
    "engines/fsdp/",
    "engines/megatron/",
    "engines/forward/collectives.py",
    "channels/remote/transfer.py",
)  # who may import torch.distributed
# The private names of other libraries that a module outside of engines/ needs, and what for. None of them is rlgraph's own.
PRIVATE = {
    "channels/api.py": {"_version"},  # of a tensor: whether it was changed in place
    "channels/host/slot_memory.py": {
        "_share_cuda_",
        "_new_shared_cuda",
        "_foreach_copy_",
    },  # PyTorch has no public handles of memory on a GPU
    "channels/host/ray_channel.py": {"_writer_ref", "_private", "_TorchTensorAcceleratorChannel"},
    "channels/weights/shards.py": {"_foreach_copy_"},
    "environments/elsewhere/child.py": {"_exit"},  # threads of environments may never end
    "nodes/environments/supervisor.py": {"_exit"},  # os._exit, as in the next ones
    "nodes/walls/child.py": {"_exit"},  # os._exit: a forked child runs no handlers of its parent
    "nodes/walls/session.py": {"_exit"},
    "runtime/worker/process.py": {"_exit"},
    "runtime/worker/template.py": {"_exit"},
    "runtime/worker/warm_worker.py": {"_exit"},
    "runtime/worker/progress.py": {"_record_memory_history", "_dump_snapshot"},  # torch documents them by these names
    "runtime/driver/ray_cluster.py": {"_private", "_global_node"},  # where Ray keeps its session
    "plan/play.py": {"_replace"},  # public, of a NamedTuple
}
# Those of other libraries that what is shown beside the package needs; of rlgraph itself it uses none.
PRIVATE_SHOWN = {
    **{name: {"_exit"} for name in ("chaos", "kills", "large", "loading", "second_engine", "small_gpu", "timed_updates")},  # of os
    **{name: {"_foreach_mul_"} for name in ("sharded_weights", "small_gpu_adapters", "weights")},  # of torch, as optimizers use it
}
# One line at the end of a file that breaks each of the contracts in pyproject.toml.
BREACHES = {
    "imports go down only": ("errors.py", "from rlgraph import api"),
    "Ray is known to its dispatch, its channels and its graph": ("nodes/items.py", "import ray"),
    "transformers, vllm, sglang and megatron are imported by the engines alone": ("nodes/prompts.py", "import transformers"),
    "what draws plans and runs knows no engine and no node's work": ("render/text.py", "import rlgraph.engines.registry"),
    "an engine saves and loads itself: the runtime knows nothing of how it is sharded": (
        "runtime/local.py",
        "import rlgraph.engines.fsdp.sharding",
    ),
    "what plans, simulates and carries knows no engine": ("channels/local.py", "import rlgraph.engines.registry"),
    "channels carry columns, whatever graph they are of": ("channels/local.py", "import rlgraph.graph.nodes"),
    "nodes know engines by what all engines are": ("nodes/items.py", "import rlgraph.engines.vllm.engine"),
    "plug-ins are found by name: no module outside of its own folder imports one": (
        "engines/lora.py",
        "import rlgraph.engines.exact.rules",
    ),
    "the walls of a sandbox are known to the sandbox": ("nodes/items.py", "import rlgraph.nodes.walls.session"),
}


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Each module's path below the package, or below the root for another folder, and its text."""
    for folder in folders or ("rlgraph",):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(PACKAGE if folder == "rlgraph" else ROOT)), path.read_text()


def long_functions(source: str) -> list[str]:
    """The functions with more lines than one may have, decorators aside."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ]


def tells_no_work(source: str) -> list[str]:
    """The functions whose docstring says that they return something, where it is more than to look it up."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (ast.get_docstring(node) or "").startswith("Return")
        and (node.end_lineno or 0) - (node.body[0].end_lineno or 0) > ACCESSOR_LINES
    ]


def imported(source: str) -> Iterator[str]:
    """The modules and names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_of_others(source: str) -> set[str]:
    """The private names that a module uses of objects and modules, without those that it defines itself."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
    return {name for name in used - own if name.startswith("_") and not name.endswith("__")}


def contracts(folder: Path) -> str:
    """Run import-linter over the copy of the package in a folder."""
    code = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=250, check=False).stdout


def test_no_function_is_too_long_to_read_at_once() -> None:
    found = {
        f"{'/'.join(name.split('/')[-2:])}:{function}"
        for name, text in sources("rlgraph", "rlgraph_cli", "benchmarks", "recipes")
        for function in long_functions(text)
    }
    assert found == set()
    body = "    pass\n" * FUNCTION_LINES
    assert long_functions(f"def long():\n{body}\n\ndef fits():\n{body[9:]}") == ["long"]


def test_a_docstring_tells_the_work_of_a_function_that_does_more_than_look_something_up() -> None:
    shown = sources("rlgraph", "rlgraph_cli", "benchmarks", "recipes")
    assert {name: found for name, text in shown if (found := tells_no_work(text))} == {}
    work = "    x = 1\n" * (ACCESSOR_LINES + 1)
    assert tells_no_work(f'def late():\n    """Return x."""\n{work}\n\ndef says():\n    """Add up."""\n{work}') == ["late"]


def test_torch_distributed_is_known_to_the_trainer_and_to_one_channel() -> None:
    def breaks(source: str) -> bool:
        return "distributed" in source and any(f"{name}.".startswith("torch.distributed.") for name in imported(source))

    found = [name for name, text in sources() if breaks(text)]
    assert [name for name in found if not name.startswith(DISTRIBUTED)] == []
    assert all(any(name.startswith(place) for name in found) for place in DISTRIBUTED)
    assert breaks("def f():\n    from torch import distributed as dist")
    assert breaks("import torch.distributed.fsdp")


def test_private_names_are_used_in_their_own_module_alone() -> None:
    found = {name: private for name, text in sources() if not name.startswith("engines/") and (private := private_of_others(text))}
    assert {name: more for name, private in found.items() if (more := private - PRIVATE.get(name, set()))} == {}
    assert {name: gone for name, known in PRIVATE.items() if (gone := known - found.get(name, set()))} == {}, "no longer used"
    beside = {Path(name).stem: private_of_others(text) for name, text in sources("rlgraph_cli", "benchmarks", "recipes")}
    assert {name: private for name, private in beside.items() if private} == PRIVATE_SHOWN
    assert private_of_others("class A:\n    def f(self, other): return other._hidden, self._mine, other._mine, len.__name__") == {"_hidden"}
    assert private_of_others("from rlgraph.columns import _rows") == {"_rows"}


def test_the_contracts_of_imports_hold_and_each_can_be_broken(tmp_path: Path) -> None:
    names = {contract["name"] for contract in CONTRACTS["importlinter"]["contracts"]}
    assert names == BREACHES.keys(), "say in BREACHES how a new contract is broken"
    for folder in ("rlgraph", "rlgraph_cli"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert f"Contracts: {len(names)} kept, 0 broken" in contracts(tmp_path)
    for file, line in BREACHES.values():
        with (tmp_path / "rlgraph" / file).open("a") as module:
            module.write(f"\n{line}\n")
    assert f"Contracts: 0 kept, {len(names)} broken" in contracts(tmp_path)


@pytest.mark.parametrize("folder", ["rlgraph", "rlgraph_cli", "benchmarks", "recipes"])
def test_mypy_is_strict_over_all_that_is_shown(folder: str) -> None:
    assert CONTRACTS["mypy"]["strict"] is True
    assert folder in CONTRACTS["mypy"]["files"]
    loosened = {module for override in CONTRACTS["mypy"]["overrides"] for module in override["module"]}
    assert not [module for module in loosened if module.startswith(("benchmarks", "recipes"))]


def test_planted_faults_are_faults_of_the_code_as_it_is() -> None:
    assert worth.stale() == []
