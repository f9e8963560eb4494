"""What docs/from_trl.md tells users of TRL to write exists and compiles: names, keywords, and the worked example."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlgraph as rg
from rlgraph_cli.from_trl.script import tables_of
from rlgraph_cli.translate.settings import Setting

TEXT = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text()
RIGHT = "\n".join(line.split(" | ", 1)[1] for line in TEXT.splitlines() if line.startswith("| ") and " | " in line)
CALLS = sorted(set(re.findall(r"([\w.]+)\(([^()`]*)", " ".join(re.findall(r"`([^`]+)`", RIGHT)))))
METHODS: dict[str, Callable[..., Any]] = {
    "Generator": rg.Generator,
    "Policy": rg.Policy,
    "rollout": rg.Generator.rollout,
    "policy.update": rg.Policy.update,
    "reference.log_probs": rg.Reference.log_probs,
    "plan.launch": rg.Plan.launch,
    "launch": rg.Plan.launch,
    "job.steps": lambda count: None,
    "job.export": rg.Job.export,
    "policy.base_log_probs": rg.Policy.base_log_probs,
}


def called(name: str) -> Callable[..., Any]:
    """What a name in the right column stands for."""
    if name in METHODS:
        return METHODS[name]
    assert name.startswith("rg."), f"the page calls {name}, which is neither of rg nor known to this test"
    value: Any = rg
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[f"{name}({arguments})" for name, arguments in CALLS])
def test_every_keyword_is_accepted(name: str, arguments: str) -> None:
    parameters = inspect.signature(called(name)).parameters
    assert [keyword for keyword in re.findall(r"(\w+)=", arguments) if keyword not in parameters] == []


def test_the_page_has_enough_calls_to_be_worth_checking() -> None:
    assert len(CALLS) > 30


def test_the_worked_example_compiles_as_it_stands() -> None:
    trl, example, use = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    ast.parse(trl)
    scope: dict[str, Any] = {}
    exec(example, scope)
    rows = [{"prompt": "1 + 1 =", "answer": "2"}]
    plan = rg.compile(scope["graph"]("model", rows), rg.Cluster(gpus=1, cpus=8))
    assert plan.certificate.staleness_bound == 0
    assert plan.node("update").rows == 16 * 8
    assert [pool.name for pool in plan.pools] == ["gpu"]
    assert scope["exact"](" 2", "2") == 1.0
    ast.parse(use)
    assert rg.compile(scope["graph"]("model", rows, depth=1), rg.Cluster(gpus=1)).certificate.staleness_bound == 1


def test_the_command_knows_each_argument_of_the_tables_and_has_none_where_the_page_has() -> None:
    tables, settings = tables_of("GRPO"), 0
    for section in ("Batches and data", "Generation", "Rewards and advantages", "Loss", "The run"):
        for row in TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines():
            left, _, right = row.removeprefix("| ").partition(" | ")
            for name, value in re.findall(r'`([a-z_0-9]+)(?:="?([\w.]+)"?)?[`,]', left if row.startswith("| `") else ""):
                if name in ("prompt", "completions"):  # columns
                    continue
                settings += 1
                kind = tables.outcome_of(Setting(name, {"True": True}.get(value, value or 3), name)).kind
                assert kind != "unknown", name
                assert not (right.startswith("none") and kind == "becomes" and value), row
    assert settings > 60
