"""Any cut of any parameters among trainer ranks arrives bit for bit at every generator, and what is no cut is refused before a copy."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.weight_cuts import Cut, as_bfloat16, next_version, random_cut, random_weights, tensor_bytes

from rlgraph.channels.local import local_channel
from rlgraph.channels.weights import endpoints
from rlgraph.channels.weights.endpoints import DESCRIPTION, Staging, WeightsReader, WeightsWriter
from rlgraph.channels.weights.shards import Assembly, WeightShard, check_own, parameters, unsharded_weights
from rlgraph.errors import ChannelError

LONG = 120.0


@pytest.fixture
def make_weights(make: Callable[..., Any]) -> Callable[..., tuple[list[WeightsWriter], list[WeightsReader]]]:
    """Return a function that makes the ends of a feedback edge, over each transport: of so many ranks, with a reader for each `buffers`."""

    def made(ranks: int, buffers: Sequence[int], **how: Any) -> tuple[list[WeightsWriter], list[WeightsReader]]:
        ends = [make(slots=2, readers=len(buffers)) for _ in range(ranks)]
        writers = [WeightsWriter(writer, torch.bfloat16, **how) for writer, _ in ends]
        return writers, [WeightsReader([found[at] for _, found in ends], count) for at, count in enumerate(buffers)]

    return made


@pytest.mark.parametrize("seed", range(6))
def test_any_sharding_arrives_bit_for_bit_at_every_reader(make_weights: Any, request: Any, seed: int) -> None:
    draw = random.Random(seed)
    ranks, local = draw.randint(1, 4), "local" in request.node.name
    buffers = [1] if local else draw.choice([[1], [2], [1, 2]])  # within a process nothing comes while another computes
    writers, readers = make_weights(ranks, buffers, bucket_bytes=draw.choice([None, 1, 64]), checksum=draw.random() < 0.5)
    weights = random_weights(draw)
    for version in range(1, 5):
        if version != 3:  # one version is cut as the one before, the others in new ways
            again = draw.randrange(1 << 30)
        for writer, shards in zip(writers, random_cut(random.Random(again), next_version(weights, version), ranks), strict=True):
            writer.publish(version, shards, LONG)
        for reader in readers:
            received = reader.receive(version, LONG)
            assert received.keys() == weights.keys()
            for name, tensor in next_version(weights, version).items():
                assert received[name].shape == tensor.shape, name
                assert received[name].dtype == as_bfloat16(tensor).dtype, name
                assert tensor_bytes(received[name]) == tensor_bytes(as_bfloat16(tensor)), name
            del received
            reader.release()


@pytest.mark.parametrize("seed", range(40))
def test_any_sharding_is_assembled_in_the_second_buffer(seed: int) -> None:
    draw = random.Random(1000 + seed)
    staging, ranks, weights = Staging(), draw.randint(1, 6), random_weights(draw)
    for version in range(1, 4):
        cut = random_cut(draw, next_version(weights, version), ranks)
        there = [0] * ranks
        sent = [[shard for shard in shards if shard.replica == 0] for shards in cut]

        def arrived(rank: int, beyond: int, there: list[int] = there, sent: Cut = sent) -> int:
            there[rank] = draw.randint(beyond + 1, len(sent[rank]))
            return there[rank]

        staging.fill(sent, arrived)
        assert {name: tensor_bytes(tensor) for name, tensor in staging.weights.items()} == {
            name: tensor_bytes(tensor) for name, tensor in next_version(weights, version).items()
        }


@pytest.mark.parametrize("seed", range(40))
def test_a_missing_doubled_or_moved_box_is_refused(seed: int) -> None:
    draw = random.Random(2000 + seed)
    weights = {"w": torch.randn(5, 6, 4), "v": torch.randn(9)}
    cut = [[shard for shard in shards if shard.replica == 0] for shards in random_cut(draw, weights, 3)]
    parameters(cut)
    rank, number = draw.choice([(r, n) for r, shards in enumerate(cut) for n, shard in enumerate(shards) if shard.tensor.numel()])
    shard = cut[rank][number]
    moved = tuple(offset + (dim == 0) for dim, offset in enumerate(shard.offsets))
    for broken, why in (
        ([], "its boxes hold|"),
        ([shard, shard], "overlaps"),
        ([WeightShard(shard.name, shard.global_shape, moved, shard.tensor)], "exceeds the parameter's shape|overlaps|its boxes hold"),
        ([WeightShard(shard.name, (*shard.global_shape[:-1], 40), shard.offsets, shard.tensor)], "on trainer rank|its boxes hold"),
    ):
        wrong = [list(shards) for shards in cut]
        wrong[rank][number : number + 1] = broken
        if broken or any(other.name == shard.name for shards in wrong for other in shards):  # else no one knows of the parameter
            with pytest.raises(ChannelError, match=why):
                parameters(wrong)


def box(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], size: tuple[int, ...], **more: Any) -> WeightShard:
    return WeightShard(name, shape, offsets, torch.zeros(size, **more))


LEFT, RIGHT = box("w", (4, 4), (0, 0), (4, 2)), box("w", (4, 4), (0, 2), (4, 2))
WRONG = {
    "a hole": ([LEFT], [], r"weights: 'w' \[4, 4\]: its boxes hold 8 of 16 elements \(\[0:4, 0:2\] of trainer rank 0\)"),
    "a part twice": ([LEFT], [box("w", (4, 4), (0, 1), (4, 3))], r"\[0:4, 0:2\] of trainer rank 0 overlaps \[0:4, 1:4\] of trainer rank 1"),
    "all of it twice": ([LEFT, RIGHT], [LEFT, RIGHT], r"a shard that several ranks share has replica=0 on one rank"),
    "a hole as large as an overlap": ([LEFT], [box("w", (4, 4), (2, 1), (4, 2))], "exceeds the parameter's shape"),
    "a box beyond the end": ([LEFT], [box("w", (4, 4), (0, 3), (4, 2))], r"trainer rank 1 has a box of shape \[4, 2\] at offsets \[0, 3\]"),
    "a box before the begin": ([LEFT], [box("w", (4, 4), (0, -2), (4, 2))], r"at offsets \[0, -2\], which exceeds"),
    "a box of other dims": ([LEFT], [box("w", (4, 4), (0,), (8,))], "a box lies within it in every dim"),
    "another shape": ([LEFT], [box("w", (4, 5), (0, 2), (4, 3))], r"'w' is \[4, 4\] .* on trainer rank 0 and \[4, 5\]"),
    "another dtype": ([LEFT], [box("w", (4, 4), (0, 2), (4, 2), dtype=torch.int8)], "torch.bfloat16 on trainer rank 0 and .* torch.int8"),
    "a number twice": ([box("s", (), (), ())], [box("s", (), (), ())], "overlaps"),
}


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("what", list(WRONG))
def test_an_impossible_sharding_stops_both_kinds_of_readers_or_its_own_rank(make_shm: Any, what: str, buffers: int) -> None:
    *ranks, why = WRONG[what]
    ends = [make_shm() for _ in range(2)]
    reader = WeightsReader([found[0] for _, found in ends], buffers)
    with pytest.raises(ChannelError, match=why.replace("trainer rank 1 has", "(trainer rank 1|this trainer rank) has")):  # noqa: PT012
        for (writer, _), shards in zip(ends, ranks, strict=True):
            WeightsWriter(writer, torch.bfloat16).publish(1, shards, LONG)
        reader.receive(1, LONG)


def test_a_rank_finds_its_own_mistakes_before_it_sends_anything() -> None:
    writer, [reader] = local_channel("weights", 1, 1)
    with pytest.raises(ChannelError, match="this trainer rank has a box"):
        WeightsWriter(writer, torch.float32).publish(1, [box("w", (4,), (2,), (3,))], LONG)
    with pytest.raises(ChannelError, match=r"\[0:2\] of this trainer rank overlaps \[1:3\] of this trainer rank"):
        check_own([box("w", (4,), (0,), (2,)), box("w", (4,), (1,), (2,))])
    assert reader.statistics().messages == writer.statistics().messages == 0


def test_parameters_come_in_an_order_that_keeps_that_of_each_rank() -> None:
    def named(*names: str) -> list[WeightShard]:
        return list(unsharded_weights({name: torch.zeros(2) for name in names}))

    both = [WeightShard("0.expert.0", (2,), (2,), torch.zeros(0)), WeightShard("1.expert.0", (2,), (2,), torch.zeros(0))]
    new = named("0.expert.1", "1.expert.1")
    experts = [named("embed", "0.expert.0", "0.norm", "1.expert.0"), [both[0], new[0], both[1], new[1]]]
    stages = [named("embed", "0"), named("1", "2"), [], named("3", "head")]
    assert list(parameters(stages)) == ["embed", "0", "1", "2", "3", "head"]
    assert list(parameters(experts)) == ["embed", "0.expert.0", "0.expert.1", "0.norm", "1.expert.0", "1.expert.1"]


def test_parameters_of_one_box_are_not_copied(make_shm: Any) -> None:
    ends = [make_shm() for _ in range(2)]
    reader = WeightsReader([found[0] for _, found in ends], buffers=1)
    ranks = [[*unsharded_weights({"stage.0": torch.ones(3)}), LEFT], [RIGHT, *unsharded_weights({"stage.1": torch.ones(5)})]]
    for (writer, _), shards in zip(ends, ranks, strict=True):
        WeightsWriter(writer, torch.float32).publish(1, shards, LONG)
    received = reader.receive(1, LONG)
    views = [found[0]._taken[0][1]._tensors for _, found in ends]
    assert received["stage.0"] is views[0]["stage.0"]
    assert received["stage.1"] is views[1]["stage.1"]


def test_the_reader_plans_the_assembly_again_only_for_another_sharding(make_shm: Any, monkeypatch: Any) -> None:
    ends, cuts = [make_shm() for _ in range(2)], []
    monkeypatch.setattr(endpoints, "Assembly", lambda ranks: cuts.append(ranks) or Assembly(ranks))
    writers = [WeightsWriter(writer, torch.float32) for writer, _ in ends]
    reader = WeightsReader([found[0] for _, found in ends], buffers=1)
    for version, end in ((1, 2), (2, 2), (3, 2), (4, 3), (5, 3)):
        weight = torch.arange(8.0).view(4, 2) * version
        for writer, shard in zip(writers, (weight[:end], weight[end:]), strict=True):
            writer.publish(version, [WeightShard("w", (4, 2), (0 if writer is writers[0] else end, 0), shard)], LONG)
        assert torch.equal(reader.receive(version, LONG)["w"], weight)
        reader.release()
        assert all(shard.tensor.is_meta for shards in reader._assembly.shards for shard in shards)
    assert len(cuts) == 3  # the empty one it begins with, and one for each way of cutting


def test_a_message_without_a_description_is_refused(make_shm: Any) -> None:
    writer, [reader] = make_shm()
    writer.put(1, {"w": torch.ones(2)}, LONG)
    with pytest.raises(ChannelError, match=f"no column '{DESCRIPTION}'"):
        WeightsReader([reader], buffers=1).receive(1, LONG)


@pytest.mark.parametrize(
    "description", [b"", b"\xc1", b"\x90", b"\x91\x93\xa1w\x91\xa1x\x90", b"\x91\x93\xa1w\x91\x02\x91\xff", b"\x91" * 2000]
)
def test_a_description_that_no_rank_makes_is_refused(make_shm: Any, description: bytes) -> None:
    writer, [reader] = make_shm()
    writer.put(1, {DESCRIPTION: torch.tensor(list(description), dtype=torch.uint8), "w": torch.ones(2)}, LONG)
    with pytest.raises(ChannelError, match="weights"):
        WeightsReader([reader], buffers=1).receive(1, LONG)


@pytest.mark.parametrize("buffers", [1, 2])
def test_boxes_that_swap_places_land_at_their_new_places(make_shm: Any, buffers: int) -> None:
    """The messages are laid out alike, so that the reader gets the very tensors of the version before."""
    writer, readers = make_shm(slots=1)
    publisher, receiver = WeightsWriter(writer, torch.float32), WeightsReader(readers, buffers)
    for version in range(1, 5):
        first, second = (0, 2) if version % 2 else (2, 0)
        shards = [WeightShard("w", (4,), (offset,), torch.full((2,), float(offset))) for offset in (first, second)]
        publisher.publish(version, shards, LONG)
        assert receiver.receive(version, LONG)["w"].tolist() == [0, 0, 2, 2]
        receiver.release()
