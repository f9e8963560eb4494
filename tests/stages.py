"""Divides the tests into stages, and prints what each stage cost.

`make test` runs the stage `quick`, `make test-NAME` the stage NAME, `make test-all` all of them: `--stage=jobs,kills` runs several in one
go, which keeps all cores busy until the last test. A file names its stage with
`pytestmark = pytest.mark.stage("jobs")`, a test with `@pytest.mark.stage("jobs")`; a test that names no stage is quick.
Without `--stage`, pytest runs whatever it is asked for.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

STAGES = {
    "quick": "every package, and one job of each kind with Ray and vLLM",
    "families": "model families, batch layouts and engines beyond those of the quick tests",
    "ranks": "trainers of several processes",
    "jobs": "whole jobs with Ray and vLLM",
    "kills": "killed, frozen and unreachable workers",
    "hosts": "several hosts of network namespaces, SLURM",
    "plugins": "Megatron-Core and bit-exact log-probs",
    "recipes": "every recipe, the notebook, the wheel, the site and the live page",
    "exhaustive": "every order of events of small graphs, every way out of the sandbox",
    "sglang": "SGLang, in its own environment",
    "chaos": "random kills, cuts and freezes while a model is trained",
    "gpu": "what needs a GPU",
}
FIGURES = Path(__file__).with_suffix(".json")
NAMED = re.compile(r"^(pytestmark\b.*)?.*mark\.stage\(\"(\w+)\"\)", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--new-figures", action="store_true", help=f"write what the stages took into {FIGURES.name}")
    parser.addoption("--stage", type=stages, default=(), metavar="NAME[,NAME]", help=f"run these stages: {', '.join(STAGES)}")


def stages(names: str) -> tuple[str, ...]:
    """Split the names of stages. Raises UsageError for an unknown one."""
    if unknown := [name for name in names.split(",") if name not in STAGES]:
        raise pytest.UsageError(f"--stage: unknown stage {unknown[0]!r}; the stages are {', '.join(STAGES)}")
    return tuple(names.split(","))


def stages_in(source: str) -> set[str]:
    """List the stages of a file's tests as far as its text shows them. A mark of the whole file leaves no test quick."""
    marks = NAMED.findall(source)
    return {stage for _, stage in marks} | ({"quick"} if not any(whole for whole, _ in marks) else set())


@cache
def stages_of_file(path: Path) -> set[str]:
    """List the stages of a file's tests: those that it names, and those that the fixtures of its folder name."""
    fixtures = path.with_name("conftest.py")
    return stages_in(path.read_text()) | (stages_in(fixtures.read_text()) if fixtures.exists() else set()) - {"quick"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only the files that have tests of the stage."""
    asked = config.getoption("--stage")
    if asked and collection_path.suffix == ".py" and stages_of_file(collection_path).isdisjoint(asked):
        return True
    return None


def stage_of(item: pytest.Item) -> str:
    """Find the stage of a test: the mark nearest to it."""
    mark = item.get_closest_marker("stage")
    if mark is None:
        return "quick"
    if mark.args[0] not in STAGES:
        raise pytest.UsageError(f"{item.nodeid}: unknown stage {mark.args[0]!r}; the stages are {', '.join(STAGES)}")
    return str(mark.args[0])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if stage_of(item) not in stages_of_file(item.path):  # else no run of that stage would import the file
            raise pytest.UsageError(f"{item.nodeid}: name its stage {stage_of(item)!r} in its file, or in the conftest.py next to it")
        item.user_properties.append(("stage", stage_of(item)))  # for the process that prints
    if asked := config.getoption("--stage"):
        others = [item for item in items if stage_of(item) not in asked]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if stage_of(item) in asked]


class Cost:
    """Adds up the tests of each stage and their seconds, in the process that prints."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = self.stages.setdefault(str(dict(report.user_properties).get("stage", "crashed")), {"tests": 0, "seconds": 0.0})
        cost["tests"] += report.when == "call"
        cost["seconds"] += report.duration


def pytest_configure(config: pytest.Config) -> None:
    whole = not (config.option.collectonly or config.option.keyword or config.option.markexpr)
    if config.getoption("--stage") and whole and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Cost(), "cost")


def table(costs: Mapping[str, Mapping[str, float]], figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lay out what each stage took, and name those that grew by more than a fifth since the figures in the repository."""
    total = sum(cost["seconds"] for cost in costs.values())
    lines = [f"{'stage':<10}{'tests':>7}{'seconds':>9}{'share':>7}"]
    for name, cost in costs.items():
        lines.append(f"{name:<10}{cost['tests']:>7}{cost['seconds']:>9.0f}{cost['seconds'] / total:>7.0%}")
    lines.append(f"{'all':<10}{sum(cost['tests'] for cost in costs.values()):>7}{total:>9.0f}")
    for name, cost in costs.items():
        if name in figures and cost["seconds"] > 1.2 * figures[name]["seconds"]:
            lines.append(f"{name} grew: {cost['seconds']:.0f} s of tests, {figures[name]['seconds']:.0f} s in {FIGURES.name}")
    return lines


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    cost = config.pluginmanager.get_plugin("cost")
    if cost is None or not cost.stages or not hasattr(config, "cache"):
        return
    costs = config.cache.get("stages/costs", {}) | cost.stages
    config.cache.set("stages/costs", costs)
    figures = json.loads(FIGURES.read_text())
    terminalreporter.section("stages run here, in seconds of tests")
    terminalreporter.write_line("\n".join(table(costs, figures)))
    if config.getoption("--new-figures"):
        new = {name: {"tests": cost["tests"], "seconds": round(cost["seconds"])} for name, cost in costs.items()}
        FIGURES.write_text(json.dumps(figures | new, indent=2) + "\n")
