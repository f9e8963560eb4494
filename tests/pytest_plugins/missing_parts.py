"""Leaves out tests that this machine or environment cannot run, which is no fault of theirs, and says at the end which and why.

Packages whose pins exclude ours have environments of their own: `make test-sglang`, `make test-environments`.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from stages import stage_of
from support import namespaces

from rlgraph.errors import GraphError
from rlgraph.nodes.sandbox import Limits, check

ROOT = Path(__file__).parents[2]
LEFT_OUT = pytest.StashKey[str]()


def marks(item: pytest.Item) -> set[str]:
    """The names of a test's markers, and of its stage."""
    return {mark.name for mark in item.iter_markers()} | {stage_of(item)}


def sandbox_refused() -> str:
    """Why no code of a model can be run on this machine, as the tool says it; empty if it can."""
    try:
        check(Limits())
    except GraphError as error:
        return str(error)
    return ""


def missing(markers: set[str]) -> dict[str, str]:
    """Find which of the markers name something that is missing here, and what to do about it."""
    found = {}
    if "sglang" in markers and not find_spec("sglang"):
        found["sglang"] = "SGLang is not installed; `make test-sglang` runs them"
    if "apart" in markers and not all((ROOT / name).exists() for name in (".venv-openenv", ".venv-verifiers")):
        found["apart"] = "the environments of other packages are not made; `make test-environments` runs them"
    for framework in ("smolagents", "langgraph"):
        if framework in markers and not (ROOT / f".venv-{framework}").exists():
            found[framework] = f"the environment of {framework} is not made; `make test-environments` runs them"
    if "ray_jobs" in markers and not (ROOT / ".venv-jobs").exists():
        found["ray_jobs"] = "no environment has ray[default], which takes jobs; `make test-environments` runs them"
    if "slurm" in markers and not shutil.which("slurmd"):
        found["slurm"] = "SLURM is not installed: apt-get install slurmd slurmctld slurm-client"
    if "without_slurm" in markers and shutil.which("slurmd"):
        found["without_slurm"] = "SLURM is installed, whose tests do the same"
    if "openssl" in markers and not shutil.which("openssl"):
        found["openssl"] = "the command openssl, which makes certificates, is not installed"
    if "namespaces" in markers and (reason := namespaces.explain_refusal()):
        found["namespaces"] = f"no host of namespaces can be made: {reason}"
    if "sandbox" in markers and (reason := sandbox_refused()):
        found["sandbox"] = reason
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = missing({name for item in items for name in marks(item)})
    out = [item for item in items if reasons.keys() & marks(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
        config.stash[LEFT_OUT] = "; ".join(f"tests marked {name} are left out: {reason}" for name, reason in reasons.items())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that prints, if this one works for it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if said := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = said


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if said := config.stash.get(LEFT_OUT, ""):
        terminalreporter.write_line(said)
