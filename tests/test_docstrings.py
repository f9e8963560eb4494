"""Every example in a docstring runs, and every public name that a user calls has one."""

import doctest
import importlib
import inspect
from pathlib import Path

import rlgraph as rg
from rlgraph import algorithms

PACKAGE = Path(rg.__file__).parent
# Public names without an example so far; take a name away once it has one.
WITHOUT = {
    *("Context", "Critic", "Generator", "Guards", "Job", "Policy", "Reference", "Refill", "RewardModel", "Tools"),
    *("advantages", "evaluate", "filter_groups", "kl_shaped_rewards", "local_cluster", "node", "profile", "prompts", "record"),
    *("replay", "reward", "rollout_correction", "shaped_rewards"),
}


def test_every_example_of_the_package_runs() -> None:
    modules = [path.relative_to(PACKAGE.parent) for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text()]
    assert len(modules) > 40
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in modules]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert {name: found for name, found in results.items() if found.failed or not found.attempted} == {}


def test_every_public_name_that_a_user_calls_has_an_example() -> None:
    public = {name: getattr(place, name) for place in (rg, algorithms) for name in place.__all__}
    called = {name: value for name, value in public.items() if inspect.isclass(value) or inspect.isfunction(value)}
    raised = {name for name, value in called.items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert {name for name, value in called.items() if ">>>" not in (value.__doc__ or "")} - raised <= WITHOUT
