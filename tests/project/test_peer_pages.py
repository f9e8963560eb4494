"""What docs/from_verl.md and docs/from_trl.md tell users to write exists and compiles: keywords, rows, and the worked examples."""

import ast
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import TESTS

import rlgraph as rg
from rlgraph_cli.from_trl.script import tables_of
from rlgraph_cli.translate.settings import Setting

VERL, TRL = ((Path(__file__).parents[2] / "docs" / f"from_{peer}.md").read_text() for peer in ("verl", "trl"))
TEXT = re.sub(r"```.*?```", "", VERL, flags=re.S)  # without the worked example, which runs as it stands
RIGHT = "\n".join(line.split(" | ", 1)[1] for line in TRL.splitlines() if line.startswith("| ") and " | " in line)
CALLS = sorted({call for part in (TEXT, RIGHT) for call in re.findall(r"([\w.]+)\(([^()`]*)", " ".join(re.findall(r"`([^`]+)`", part)))})
METHODS: dict[str, Callable[..., Any]] = {
    **{name: getattr(rg, name) for name in ("Pool", "Generator", "Policy", "Reference", "ClippedLoss")},
    "rollout": rg.Generator.rollout,
    "policy.update": rg.Policy.update,
    "policy.base_log_probs": rg.Policy.base_log_probs,
    "critic.update": rg.Critic.update,
    "reference.log_probs": rg.Reference.log_probs,
    "reference.old_log_probs": rg.Reference.old_log_probs,
    "job.steps": lambda count: None,
    "job.costs": lambda: None,
    "job.export": rg.Job.export,
    "plan.launch": rg.Plan.launch,
    "launch": rg.Plan.launch,
}


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[f"{name}({arguments})" for name, arguments in CALLS])
def test_every_keyword_is_accepted(name: str, arguments: str) -> None:
    value: Any = METHODS.get(name, rg)
    if value is rg:
        assert name.startswith("rg."), f"the page calls {name}, which is neither of rg nor known to this test"
        for part in name.split(".")[1:]:
            value = getattr(value, part)
    parameters = inspect.signature(value).parameters
    assert [keyword for keyword in re.findall(r"(\w+)=", arguments) if keyword not in parameters] == []


def expanded(name: str) -> list[str]:
    """The names that braces in a name stand for."""
    before, brace, rest = name.partition("{")
    if not brace:
        return [name]
    inside, _, after = rest.partition("}")
    return [name for part in inside.split(",") for name in expanded(f"{before}{part.strip()}{after}")]


@pytest.mark.parametrize("script", ["dapo_7b_math_fsdp2_4_12", "grpo_0.6b_gsm8k_fsdp2_2_6"])
def test_each_override_of_verls_example_scripts_for_one_step_off_has_a_row(script: str) -> None:
    facts = json.loads((TESTS / "oracle" / "verl_overrides.json").read_text())
    [found] = [each["settings"] for name, each in facts["scripts"].items() if name.endswith(f"one_step_off_policy/shell/{script}")]
    cells = [line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith("| ")]
    named = {name.partition("=")[0] for cell in cells for span in re.findall(r"`([^`]+)`", cell) for name in expanded(span)}
    overrides = {
        re.sub(r"^\+*(actor_rollout_ref\.|reward\.(?=reward_kwargs))?", "", facts["settings"][at]).partition("=")[0] for at in found
    }
    assert len(overrides) > 30
    assert overrides - {name.removeprefix("actor_rollout_ref.") for name in named} == set()


def test_the_worked_examples_compile_as_they_stand() -> None:
    (verl, use), (trl, example, of_trl) = (re.findall(r"```python\n(.*?)```", page, re.S) for page in (VERL, TRL))
    for text in (use, trl, of_trl):
        ast.parse(text)
    scope: dict[str, Any] = {}
    exec(verl, scope)
    rows = [{"prompt": "1 + 1 =", "answer": "2"}] * 1152
    plan = rg.compile(scope["graph"]("model", rows, rows), rg.Cluster(gpus=8, cpus=64))
    assert (plan.certificate.staleness_bound, plan.node("update").rows) == (1, 1152 * 5)
    assert {pool.name: len(pool.gpus) for pool in plan.pools} == {"rollout": 2, "train": 6}
    assert scope["right"]("so 2 pairs\n#### 1,024", "1024") == 1.0
    exec(example, scope)
    plan = rg.compile(scope["graph"]("model", rows[:1]), rg.Cluster(gpus=1, cpus=8))
    assert (plan.certificate.staleness_bound, plan.node("update").rows) == (0, 16 * 8)
    assert [pool.name for pool in plan.pools] == ["gpu"]
    assert scope["exact"](" 2", "2") == 1.0
    assert rg.compile(scope["graph"]("model", rows[:1], depth=1), rg.Cluster(gpus=1)).certificate.staleness_bound == 1


def test_the_command_knows_each_argument_of_trls_tables_and_has_none_where_the_page_has() -> None:
    tables, settings = tables_of("GRPO"), 0
    for section in ("Batches and data", "Generation", "Rewards and advantages", "Loss", "The run"):
        for row in TRL.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines():
            left, _, right = row.removeprefix("| ").partition(" | ")
            for name, value in re.findall(r'`([a-z_0-9]+)(?:="?([\w.]+)"?)?[`,]', left if row.startswith("| `") else ""):
                if name in ("prompt", "completions"):  # columns
                    continue
                settings += 1
                kind = tables.outcome_of(Setting(name, {"True": True}.get(value, value or 3), name)).kind
                assert kind != "unknown", name
                assert not (right.startswith("none") and kind == "becomes" and value), row
    assert settings > 60
