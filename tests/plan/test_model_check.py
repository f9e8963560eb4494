"""Every order of firing of every small graph keeps the bound, the channels' slots and the pools' order, and never deadlocks."""

from dataclasses import replace

import pytest
from support.small_graphs import Small, name_of, shared_graphs, small_graphs
from support.state_explorer import faults, is_order_safe, promises, scheduled_gives, walk

from rlgraph.plan.events import slots

pytestmark = pytest.mark.stage("exhaustive")


def walked(small: Small) -> int:
    graph, schedule = small.schedule()
    promised = promises(schedule, small.depth, name_of(small.rollout), lambda name: slots(graph, graph.node(name)))
    found = walk(schedule, scheduled_gives(schedule), promised)
    assert not found.fault, (found.fault, small)
    return found.states


def test_no_order_of_firing_breaks_a_promise_in_any_graph_of_up_to_four_nodes() -> None:
    graphs = [*small_graphs(2), *small_graphs(3), *small_graphs(4, every_home=False)]
    assert sum(walked(small) for small in graphs) > 100_000


def test_no_order_of_firing_breaks_a_promise_where_an_update_comes_a_round_after_its_rollout() -> None:
    graphs = [small for nodes in (2, 3, 4) for small in shared_graphs(nodes)]
    late = [small for small in graphs if small.schedule()[1].most_lag]
    assert len(late) > 20
    assert {small.depth for small in late} == {1, 2, 3}
    assert sum(walked(small) for small in graphs) > 1_000


def test_an_order_message_that_a_rollout_sends_a_step_too_early_is_caught() -> None:
    """If rollout 0 sent its message as well, update 0 would run beside rollout 1."""
    small = next(small for small in shared_graphs(3) if small.schedule()[1].most_lag)
    graph, schedule = small.schedule()
    promised = promises(schedule, small.depth, name_of(small.rollout), lambda name: slots(graph, graph.node(name)))
    early = [replace(d, credits=0) if d.credits < 0 else d for d in schedule.dependencies]
    assert early != list(schedule.dependencies)
    assert (
        walk(schedule, scheduled_gives(replace(schedule, dependencies=tuple(early))), promised).fault
        == "one event of pool 'rollout' at a time"
    )


@pytest.mark.parametrize("fault", ["slot freed early", "credit lost", "credit doubled", "order swapped"])
def test_a_seeded_fault_is_caught_in_every_graph_of_up_to_three_nodes_that_it_can_harm(fault: str) -> None:
    caught = 0
    for small in [*small_graphs(2), *small_graphs(3)]:
        graph, schedule = small.schedule()
        promised = promises(schedule, small.depth, name_of(small.rollout), lambda name, of=graph: slots(of, of.node(name)))
        found = walk(*faults(schedule, name_of(small.nodes - 1))[fault], promised).fault
        assert found or is_order_safe(schedule, promised), small
        caught += bool(found)
    assert caught > 90
