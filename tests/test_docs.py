"""What the documents show is what there is."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readme_example_compiles_as_it_stands(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    before_launch, launch = code[1].split("with plan.launch()")
    assert "job.steps(10)" in launch
    script = before_launch.replace('"smollm2"', '"tiny"')
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    assert "staleness at most 1" in found.stdout


def test_the_readmes_picture_is_what_is_drawn_today(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "draw.py"), str(tmp_path / "ppo.svg")], check=True, timeout=60)
    assert (tmp_path / "ppo.svg").read_text() == (ROOT / "docs" / "ppo.svg").read_text()
