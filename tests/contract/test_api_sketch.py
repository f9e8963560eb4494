"""The public API as its users write it: the sketch beside this file is the contract, and runs unchanged."""

import json
from pathlib import Path
from xml.etree import ElementTree

from support import forked_programs

SKETCH = Path(__file__).parent / "api_sketch.py"


def test_the_sketch_declares_compiles_prints_and_draws_all_of_its_graphs(tmp_path: Path) -> None:
    found = forked_programs.run(str(SKETCH), "gpus=16", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("certificate: staleness at most") == 5
    for name in ("sync_colocated", "one_step_off", "k_step_off", "ppo", "tool_use"):
        ElementTree.parse(tmp_path / f"{name}.svg")
        assert json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]


def test_the_sketch_refuses_an_unknown_setting(tmp_path: Path) -> None:
    found = forked_programs.run(str(SKETCH), "gpu=16", cwd=tmp_path)
    assert found.returncode != 0
    assert "Key 'gpu' not in 'Config'" in found.stderr
