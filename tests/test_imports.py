"""Importing rlgraph is light: it brings neither Ray nor vLLM nor transformers. No two modules import each other."""

import subprocess
import sys

import grimp
import networkx as nx
import pytest

import rlgraph as rg


def test_import_brings_no_heavy_library() -> None:
    code = "import sys, rlgraph; print([m for m in ('ray', 'vllm', 'transformers', 'torch.distributed.fsdp') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_has_a_docstring() -> None:
    for name in rg.__all__:
        value = getattr(rg, name)
        assert callable(value) is False or value.__doc__ or name == "Columns", name


@pytest.fixture(scope="module")
def imports() -> nx.DiGraph:
    """Which module imports which, wherever in the file, but for what the type checker alone reads."""
    found = grimp.build_graph("rlgraph", exclude_type_checking_imports=True, cache_dir=None)
    return nx.DiGraph((module, other) for module in found.modules for other in found.find_modules_directly_imported_by(module))


def test_no_modules_import_each_other_whatever_way_round(imports: nx.DiGraph) -> None:
    circles = [sorted(circle) for circle in nx.strongly_connected_components(imports) if len(circle) > 1]
    assert circles == []
    assert len(imports) > 150, "the graph of imports is not that of the package"


def test_the_facade_is_above_all_and_a_plan_knows_it_by_a_protocol_alone(imports: nx.DiGraph) -> None:
    assert set(imports.predecessors("rlgraph.api")) == {"rlgraph"}
    assert nx.has_path(imports, "rlgraph.api", "rlgraph.planning.plan")
    assert not any(name.startswith(("rlgraph.views", "rlgraph.runtime")) for name in nx.descendants(imports, "rlgraph.planning.plan"))
