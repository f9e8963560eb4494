"""For all tests."""

from pathlib import Path

from rlgraph.engines.amx import leave_out_broken_amx

pytest_plugins = ["left_behind", "left_out", "long_first", "second_chance", "skip_limit"]
ROOT = Path(__file__).parents[1]
leave_out_broken_amx()  # tests multiply in bfloat16 themselves
