"""Every test here needs GPUs: each runs in processes of its own, since vLLM and a trainer do not share one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a script beside this file in a process of its own and gives what it printed."""

    def run(script: str, *arguments: str, timeout_s: float = 280) -> str:
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=os.environ, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, and so count, what this machine has too few GPUs for."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, least in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and gpus < least:
                item.add_marker(pytest.mark.skip(reason=f"needs {least} GPU(s), this machine has {gpus}"))
