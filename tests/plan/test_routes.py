"""Routes of large messages: one copy comes into each host, every reader gets it, and ranks take turns at who passes on."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fakes

from rlgraph.plan.channels import SHAPES, Shape, crossings, hosts_of, kinds_of_routes, route_messages, routes, shape_of
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.costs import Costs
from rlgraph.plan.plan import Plan
from rlgraph.render.text import text
from rlgraph.values.pool import Pool


@given(st.sampled_from(SHAPES), st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 20), st.data())
def test_every_reader_is_reached_and_one_copy_enters_each_host(shape: Shape, where: list[int], turns: int, data: st.DataObject) -> None:
    readers = [f"r{number}" for number in range(len(where))]
    hosts = {"w": 0, **dict(zip(readers, where, strict=True))}
    route = route_messages(shape, "w", readers, hosts, data.draw(st.integers(0, turns - 1)), turns)
    assert set(route) == set(readers)
    for reader in readers:
        feeder, seen = route[reader], {reader}
        while feeder != "w":
            assert feeder not in seen
            seen.add(feeder)
            feeder = route[feeder]
    received, sent = crossings(route, hosts)
    assert received <= 1
    assert sent <= {"chain": 1, "tree": 2, "star": 9}[shape]
    entered = Counter(hosts[reader] for reader, feeder in route.items() if hosts[feeder] != hosts[reader])
    assert entered == Counter(set(where) - {0})


def test_ranks_take_turns() -> None:
    readers = [f"r{number}" for number in range(8)]
    hosts = {"w": 0, **{reader: 1 + number // 4 for number, reader in enumerate(readers)}}
    found = [route_messages("chain", "w", readers, hosts, turn, 4) for turn in range(4)]
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
    assert (
        "a version crosses each link once each way in a chain, for 1 GiB (the size is not known) passed on in parts; in a tree" in printed
    )
    small = [channel for channel in plan.channels if channel.bytes is not None and channel.transport == "tcp"]
    assert small
    for channel in small:
        assert all(set(route.values()) == {one} for one, route in routes(plan, channel).items())
        assert f"{channel.name} is passed on" not in printed


def test_a_plan_of_one_host_passes_nothing_on() -> None:
    plan = compile_plan(fakes.vector_loop(1), Cluster(cpus=2))
    assert "passed on" not in text(plan)


def test_ranks_take_turns_at_feeding_two() -> None:
    readers = [f"r{number}" for number in range(8)]
    hosts = {"w": 0, **{reader: 1 + number for number, reader in enumerate(readers)}}
    fed = Counter(feeder for turn in range(4) for feeder in route_messages("tree", "w", readers, hosts, turn, 4).values())
    assert fed.pop("w") == 4 * 2
    assert fed == dict.fromkeys(readers, 3), "each of eight hosts sends as many of the 24 other copies"


def apart(generators: int, costs: Costs | None = None) -> Plan:
    """Compile a loop with generators and a trainer on a GPU and a host each; NCCL carries the weights, in parts of 32 MiB or more."""
    graph = fakes.vector_loop(1, pools=(Pool("rollout", gpus=generators), Pool("train", gpus=1)))
    return compile_plan(graph, Cluster(gpus=generators + 1, gpus_per_node=1), costs)


def priced(publish_bytes: int) -> Costs:
    return Costs({"rollout": 1.0, "update": 1.0, "prompts": 0.0, "score": 0.0}, publish_bytes=publish_bytes)


def test_a_plan_says_its_shape_and_why_and_counts_the_copies_honestly() -> None:
    plan = apart(6, priced(16 << 20))
    [weights] = plan.loops
    assert (weights.transport, shape_of(plan, weights)) == ("nccl", "tree")
    printed = " ".join(text(plan).split())
    assert "weights is passed on: policy -> generator[0] of host 0, generator[1] of host 1; generator[0] -> " in printed
    assert "generator[0] -> generator[2] of host 2, generator[4] of host 4; generator[1] -> generator[3] of host 3, generator[5]" in printed
    assert "a version comes into each host once, and leaves one up to 2 times" in printed
    assert "in a tree, for 16 MiB passed on whole; in a chain it takes 1.5" in printed


def test_the_bytes_of_a_version_and_how_it_is_passed_on_choose_the_shape() -> None:
    small, large = apart(6, priced(16 << 20)), apart(6, priced(16 << 30))
    assert [shape_of(plan, plan.loops[0]) for plan in (small, large, apart(6))] == ["tree", "chain", "chain"]
    assert "in a chain, for 16 GiB passed on in parts; in a tree it takes" in " ".join(text(large).split())
    small = apart(2, priced(1 << 20))
    assert (small.loops[0].bytes, shape_of(small, small.loops[0])) == (1 << 20, "star")
    printed = " ".join(text(small).split())
    assert "weights is sent: policy -> generator[0] of host 0, generator[1] of host 1; a version comes into each host once" in printed
    assert "in a star, for 1 MiB passed on whole; in a chain it takes 1.37 times" in printed
    assert Plan.from_json(small.to_json()) == small


@pytest.mark.parametrize("turn", [0, 1])
def test_readers_that_are_the_writers_neighbours_get_its_messages_from_it(turn: int) -> None:
    assert route_messages("chain", "w", ["a", "w"], {"w": 3, "a": 3}, turn, 2) == {"a": "w", "w": "w"}


@pytest.mark.parametrize("hosts", [1, 4])
def test_one_writer_of_a_kind_stands_for_all_in_a_printed_plan(hosts: int) -> None:
    graph = fakes.vector_loop(1, pools=(Pool("rollout", gpus=12), Pool("train", gpus=4)))
    plan = compile_plan(graph, Cluster(gpus=16, gpus_per_node=16 // hosts))
    where = hosts_of(plan)
    for end in (*plan.channels, *plan.loops):
        every = {crossings(route, where) for route in routes(plan, end).values()}
        assert {crossings(route, where) for route in kinds_of_routes(plan, end).values()} == every
