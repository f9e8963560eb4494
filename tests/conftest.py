"""For all tests."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from rlgraph.engines.amx import leave_out_broken_amx

pytest_plugins = ["left_behind", "second_chance", "skip_limit"]
ROOT = Path(__file__).parents[1]
leave_out_broken_amx()  # tests multiply in bfloat16 themselves


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of packages whose pins exclude ours: `make test-sglang`, `make test-environments` have environments for them."""
    missing = [] if find_spec("sglang") else ["sglang"]
    missing += [] if all((ROOT / name).exists() for name in (".venv-openenv", ".venv-verifiers")) else ["apart"]
    if apart := [item for item in items if any(item.get_closest_marker(name) for name in missing)]:
        config.hook.pytest_deselected(items=apart)
        items[:] = [item for item in items if item not in apart]
