"""Continuous integration runs a few failed tests once more, alone, and names those that pass then."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import TESTS

FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("index", range({tests}))
def test_flaky(index):
    ran = Path(__file__).with_name(f"ran_{{index}}")
    if not ran.exists():
        ran.touch()
        raise RuntimeError("the first failure")
"""
DIES = "import os\n\ndef test_dies():\n    os._exit(3)\n"
BROKEN = "def test_broken():\n    raise RuntimeError('always')\n"
SKIPS = "import pytest\n\ndef test_skips():\n    pytest.skip('no browser')\n"
UNSTABLE, AGAIN = "unstable: passed when run alone", "failed again when run alone"


def run(folder: Path, sources: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p xdist\n")
    (folder / "conftest.py").write_text("pytest_plugins = ['skip_limit', 'second_chance']\n")
    for plugin in ("skip_limit.py", "second_chance.py"):
        shutil.copy(TESTS / "pytest_plugins" / plugin, folder)
    for index, source in enumerate(["def test_passes() -> None: ...\n", *sources]):
        (folder / f"test_{index}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    only_ours = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # most of the time of a start is other plugins'
    return subprocess.run(command, cwd=folder, env=only_ours, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize(
    ("sources", "options", "passes", "headings"),
    [
        ([FLAKY.format(tests=2)], ["--second-chance", "2", "--numprocesses", "2"], True, {UNSTABLE}),
        ([FLAKY.format(tests=2)], ["--second-chance", "1"], False, set()),
        ([DIES], ["--second-chance", "1", "--numprocesses", "1"], False, {AGAIN}),
        ([BROKEN, FLAKY.format(tests=1)], ["--second-chance", "2"], False, {UNSTABLE, AGAIN}),
        ([FLAKY.format(tests=1), SKIPS], ["--second-chance", "1", "--no-skips"], False, {UNSTABLE}),
    ],
    ids=["in workers", "too many", "dies", "one of two", "another skips"],
)
def test_a_run_passes_if_its_few_failed_tests_pass_alone(
    tmp_path: Path, sources: list[str], options: list[str], passes: bool, headings: set[str]
) -> None:
    done = run(tmp_path, sources, *options)
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    assert {heading for heading in (UNSTABLE, AGAIN) if heading in done.stdout} == headings


def test_each_unstable_test_is_named_below_its_first_failure(tmp_path: Path) -> None:
    done = run(tmp_path, [FLAKY.format(tests=2)], "--second-chance", "2")
    failures, unstable = done.stdout.split(UNSTABLE)
    assert failures.count("RuntimeError: the first failure") >= 2
    assert [line for line in unstable.splitlines() if line.startswith("test_1.py::")] == [f"test_1.py::test_flaky[{i}]" for i in (0, 1)]
