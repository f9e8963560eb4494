"""Task sets of verifiers, whose tasks are single questions or conversations, scored in verifiers' own environment of packages."""

import sys
from pathlib import Path
from typing import Any

from rlgraph.nodes.environments.adapters.process import ProcessEnvironments, process

CHILD = Path(__file__).parent / "elsewhere" / "verifiers_child.py"


def verifiers(
    taskset: str, *, python: str | Path = sys.executable, processes: int = 1, most: int = 1000, **config: Any
) -> ProcessEnvironments:
    """Score responses by a task set of verifiers 0.4: `agent=rg.environments.verifiers("my_tasks:MyTaskset", python="vf/bin/python")`.

    verifiers' pins exclude rlgraph's, so it lives in an environment of its own, whose `python` runs the tasks. `taskset` names a class as
    "module:Class" or "file.py:Class"; `config` are the fields of its configuration. `rg.environments.verifiers_rows(…)` of the same
    arguments has the prompts, of the first `most` tasks.

    The model answers once. The trace that the task scores has the prompt and that answer; rewards are summed by their weights, and
    metrics become `agent/info/NAME`. Tasks that need a runtime (a sandbox) or tools are refused. Tested with verifiers 0.4.0.
    """
    return process(f"{CHILD}:ScoredTask", ["task"], python=python, processes=processes, taskset=taskset, most=most, config=config)


def verifiers_rows(taskset: str, *, python: str | Path = sys.executable, most: int = 1000, **config: Any) -> list[dict[str, Any]]:
    """List the tasks of a task set as rows for `rg.prompts`: `prompt`, and `task`, its place."""
    found = verifiers(taskset, python=python, most=most, **config).listed()
    return [dict(row) for row in found]
