"""A recipe: a Python file with a dataclass `Config` and a function `graph(cfg)` or `graphs(cfg)`. Here it is read and checked."""

import ast
import dataclasses
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlgraph.api import compile
from rlgraph.config import config
from rlgraph.curriculum import planned_stages
from rlgraph.errors import ConfigError, show_value
from rlgraph.graph.graph import Graph
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.costs import Costs
from rlgraph.plan.plan import Plan
from rlgraph.recording import samples as profiles
from rlgraph_cli.choices import steps_of

RULE = (
    "a recipe defines a dataclass `Config` and a function `graph(cfg)` that returns an rlgraph.Graph, or `graphs(cfg)` that returns what "
    "rg.run takes: the graphs, and the steps of each"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The parts of a recipe that `plan` and `tune` call. It has `graph_of` or, for several graphs, `graphs_of`.

    `cluster_of` is its function `cluster(cfg)`, if it has one.
    """

    path: Path
    config_class: type
    graph_of: Callable[[Any], Graph] | None
    graphs_of: Callable[[Any], tuple[Sequence[Any], Sequence[int]]] | None
    cluster_of: Callable[[Any], Cluster] | None

    def configured(self, settings: Sequence[str]) -> Any:
        """Build the configuration. Raises ConfigError for an unknown key or a value of the wrong type."""
        return config(self.config_class, settings)

    def graph(self, cfg: Any) -> Graph:
        """Build the graph. Raises ConfigError if the recipe's function returns anything else, or there are several graphs."""
        if self.graph_of is None:
            raise ConfigError(
                f"recipe '{self.path}' has several graphs, by `graphs(cfg)`; this command requires one graph, by `graph(cfg)`"
            )
        made = self.graph_of(cfg)
        if not isinstance(made, Graph):
            raise ConfigError(f"recipe '{self.path}': graph(cfg) returned {show_value(made)}; {RULE}")
        return made

    def plans(self, cfg: Any, cluster: Cluster, costs: Costs | None) -> list[Plan]:
        """Plan the graph, or those that run one after the other, later ones on stand-ins for the weights that they begin from.

        Raises ConfigError if the recipe's function returns anything else, and what `rg.compile` raises, or `rg.run` before it starts.
        """
        if self.graphs_of is None or costs is not None:
            return [compile(self.graph(cfg), cluster, costs)]
        made = self.graphs_of(cfg)
        if not isinstance(made, tuple) or len(made) != 2 or not all(isinstance(part, list | tuple) for part in made):
            raise ConfigError(f"recipe '{self.path}': graphs(cfg) returned {show_value(made)}; {RULE}")
        return [stage.plan for stage in planned_stages(*made, cluster)]


def read(path: Path) -> Recipe:
    """Import a recipe without running its `__main__` block. Raises ConfigError if the file is missing or is not a recipe."""
    module = _imported(path)
    config_class, cluster_of = vars(module).get("Config"), vars(module).get("cluster")
    graph_of, graphs_of = (made if inspect.isfunction(made := vars(module).get(name)) else None for name in ("graph", "graphs"))
    missing = [
        *([] if isinstance(config_class, type) and dataclasses.is_dataclass(config_class) else ["dataclass `Config`"]),
        *([] if graph_of or graphs_of else ["function `graph(cfg)`"]),
    ]
    if missing:
        raise ConfigError(f"recipe '{path}' has no {' and no '.join(missing)}; {RULE}")
    return Recipe(path, config_class, graph_of, None if graph_of else graphs_of, cluster_of)  # type: ignore[arg-type]


def run(path: Path, settings: Sequence[str], profile: str | None = None, workers: Sequence[str] = ()) -> None:
    """Run a recipe as `python recipe.py key=value` does, and profile steps of these workers.

    Raises ConfigError if it has no `__main__` block, which would do nothing, and if nothing was there to profile.
    """
    tree = ast.parse(_source(path), str(path))
    if not any(isinstance(part, ast.If) and "__name__" in ast.dump(part.test) for part in tree.body):
        raise ConfigError(f"recipe '{path}' has no block `if __name__ == \"__main__\":`, so nothing would run; launch the plan there")
    sys.argv = [str(path), *settings]  # Ray lets its workers import from the folder of argv[0], as from the recipe's own
    sys.path.insert(0, str(path.resolve().parent))
    if profile is not None:
        profiles.ask(profiles.Profile(steps_of(profile), tuple(workers) or None))
    runpy.run_path(str(path), run_name="__main__")
    if profiles.take_request() is not None:
        raise ConfigError(f"--profile {profile}: recipe '{path}' does not call rg.record, so nothing was profiled")


def _imported(path: Path) -> ModuleType:
    _source(path)
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a program, so that a recipe finds the modules next to it
    name = f"recipe_{path.stem}"  # not the stem alone: recipes/math.py is not the module `math`
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _source(path: Path) -> str:
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"recipe '{path}': Python file not found; pass the path of a recipe, e.g. recipes/one_step_off.py")
    return path.read_text(encoding="utf-8")
