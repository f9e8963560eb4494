"""The tutorial on a task of one's own: its two programs run as they stand on the page, with a random model, and its commands exist."""

import json
import re
from pathlib import Path

import pytest
from support import forked_programs, forked_workers
from support.recipe_runs import run_program

from rlgraph.runtime.driver.ray_dispatch import DISPATCHES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "your_task.md").read_text()
TINY = ["model=tiny", "engine=transformers"]


pytestmark = pytest.mark.stage("recipes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs of the page and the data that the first one writes."""
    for name, code in zip(("make_data.py", "task.py"), re.findall(r"```python\n(.*?)```", PAGE, re.S), strict=True):
        (tmp_path / name).write_text(code)
    made = forked_programs.run(str(tmp_path / "make_data.py"), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    return tmp_path


def test_the_tutorials_recipe_trains_evaluates_and_exports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "python task.py model=tiny engine=transformers steps=2 every=1 out=runs/trial\n" in PAGE
    monkeypatch.chdir(folder)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    run_program(folder / "task.py", monkeypatch, *TINY, "steps=2", "every=1", "out=runs/trial")
    lines = [json.loads(line) for line in (folder / "runs" / "trial" / "metrics.jsonl").read_text().splitlines()]
    assert all({"critic/rewards/mean", "val/acc/mean@1", "critic/advantages/zero"} < line.keys() for line in lines)
    assert (folder / "runs" / "trial" / "model" / "model.safetensors").exists()
    assert "rlgraph export runs/task/checkpoints runs/task/model-bf16 --dtype bfloat16\n" in PAGE
    forked_programs.run("-m", "rlgraph", "export", "runs/trial/checkpoints", "runs/trial/model-bf16", "--dtype", "bfloat16", cwd=folder)
    assert (folder / "runs" / "trial" / "model-bf16" / "config.json").exists()
