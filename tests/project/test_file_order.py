"""Workers that share the tests take the long files first, and short ones beside them."""

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from support.paths import TESTS

FILES = {
    "plain": "import pytest\n\n@pytest.mark.parametrize('n', range(5))\ndef test_it(n): ...\n",
    "short": "def test_it(): ...\n",
    "a_ray": "import pytest\n\n@pytest.mark.ray\ndef test_it(): ...\n",
    "vllm": "import pytest\n\ndef test_first(): ...\n\n@pytest.mark.vllm\ndef test_it(): ...\n",
}


def ran(folder: Path, *options: str) -> dict[str, list[str]]:
    """Run the files, and list each worker's, in the order in which it ran them."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p xdist\nmarkers =\n    ray:\n    vllm:\n")
    (folder / "conftest.py").write_text("pytest_plugins = ['file_order']\n")
    shutil.copy(TESTS / "pytest_plugins" / "file_order.py", folder)
    for name, source in FILES.items():
        (folder / f"test_{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
    only_ours = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=only_ours, capture_output=True, text=True, timeout=250)
    assert "9 passed" in done.stdout, done.stdout + done.stderr
    found: dict[str, list[str]] = defaultdict(list)
    for line in done.stdout.splitlines():
        if " PASSED " in f" {line} ":
            worker, test = line.split("]")[0] if line.startswith("[") else "", line.split("test_", 1)[1]
            if test.split(".")[0] not in found[worker]:
                found[worker].append(test.split(".")[0])
    return found


def test_one_worker_goes_from_the_long_files_and_the_other_from_the_short_ones_until_they_meet(tmp_path: Path) -> None:
    found = ran(tmp_path, "--numprocesses", "2", "--dist", "loadfile")
    assert sorted(found.values()) == [["short", "plain"], ["vllm", "a_ray"]]


def test_a_run_in_one_process_keeps_its_order(tmp_path: Path) -> None:
    assert list(ran(tmp_path).values()) == [["a_ray", "plain", "short", "vllm"]]
