"""A trainer with exact=True gives the log-probs that vLLM sampled with, to the bit, and learns as any other."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import PROGRAMS, PYTHONPATH
from support.tiny import tiny_llama, tiny_qwen

pytestmark = [pytest.mark.stage("plugins"), pytest.mark.vllm, pytest.mark.timeout(600)]

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two processes found of each family: `exact_process.py`. The engine's own start takes most of it."""
    parent, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out")
    folders = [tiny_llama(parent).rename(parent / "llama"), *(tiny_qwen(parent, family) for family in FAMILIES[1:])]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, str(PROGRAMS / "exact_process.py"), "trainer", str(out), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module", params=FAMILIES)
def found(request: pytest.FixtureRequest, processes: Path) -> dict[str, Any]:
    """What they found of one family."""
    loaded: dict[str, Any] = torch.load(processes / request.param / "found.pt")
    return loaded


def test_every_token_is_equal_in_every_bit_whatever_the_passes_and_after_updates(found: dict[str, Any]) -> None:
    for name in ("exact", "other passes", "exact again"):
        assert [(equal, most) for equal, _, most in found[name]] == [(tokens, 0.0) for _, tokens, _ in found[name]], name
    assert len(found["exact"]) == 4  # before and after updates, at two temperatures


@pytest.mark.parametrize("name", ["own rotation", "own attention", "own log-softmax", "stale weights"])
def test_one_operation_put_back_is_seen(found: dict[str, Any], name: str) -> None:
    assert any(equal < tokens for equal, tokens, _ in found[name]), found[name]


def test_a_linear_map_does_not_depend_on_the_number_of_rows(found: dict[str, Any]) -> None:
    assert all(found["rows"]["exact"])
    assert not all(found["rows"]["own"])


def test_updates_are_those_of_the_trainer_without_exact_but_for_rounding(found: dict[str, Any]) -> None:
    for exact, plain in found["steps"]:
        assert exact == pytest.approx(plain, rel=1e-5)
