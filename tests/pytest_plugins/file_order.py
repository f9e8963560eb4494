"""The order of the files where several workers share them: those that start Ray, engines or long runs first, and the others beside them.

xdist's own order is by the number of tests, which keeps the longest for the end: the run then waits for files of one or two tests with
idle cores. Here all workers but one take files from the front, where the long ones are, and the last one takes from the back until they
meet. So a file that waits for processes to start has one beside it that computes, and the last files are of middle length.
"""

import math
from collections.abc import Iterable
from typing import Any

import pytest

SECONDS = {"vllm": 25.0, "ray": 12.0, "slurm": 60.0, "namespaces": 15.0}  # that a test of this marker may take
SHORT = 0.1  # of a test without one


def estimate_seconds(item: pytest.Item) -> float:
    """Guess what a test takes from its markers: no list of tests could grow old."""
    return max((SECONDS.get(mark.name, SHORT) for mark in item.iter_markers()), default=SHORT)


def estimate_file_seconds(tests: list[pytest.Item]) -> float:
    """Guess what the tests of a file take: one that is given more time than others will use it."""
    given = [mark.args[0] for item in tests for mark in item.iter_markers("timeout") if mark.args]
    return math.fsum(map(estimate_seconds, tests)) + max(given, default=0.0) / 6


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Order files by what their tests take together, and leave the tests of a file in their order."""
    files: dict[Any, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return [item for _, tests in sorted(files.items(), key=lambda file: -estimate_file_seconds(file[1])) for item in tests]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # every worker collects, and all must find one order; a run in one process keeps its own
        items[:] = longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FromBothEnds(LoadFileScheduling):
        """Gives the last worker the last file, and the others the first."""

        def _assign_work_unit(self, node: Any) -> None:
            if len(self.nodes) > 1 and node is self.nodes[-1]:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return FromBothEnds(config, log)
