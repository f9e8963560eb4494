"""Profiles of several graphs: what can be profiled together."""

import pytest
from simulated import Loop

import rlgraph as rg
from rlgraph.errors import PlanError


@pytest.mark.parametrize("others", [[], [Loop(depth=1), Loop(depth=1, reference="own")]])
def test_graphs_with_other_nodes_are_not_profiled_together(others: list[Loop]) -> None:
    with pytest.raises(PlanError, match="with the same nodes"):
        rg.profile([loop.graph() for loop in others], rg.Cluster(cpus=3))
