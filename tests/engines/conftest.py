"""Tiny models on disk, and the processes of engines: each is made once for all tests of engines."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_programs
from support.paths import PROGRAMS, PYTHONPATH
from support.tiny import tiny_llama


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of one order: torch has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models"), tied=False)


@pytest.fixture(scope="session")
def in_process(tied: Path, untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function that gives what a process found in which an engine is alone with a model: `engine_process.py`.

    Files that look at the same engine share it, also where several workers run them: the first one starts the process. One of them has
    a head of its own; what else vLLM loads again is in test_published_families.py.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # of all workers of this run

    @cache
    def found(engine: str) -> dict[str, Any]:
        folder, out = untied if engine == "sglang" else tied, shared / f"engine {engine}.pt"
        part = out.with_suffix(".part")
        command = [str(PROGRAMS / "engine_process.py"), engine, str(folder), str(part)]
        own = {"VLLM_CACHE_ROOT": str(out.with_suffix(".new"))}
        with out.with_suffix(".printed").open("a+") as printed:
            fcntl.flock(printed, fcntl.LOCK_EX)
            if not out.exists():
                if engine == "vllm":
                    done = forked_programs.run(*command, cwd=shared, timeout_s=280, **own)
                    printed.write(done.stdout + done.stderr)
                    printed.flush()
                else:  # what SGLang loads when its process starts has to come first
                    path = {"PYTHONPATH": PYTHONPATH}
                    done = subprocess.run(
                        [sys.executable, *command], env=os.environ | path, stdout=printed, stderr=subprocess.STDOUT, timeout=280
                    )
                assert done.returncode == 0, out.with_suffix(".printed").read_text()
                part.rename(out)
        loaded: dict[str, Any] = torch.load(out)
        return loaded | {"engine": engine, "folder": folder, "printed": out.with_suffix(".printed").read_text()}

    return found
