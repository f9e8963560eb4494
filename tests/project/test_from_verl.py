"""What docs/from_verl.md tells users to write exists: names of the library, and the keywords of what it calls."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlgraph as rg

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "from_verl.md").read_text()
CALLS = sorted(set(re.findall(r"([\w.]+)\(([^()`]*)", " ".join(re.findall(r"`([^`]+)`", TEXT)))))
METHODS: dict[str, Callable[..., Any]] = {
    "Pool": rg.Pool,
    "Generator": rg.Generator,
    "Policy": rg.Policy,
    "ClippedLoss": rg.ClippedLoss,
    "rollout": rg.Generator.rollout,
    "policy.update": rg.Policy.update,
    "critic.update": rg.Critic.update,
    "reference.log_probs": rg.Reference.log_probs,
    "reference.old_log_probs": rg.Reference.old_log_probs,
    "job.steps": lambda count: None,
    "job.costs": lambda: None,
    "job.export": lambda folder: None,
    "plan.launch": rg.Plan.launch,
    "launch": rg.Plan.launch,
}


def found(name: str) -> Callable[..., Any]:
    """Return what a name in the document stands for."""
    if name in METHODS:
        return METHODS[name]
    value: Any = rg
    assert name.startswith("rg."), f"the document calls {name}, which is neither of rg nor known to this test"
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    assert callable(value)
    return value


def test_every_name_of_the_library_exists() -> None:
    names = set(re.findall(r"\brg((?:\.\w+)+)", TEXT))
    assert len(names) > 20
    for name in names:
        value: Any = rg
        for part in name.split(".")[1:]:
            value = getattr(value, part)


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[f"{name}({arguments})" for name, arguments in CALLS])
def test_every_keyword_is_accepted(name: str, arguments: str) -> None:
    parameters = inspect.signature(found(name)).parameters
    for keyword in re.findall(r"(\w+)=", arguments):
        assert keyword in parameters, f"{name} takes no {keyword}=; it takes {list(parameters)}"


def test_every_file_it_points_to_exists() -> None:
    for file in re.findall(r"`((?:recipes|docs)/[\w.]+)`", TEXT):
        assert (ROOT / file).exists(), file
