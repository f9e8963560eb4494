"""Continuous integration fails when a test skips for want of anything but a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = "import pytest\n@pytest.mark.gpu\ndef test_gpu() -> None:\n    pytest.skip('needs 1 GPU(s)')\n"
BROWSER = "import pytest\ndef test_browser() -> None:\n    pytest.skip('no Chromium on this machine')\n"
MISSING = "import pytest\npytest.importorskip('no_such_package_here')\ndef test_it() -> None: ...\n"


@pytest.mark.parametrize(
    ("sources", "options", "passes"),
    [
        ([GPU], ["--skips", "1"], True),
        ([GPU], ["--skips", "0"], False),
        ([GPU], ["--skips", "2"], False),
        ([GPU, BROWSER], ["--skips", "2"], False),
        ([GPU, MISSING], ["--skips", "2"], False),
        ([GPU, BROWSER, MISSING], [], True),
    ],
)
def test_only_tests_that_need_a_gpu_may_skip(tmp_path: Path, sources: list[str], options: list[str], passes: bool) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p xdist\nmarkers =\n    gpu: needs a GPU\n    multi_gpu: needs two\n")
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("skip_limit.py").read_text())
    for index, source in enumerate(["def test_passes() -> None: ...\n", *sources]):
        (tmp_path / f"test_{index}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "1", *options]
    only_ours = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # most of the time of a start is other plugins'
    done = subprocess.run(command, cwd=tmp_path, env=only_ours, capture_output=True, text=True, timeout=250)
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    assert ("for want of a GPU" in done.stdout) is not passes
