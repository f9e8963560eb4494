"""Routes of large messages: one copy crosses each host's link, every reader gets it, and ranks take turns at who passes on."""

from collections import Counter

import fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.compiler.cluster import Cluster
from rlgraph.compiler.compile import compile_plan
from rlgraph.compiler.routes import chain, crossings, routes
from rlgraph.graph.nodes import Pool
from rlgraph.render.text import text


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 20))
def test_every_reader_is_reached_and_one_copy_enters_and_leaves_each_host(where: list[int], turn: int) -> None:
    readers = [f"r{number}" for number in range(len(where))]
    hosts = {"w": 0, **dict(zip(readers, where, strict=True))}
    route = chain("w", readers, hosts, turn)
    assert set(route) == set(readers)
    for reader in readers:
        feeder, seen = route[reader], {reader}
        while feeder != "w":
            assert feeder not in seen
            seen.add(feeder)
            feeder = route[feeder]
    assert crossings(route, hosts) <= 1
    entered = Counter(hosts[reader] for reader, feeder in route.items() if hosts[feeder] != hosts[reader])
    assert entered == Counter(set(where) - {0})


def test_ranks_take_turns() -> None:
    readers = [f"r{number}" for number in range(8)]
    hosts = {"w": 0, **{reader: 1 + number // 4 for number, reader in enumerate(readers)}}
    found = [chain("w", readers, hosts, turn) for turn in range(4)]
    passing = Counter(reader for route in found for reader in set(route.values()) - {"w"})
    assert passing == dict.fromkeys(readers, 1), "each of eight readers passes on the bytes of one rank of four"
    first = Counter(hosts[next(r for r, feeder in route.items() if feeder == "w")] for route in found)
    assert first == {1: 2, 2: 2}, "and both hosts are first as often"


def test_weights_and_batches_of_unknown_size_are_passed_on_and_small_batches_are_not() -> None:
    pools = Pool("rollout", gpus=4), Pool("train", gpus=2)
    plan = compile_plan(fakes.vector_loop(1, pools=pools), Cluster(gpus=6, gpus_per_node=2, hosts=3))
    [weights] = plan.loops
    generators = [worker.name for worker in plan.workers if worker.pool == "rollout"]
    assert [worker.host for worker in plan.workers if worker.name in generators] == [0, 0, 1, 1]
    writer, *_ = routes(plan, weights)
    assert routes(plan, weights)[writer] == dict(zip(generators, [writer, generators[0], generators[0], generators[2]], strict=True))
    printed = " ".join(text(plan).split())
    assert f"weights is passed on: {writer} -> {generators[0]} of host 0 -> {generators[2]} of host 1" in printed
    assert "a version crosses each link once each way" in printed
    small = [channel for channel in plan.channels if channel.bytes is not None and channel.transport == "tcp"]
    assert small
    for channel in small:
        assert all(set(route.values()) == {one} for one, route in routes(plan, channel).items())
        assert f"{channel.name} is passed on" not in printed


def test_a_plan_of_one_host_passes_nothing_on() -> None:
    plan = compile_plan(fakes.vector_loop(1), Cluster(cpus=2))
    assert "passed on" not in text(plan)


@pytest.mark.parametrize("turn", [0, 1])
def test_readers_that_are_the_writers_neighbours_get_its_messages_from_it(turn: int) -> None:
    assert chain("w", ["a", "w"], {"w": 3, "a": 3}, turn) == {"a": "w", "w": "w"}
