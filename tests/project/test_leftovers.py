"""The test that leaves something behind in its process fails, and no later one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import TESTS

# A group of a module that stands for torch's, which takes seconds to import.
GROUP = """
import sys, types
torch = types.SimpleNamespace(made=False, is_available=lambda: True, is_initialized=lambda: torch.made)
def destroy():
    torch.made = False
torch.destroy_process_group = destroy
sys.modules["torch.distributed"] = torch
"""
WAYS = {
    "a process group": (GROUP, "torch.made = True", "not torch.made"),
    "the working folder": ("import os\nhere = os.getcwd()", "os.chdir('/')", "os.getcwd() == here"),
    "logging.disable(50)": ("import logging", "logging.disable()", "logging.root.manager.disable == 0"),
}


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text("from leftovers import *\n")
    shutil.copy(TESTS / "pytest_plugins" / "leftovers.py", folder)
    (folder / "test_it.py").write_text(f"import pytest\n{source}\n")
    only_ours = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=folder, env=only_ours, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("what", WAYS)
def test_the_culprit_fails_and_the_next_test_finds_nothing(what: str, tmp_path: Path) -> None:
    before, leave, clean = WAYS[what]
    done = run(tmp_path, f"{before}\ndef test_culprit():\n    {leave}\ndef test_next():\n    assert {clean}")
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert f"test_culprit leaves {what}" in done.stdout


def test_a_file_whose_fixture_leaves_something_is_named_at_its_end(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"{GROUP}\n@pytest.fixture(scope='module')\ndef made():\n    torch.made = True\n"
        "def test_one(made):\n    assert torch.made\ndef test_two(made):\n    assert torch.made",
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "a fixture of test_it.py leaves a process group" in done.stdout


def test_what_fixtures_undo_is_not_left(tmp_path: Path) -> None:
    source = "@pytest.fixture\ndef elsewhere(monkeypatch):\n    monkeypatch.chdir('/')\n"
    done = run(tmp_path, f"{source}def test_it(elsewhere): ...\ndef test_too(monkeypatch):\n    monkeypatch.chdir('/')")
    assert done.returncode == 0, done.stdout + done.stderr
