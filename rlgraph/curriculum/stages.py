"""The stages of a curriculum, planned before the first one starts, so that bad input is refused then."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlgraph.api import checked_source, compile
from rlgraph.errors import PlanError, RlgraphError, shown
from rlgraph.graph.nodes import Graph
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.costs import Costs
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.sendable import check_sendable
from rlgraph.runtime.exports.models import chosen, trained_models

HOW = "it is a graph, or a function that makes one of the folders of earlier graphs, as `def rl(sft): return rg.Graph('rl', …)`"
FOLDER = re.compile(r"\w[\w. -]*")  # what a graph's folder may be called


@dataclass(frozen=True)
class Stage:
    """A graph of a curriculum: how it is made, and its plan with stand-ins for the folders that earlier graphs will leave.

    `takes` are the earlier graphs whose weights it starts from. `stand_in` is the folder that its trained model starts from, or None
    where no later graph takes its weights.
    """

    make: Callable[..., Graph]
    takes: tuple[str, ...]
    steps: int
    plan: Plan
    stand_in: str | None

    @property
    def name(self) -> str:
        """The graph's name."""
        return self.plan.graph

    def planned(self, folders: Mapping[str, str], cluster: Cluster, costs: Costs | None = None) -> Plan:
        """Plan the graph on the weights in these folders."""
        return compile(self.make(**{name: folders[name] for name in self.takes}), cluster, costs)


def planned_stages(graphs: Sequence[Any], steps: Sequence[int], cluster: Cluster) -> tuple[Stage, ...]:
    """Plan all graphs of a curriculum, each on stand-ins for the weights of earlier ones, and check all that a launch checks.

    Raises PlanError, or the error of a graph, where one cannot be made, planned or launched.
    """
    if not graphs or len(steps) != len(graphs):
        raise PlanError(f"run(steps={shown(list(steps))}) of {len(graphs)} graphs: give at least one graph, and its steps for each")
    found: list[Stage] = []
    folders: dict[str, str] = {}
    for place, (given, count) in enumerate(zip(graphs, steps, strict=True)):
        where = f"graph {place + 1} of {len(graphs)}"
        make, takes = _maker(given, where, list(folders))
        graph = _made(make, takes, folders, where)
        _check_name(graph.name, [stage.name for stage in found], where)
        plan = compile(graph, cluster)
        check_sendable(checked_source(plan, to_come=[folders[name] for name in takes]))
        stand_in = None
        if place + 1 < len(graphs):
            stand_in = folders[graph.name] = _handed_on(graph, plan, where)
        found.append(Stage(make, takes, count, plan, stand_in))
    taken = {name for stage in found for name in stage.takes}
    for stage in found[:-1]:
        if stage.name not in taken:
            raise PlanError(
                f"run(): no later graph starts from the weights of '{stage.name}'; make a later one of a function with the parameter "
                f"{stage.name}, as `def rl({stage.name}): …`, or leave '{stage.name}' out"
            )
    return tuple(found)


def _maker(given: Any, where: str, earlier: Sequence[str]) -> tuple[Callable[..., Graph], tuple[str, ...]]:
    """Find how a graph is made, and the earlier graphs that the parameters of its function name."""
    if isinstance(given, Graph):
        return lambda: given, ()
    if not callable(given):
        raise PlanError(f"run(), {where}, is {shown(given)}; {HOW}")
    takes = []
    for parameter in inspect.signature(given).parameters.values():
        if parameter.name in earlier:
            takes.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise PlanError(
                f"run(), {where}, is made by a function with the parameter '{parameter}', which names no earlier graph; these are "
                f"{list(earlier)}: name one of them, or give a default"
            )
    return given, tuple(takes)


def _made(make: Callable[..., Graph], takes: Sequence[str], folders: Mapping[str, str], where: str) -> Graph:
    try:
        graph = make(**{name: folders[name] for name in takes})
    except RlgraphError:
        raise
    except Exception as error:
        raise PlanError(f"run(), {where}: its function failed, {type(error).__name__}: {error}; {HOW}") from error
    if not isinstance(graph, Graph):
        raise PlanError(f"run(), {where}: its function returned {shown(graph)}; {HOW}")
    return graph


def _handed_on(graph: Graph, plan: Plan, where: str) -> str:
    """Find the folder that the model came from whose weights a later graph may take."""
    trained = trained_models(graph, plan)
    policies = [model.name for model in trained if model.scores == "log_probs"]
    if len(policies) > 1 or (not policies and len(trained) > 1):
        raise PlanError(
            f"run(), {where}, '{graph.name}' trains {[model.name for model in trained]}, and the weights of one model are handed on: put "
            "it last, or run it by itself and export each, as rg.export(checkpoint, folder, policy=…)"
        )
    return chosen(trained, None, f"run(), {where}, '{graph.name}', hands on its weights").path


def _check_name(name: str, earlier: Sequence[str], where: str) -> None:
    if name in earlier:
        raise PlanError(f"run(), {where}, is called {shown(name)}, as an earlier one; each has a folder of its name: give another one")
    if not FOLDER.fullmatch(name):
        raise PlanError(f"run(), {where}, is called {shown(name)}; each has a folder of its name: use letters, digits, - and _")
