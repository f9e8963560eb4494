"""The shape in which messages go from host to host: by which the last host has them soonest, and what the routes of that shape cost."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.channels.host.channel import PART_BYTES
from rlgraph.plan.channels import BRANCHES, SHAPES, AssumedLink, Shape, crossing_s, feeders, route_messages, soonest, ways

ONE, GB, MB = {0: 1}, 10**9, 10**6
EVEN = AssumedLink(bandwidth=1.0, latency_s=0.0)


def hosts(count: int, readers: int = 1, first: int = 1) -> dict[int, int]:
    return dict.fromkeys(range(first, first + count), readers)


def shape(size: float | None, writers: dict[int, int], readers: dict[int, int], *, whole: bool = False) -> Shape:
    return soonest(ways(size, writers, readers, least=None if whole else PART_BYTES, slots=1))


@given(st.sampled_from(SHAPES), st.integers(0, 300))
def test_every_host_is_fed_by_one_before_it_and_those_of_a_tree_feed_two(shape: Shape, count: int) -> None:
    found = feeders(shape, count)
    assert len(found) == count
    assert all(-1 <= feeder < host for host, feeder in enumerate(found))
    most = {"chain": 1, "tree": BRANCHES, "star": count}[shape]
    assert max(Counter(found).values(), default=0) <= most
    level = {-1: 0}
    for host, feeder in enumerate(found):
        level[host] = level[feeder] + 1
    deepest = {"chain": count, "tree": math.ceil(math.log2(count + 2)) - 1, "star": min(count, 1)}[shape]
    assert max(level.values()) == deepest


@pytest.mark.parametrize(("count", "expected"), [(1, "chain"), (2, "chain"), (3, "chain"), (4, "tree"), (8, "tree"), (512, "tree")])
def test_a_large_message_that_goes_whole_takes_a_chain_to_few_hosts_and_a_tree_to_many(count: int, expected: Shape) -> None:
    assert shape(16 * GB, ONE, hosts(count), whole=True) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, "chain"), (2, "chain"), (8, "chain"), (32, "chain"), (512, "tree")])
def test_a_large_message_in_parts_takes_a_chain_unless_its_parts_are_late_at_the_last_of_very_many(count: int, expected: Shape) -> None:
    assert shape(16 * GB, ONE, hosts(count)) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, "chain"), (2, "star"), (3, "star"), (16, "tree"), (64, "tree")])
def test_a_small_message_takes_a_star_to_few_hosts_and_a_tree_to_many(count: int, expected: Shape) -> None:
    assert shape(2 * MB, ONE, hosts(count)) == expected


def test_a_message_of_unknown_size_counts_as_large() -> None:
    assert shape(None, ONE, hosts(8)) == "chain"
    assert shape(None, ONE, hosts(8), whole=True) == "tree"


def test_how_many_readers_a_host_has_changes_nothing() -> None:
    for count, least in ((2, PART_BYTES), (8, PART_BYTES), (8, None)):
        alike, unlike = hosts(count), {**hosts(count), 1: 8, 2: 3}
        assert ways(GB, ONE, alike, least=least, slots=1) == ways(GB, ONE, unlike, least=least, slots=1)


def test_ranks_that_keep_all_links_busy_take_a_chain_and_fewer_ranks_than_hosts_a_tree() -> None:
    assert shape(16 * GB, hosts(2, 8, first=100), hosts(8), whole=True) == "chain", "16 ranks, 8 hosts"
    assert shape(16 * GB, hosts(8, 8, first=1000), hosts(64, 8), whole=True) == "chain", "64 ranks, 64 hosts"
    assert shape(16 * GB, hosts(8, 8, first=1000), hosts(512, 8), whole=True) == "tree", "64 ranks, 512 hosts"


def test_readers_that_share_all_hosts_with_writers_have_no_one_to_pass_on_to() -> None:
    assert set(ways(GB, ONE, {0: 8}, least=None, slots=1).values()) == {0.0}
    assert shape(GB, ONE, {0: 8}, whole=True) == "chain"


def test_parts_of_a_channel_with_more_slots_are_larger_and_its_chain_later() -> None:
    seconds = [crossing_s(GB, EVEN, ONE, hosts(8), slots=slots) for slots in (1, 2, 8, 64)]
    assert seconds == sorted(seconds)
    assert seconds[0] == GB + 7 * math.ceil(GB / 61)
    assert seconds[-1] == 8 * GB, "not even two parts have room"


def test_each_reader_of_a_message_that_no_one_passes_on_takes_a_copy_over_the_link() -> None:
    assert crossing_s(1.0, EVEN, ONE, {0: 2, 1: 3, 2: 1}, shape="each") == 4.0
    assert crossing_s(1.0, EVEN, {0: 1, 1: 1}, {2: 3}, shape="each") == 3.0


def test_latency_counts_for_each_host_on_the_way() -> None:
    late = AssumedLink(bandwidth=1.0, latency_s=100.0)
    found = [crossing_s(6.0, late, ONE, hosts(6), shape=shape, least=None) for shape in SHAPES]
    assert found == [600 + 36, 100 + 36, 200 + 24]


@given(st.sampled_from(SHAPES), st.integers(1, 12), st.integers(1, 30), st.integers(1, 3))
def test_the_seconds_are_those_of_the_routes(shape: Shape, writers: int, far: int, readers: int) -> None:
    """Count the copies on every link, and the copies one after another on the way to each host, by the routes that all writers take."""
    names = [f"r{host}.{number}" for host in range(1, far + 1) for number in range(readers)]
    where = {"w": 0} | {name: int(name[1:].split(".")[0]) for name in names}
    entered, left, path = Counter[int](), Counter[int](), 0
    for turn in range(writers):
        route = route_messages(shape, "w", names, where, turn, writers)
        far_hops = [(feeder, reader) for reader, feeder in route.items() if where[feeder] != where[reader]]
        entered.update(where[reader] for _, reader in far_hops)
        left.update(where[feeder] for feeder, _ in far_hops)
        depth = {"w": 0}
        for feeder, reader in far_hops:
            depth[reader] = depth[feeder] + 1
        fed = Counter(feeder for feeder, _ in far_hops)
        levels = [max(fed[one] for one in fed if depth[one] == level) for level in range(max(depth.values()))]
        path = max(path, sum(levels))
    busiest = max(*entered.values(), *left.values(), path)
    found = crossing_s(float(writers), EVEN, {0: writers}, hosts(far, readers), shape=shape, least=None)
    assert busiest <= found <= busiest + 1, "a copy of one writer's message takes a second"
