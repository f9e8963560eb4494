"""For all tests."""

from importlib.util import find_spec

import pytest

from rlgraph.engines.amx import leave_out_broken_amx

pytest_plugins = ["left_behind", "second_chance", "skip_limit"]
leave_out_broken_amx()  # tests multiply in bfloat16 themselves


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of SGLang where it is not installed: its pins exclude vLLM's, so `make test-sglang` has an environment for it."""
    if find_spec("sglang") is None and (apart := [item for item in items if item.get_closest_marker("sglang")]):
        config.hook.pytest_deselected(items=apart)
        items[:] = [item for item in items if item not in apart]
