"""Every order of firing of every small graph keeps the bound, the channels' slots and the pools' turns, and never locks up."""

import pytest
from explorer import faults, given, harmless, promises, walk
from small_graphs import Small, name_of, small_graphs

from rlgraph.planning.events import slots


def walked(small: Small) -> int:
    graph, schedule = small.schedule()
    promised = promises(schedule, small.depth, name_of(small.rollout), lambda name: slots(graph, graph.node(name)))
    found = walk(schedule, given(schedule), promised)
    assert not found.fault, (found.fault, small)
    return found.states


def test_no_order_of_firing_breaks_a_promise_in_any_graph_of_up_to_four_nodes() -> None:
    graphs = [*small_graphs(2), *small_graphs(3), *small_graphs(4, every_home=False)]
    assert sum(walked(small) for small in graphs) > 100_000


@pytest.mark.parametrize("fault", ["slot freed early", "token lost", "token doubled", "order swapped"])
def test_a_seeded_fault_is_caught_in_every_graph_of_up_to_three_nodes_that_it_can_harm(fault: str) -> None:
    caught = 0
    for small in [*small_graphs(2), *small_graphs(3)]:
        graph, schedule = small.schedule()
        promised = promises(schedule, small.depth, name_of(small.rollout), lambda name, of=graph: slots(of, of.node(name)))
        found = walk(*faults(schedule, name_of(small.nodes - 1))[fault], promised).fault
        assert found or harmless(schedule, promised), small
        caught += bool(found)
    assert caught > 90
