"""An actor of Ray sets its worker's variables before it imports what reads them, and finds what the driver finds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from support import fakes

from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver import ray_dispatch
from rlgraph.runtime.driver.hosts import worker_environment
from rlgraph.runtime.worker.spec import worker_specs

READERS = ["torch", "numpy", "transformers", "huggingface_hub", "tokenizers", "vllm"]  # of OMP_NUM_THREADS, HF_HOME and others
ACTOR = """
import gc, json, os, sys
from ray import cloudpickle
given = json.loads(sys.argv[2])
seen = {}
class Watch:
    def find_spec(self, name, *_):
        if name in given["readers"]:
            seen[name] = all(os.environ.get(key) == value for key, value in given["variables"].items())
sys.meta_path.insert(0, Watch())
import ray
ray._private.worker  # a process of Ray has imported this much
actor = cloudpickle.load(open(sys.argv[1], "rb"))
early = sorted({*seen, *({"rlgraph"} & sys.modules.keys())})
actor(given["variables"])
import only_the_driver_has_it, rlgraph
print(json.dumps({"early": early, "seen": seen, "collects": gc.isenabled(), "rlgraph": rlgraph.__file__, "own": sys.path[:1]}))
"""


def variables(monkeypatch: pytest.MonkeyPatch, *folders: str) -> dict[str, str]:
    """The variables of a worker of a job whose driver has these folders in its path."""
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    graph = fakes.vector_loop(1)
    spec = worker_specs(graph, compile_plan(graph, Cluster(cpus=2)), "", b"", 1.0, None)[0]
    return worker_environment(spec)


@pytest.mark.stage("jobs")
def test_variables_are_set_before_anything_that_reads_them_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_the_driver_has_it.py").touch()
    with open(tmp_path / "actor", "wb") as file:
        cloudpickle.dump(ray_dispatch._actor_class(), file)
    here = str(Path(ray_dispatch.__file__).parents[3])
    wanted = variables(monkeypatch, str(tmp_path), here) | {"OMP_NUM_THREADS": "3", "HF_HOME": "elsewhere"}
    given = {"readers": READERS, "variables": wanted}
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", ACTOR, str(tmp_path / "actor"), json.dumps(given)]
    done = subprocess.run(command, env=alone, cwd=tmp_path.parent, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["early"] == []
    assert found["seen"]["torch"]
    assert all(found["seen"].values())
    assert found["collects"]
    assert found["own"] == [str(tmp_path)]
    assert found["rlgraph"].startswith(here)
