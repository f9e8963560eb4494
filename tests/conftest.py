"""For all tests."""

import os
from pathlib import Path

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: its threads spin while they wait for cores of other tests

from rlgraph.engines.precision import leave_out_broken_amx

pytest_plugins = [
    "pytester",
    "stages",
    *(f"pytest_plugins.{name}" for name in ("leftovers", "missing_parts", "file_order", "second_chance", "skip_limit")),
]
ROOT = Path(__file__).parents[1]
os.environ["RAY_ADDRESS"] = "local"  # else programs join the Ray that another test has on this machine, and end with it
leave_out_broken_amx()  # tests multiply in bfloat16 themselves
settings.register_profile("untimed", deadline=None)  # the first example of a busy machine may take seconds
settings.load_profile("untimed")
