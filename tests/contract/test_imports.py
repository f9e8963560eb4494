"""Importing rlgraph is light; no import circles, no two classes of one name; engines go by their specs."""

import ast
import inspect
import pickle
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import grimp
import networkx as nx
import pytest
from ray import cloudpickle
from support.public import BY_SUBJECT, PUBLIC

import rlgraph as rg
from rlgraph import api
from rlgraph.engines.registry import ENGINES, TRAINERS

PACKAGE = Path(rg.__file__).parent


def printed(code: str) -> str:
    """What a process of its own prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True).stdout.strip()


def test_import_brings_no_library_and_no_module_before_a_name_is_asked_for() -> None:
    libraries = "numpy", "torch", "transformers", "ray", "vllm", "networkx", "pyarrow", "datasets", "omegaconf", "rich"
    loaded = f"[m for m in sys.modules if m in {libraries} or m.startswith('rlgraph.')]"
    assert (
        printed(f"import sys, rlgraph; dir(rlgraph); print({loaded}); rlgraph.errors.ConfigError; print({loaded})")
        == "[]\n['rlgraph.errors']"
    )


def test_what_declares_and_compiles_loads_no_engine() -> None:
    heavy = "ray", "vllm", "sglang", "transformers", "torch.distributed.fsdp", "pyarrow", "datasets"
    assert printed(f"import sys, rlgraph.api; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_a_worker_loads_no_trainer_before_it_needs_one() -> None:
    heavy = "vllm", "transformers", "torch.distributed.fsdp"
    assert printed(f"import sys, rlgraph.runtime.worker.process; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_a_public_name_stays_what_it_is_when_its_module_is_imported() -> None:
    code = "import rlgraph.config, rlgraph.record, rlgraph.diagnosis, rlgraph as rg"
    assert printed(f"{code}; print(*map(callable, (rg.config, rg.record, rg.runs.doctor)))") == "True True True"


def test_modules_of_the_package_are_there_without_an_import_of_their_own() -> None:
    code = "import rlgraph as rg; print(rg.algorithms.__name__, rg.data.__name__, rg.runs.sinks.__name__, hasattr(rg, 'no_such'))"
    assert printed(code) == "rlgraph.algorithms rlgraph.data rlgraph.recording.sinks False"


def test_a_star_import_brings_every_public_name() -> None:
    names: dict[str, object] = {}
    exec("from rlgraph import *", names)
    assert {*names} - {"__builtins__"} == {*rg.__all__}


def test_type_checkers_and_imports_read_the_same_public_names() -> None:
    stub = ast.parse(Path(rg.__file__).with_suffix(".pyi").read_text())
    named = {(n.module, a.name) for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
    assert named == {(module, name) for name, module in rg._NAMES.items()}
    assert {*rg._NAMES} == {*rg.__all__} <= {*dir(rg)}


def test_a_plan_launches_and_draws_by_the_signatures_of_the_facade() -> None:
    for name in ("launch", "draw", "timeline", "run_here", "ray_dag"):
        ours, theirs = (inspect.signature(getattr(place, name)).parameters for place in (rg.Plan, api))
        assert [str(each) for each in ours.values()][1:] == [str(each) for each in theirs.values()][1:], name


def test_a_function_of_a_script_may_name_the_package() -> None:
    scope: dict[str, Any] = {"__name__": "__main__", "rg": rg}
    exec("def function():\n    return rg.agents.Message('user', 'hello')", scope)
    assert pickle.loads(cloudpickle.dumps(scope["function"]))() == rg.agents.Message("user", "hello")


def test_public_names_are_pickled_by_their_own_modules() -> None:
    values = [value for value in PUBLIC.values() if inspect.isclass(value) or inspect.isfunction(value)]
    assert [value for value in values if pickle.loads(pickle.dumps(value)) != value] == []


def test_every_name_of_a_subject_is_found_by_its_old_spelling_with_a_warning() -> None:
    assert len(rg.__all__) - len(rg._SUBJECTS) <= 50
    for spelling, value in BY_SUBJECT.items():
        subject, name = spelling.split(".")
        if name not in rg.__all__:
            with pytest.warns(DeprecationWarning, match=rf"rlgraph\.{name} is rlgraph\.{subject}\.{name} now"):
                assert getattr(rg, name) is value


def test_every_public_name_has_a_docstring() -> None:
    for name, value in PUBLIC.items():
        assert callable(value) is False or value.__doc__ or name == "Columns", name


def test_every_public_name_that_a_user_calls_has_an_example() -> None:
    called = {name: value for name, value in PUBLIC.items() if inspect.isclass(value) or inspect.isfunction(value)}
    raised = {name for name, value in called.items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert {name for name, value in called.items() if ">>>" not in (value.__doc__ or "")} - raised == set()


@pytest.fixture(scope="module")
def imports() -> nx.DiGraph:
    """Which module imports which, wherever in the file, also for the type checker alone."""
    found = grimp.build_graph("rlgraph", cache_dir=None)
    return nx.DiGraph((module, other) for module in found.modules for other in found.find_modules_directly_imported_by(module))


def test_no_modules_import_each_other_in_a_circle(imports: nx.DiGraph) -> None:
    circles = [sorted(circle) for circle in nx.strongly_connected_components(imports) if len(circle) > 1]
    assert circles == []
    assert len(imports) > 150, "the graph of imports is not that of the package"


def test_the_facade_is_above_all_and_a_plan_knows_it_by_its_name_alone(imports: nx.DiGraph) -> None:
    assert set(imports.predecessors("rlgraph.api")) == {"rlgraph.curriculum", "rlgraph.planning", "rlgraph.runs"}
    assert nx.has_path(imports, "rlgraph.api", "rlgraph.plan.plan")
    assert not any(
        name.startswith(("rlgraph.render", "rlgraph.analysis", "rlgraph.runtime")) for name in nx.descendants(imports, "rlgraph.plan.plan")
    )


def compared_texts(source: str) -> set[str]:
    """The texts that a module compares something with."""
    compared = (side for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare) for side in (node.left, *node.comparators))
    constants = (part for side in compared for part in ast.walk(side) if isinstance(part, ast.Constant))
    return {constant.value for constant in constants if isinstance(constant.value, str)}


def test_no_module_outside_of_the_engines_compares_an_engines_name() -> None:
    names, root = {*ENGINES.names(), *TRAINERS.names()}, Path(rg.__file__).parent
    assert compared_texts("if engine in ('vllm', other) or 'fsdp' != trainer: pass") == {"vllm", "fsdp"}
    outside = [path for path in root.rglob("*.py") if "engines" not in path.relative_to(root).parts]
    assert {path.name: found for path in outside if (found := compared_texts(path.read_text()) & names)} == {}


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
