"""What a plan calls to draw and to launch: `rlgraph.api`, found by its name, because planning imports nothing that draws or launches."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from rlgraph.analysis.run import CardFacts, Run
    from rlgraph.plan.plan import Plan
    from rlgraph.runtime.driver.job import Job
    from rlgraph.runtime.local import LocalJob


class Facade(Protocol):
    """`rlgraph.api`, as a plan calls it."""

    def text(self, plan: "Plan") -> str: ...
    def svg(self, plan: "Plan") -> str: ...
    def draw(self, plan: "Plan", path: str | Path) -> None: ...
    def timeline(self, plan: "Plan", path: str | Path, steps: int) -> None: ...
    def report(self, run: "Run", path: str | Path) -> Path: ...
    def model_card(self, plan: "Plan", facts: "CardFacts") -> str: ...
    def run_here(self, plan: "Plan") -> "LocalJob": ...
    def ray_dag(self, plan: "Plan", actors: Mapping[str, Any]) -> Any: ...

    @property
    def launch(self) -> "Callable[..., Job]": ...


def facade() -> Facade:
    """Import `rlgraph.api`."""
    return cast(Facade, import_module("rlgraph.api"))
