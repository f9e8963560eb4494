"""For all tests."""

from skip_limit import pytest_addoption, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401 (hooks)

from rlgraph.engines.amx import leave_out_broken_amx

leave_out_broken_amx()  # tests multiply in bfloat16 themselves
