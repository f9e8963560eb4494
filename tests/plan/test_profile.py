"""Profiles of several graphs: what can be profiled together."""

import pytest
from support.simulated_stages import Loop

import rlgraph as rg
from rlgraph.errors import PlanError


@pytest.mark.parametrize("others", [[], [Loop(depth=1), Loop(depth=1, reference="own")]])
def test_graphs_with_other_nodes_are_not_profiled_together(others: list[Loop]) -> None:
    with pytest.raises(PlanError, match="with the same nodes"):
        rg.planning.profile([loop.graph() for loop in others], rg.Cluster(cpus=3))


class Launched(Exception):
    """A plan was launched."""


def test_a_time_shared_graph_is_profiled_with_those_of_a_pool_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(plan: rg.Plan) -> None:
        raise Launched(plan.graph)

    monkeypatch.setattr(rg.Plan, "launch", launch)
    with pytest.raises(Launched):
        rg.planning.profile([Loop(depth=1).graph(), Loop(depth=1, rows=32).graph(), Loop(depth=0, shared=True).graph()], rg.Cluster(gpus=2))
