"""The second buffer for weights."""

import pytest
import torch

from rlgraph.channels.host.slot_memory import device_view
from rlgraph.channels.weights import endpoints
from rlgraph.channels.weights.endpoints import Staging
from rlgraph.channels.weights.shards import WeightShard, unsharded_weights
from rlgraph.errors import ChannelError

WHOLE = {"embed": torch.arange(12.0).view(6, 2), "norm": torch.arange(3.0), "scale": torch.tensor([7.0])}


def rows_of(weights, rank, ranks):
    """Return the rows of a rank as FSDP deals them out: as `torch.chunk`, with nothing for ranks that get no row."""
    for name, tensor in weights.items():
        each = -(-len(tensor) // ranks)
        first = min(rank * each, len(tensor))
        yield WeightShard(name, tuple(tensor.shape), (first, *[0] * (tensor.dim() - 1)), tensor[first : first + each])


def split(ranks):
    return [list(rows_of(WHOLE, rank, ranks)) for rank in range(ranks)]


def values(second):
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in second.weights.items()}


def expected(weights):
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in weights.items()}


def test_the_rows_of_any_number_of_ranks_come_together_in_order():
    for ranks in (1, 2, 3, 4):
        second = Staging()
        second.fill(split(ranks))
        assert values(second) == expected(WHOLE)


def test_a_later_version_lands_in_the_same_memory():
    second = Staging()
    second.fill([list(unsharded_weights(WHOLE))])
    places = {name: tensor.data_ptr() for name, tensor in second.weights.items()}
    second.fill([list(unsharded_weights({name: tensor + 1 for name, tensor in WHOLE.items()}))])
    assert {name: tensor.data_ptr() for name, tensor in second.weights.items()} == places
    assert all(torch.equal(second.weights[name], tensor + 1) for name, tensor in WHOLE.items())


def test_parameters_that_change_their_shape_or_dtype_get_memory_that_fits():
    second = Staging()
    for weights in (
        WHOLE,
        {**WHOLE, "norm": torch.arange(5.0)},
        {name: tensor.double() for name, tensor in WHOLE.items()},
        {"one": torch.ones(1)},
    ):
        second.fill([list(unsharded_weights(weights))])
        assert values(second) == expected(weights)


def test_the_order_of_the_parameters_may_change():
    second = Staging()
    square = {"a": torch.zeros(2, 2), "b": torch.ones(2, 2)}
    for names in ("ab", "ba"):
        second.fill([list(unsharded_weights({name: square[name].clone() for name in names}))])
        assert values(second) == expected(square)


def test_shards_in_the_same_memory_bring_their_new_values():
    ranks = [[WeightShard(s.name, s.global_shape, s.offsets, s.tensor.clone()) for s in shards] for shards in split(2)]
    second = Staging()
    for version in range(3):
        second.fill(ranks)
        assert all(torch.equal(second.weights[name], tensor + version) for name, tensor in WHOLE.items())
        for shard in (shard for shards in ranks for shard in shards):
            shard.tensor.add_(1)


def test_a_sharding_with_a_hole_is_refused_before_the_first_copy():
    second = Staging()
    second.fill(split(2))
    held = {name: tensor.clone() for name, tensor in second.weights.items()}
    new = [list(rows_of({name: tensor + 1 for name, tensor in WHOLE.items()}, rank, 3)) for rank in range(3)]
    with pytest.raises(ChannelError, match=r"'embed' \[6, 2\]: its boxes hold 8 of 12 elements \(\[0:2, 0:2\] of trainer rank 0, \[2:4"):
        second.fill(new[:2])
    assert all(torch.equal(second.weights[name], tensor) for name, tensor in held.items())


def test_ranks_that_send_nothing_at_all_are_an_error():
    with pytest.raises(ChannelError, match="no trainer rank sends a shard"):
        Staging().fill([[], []])


def test_one_memory_that_holds_whole_parameters_is_copied_as_it_is(monkeypatch):
    """As on a GPU, whose memory of a trainer of one rank is copied in few parts: here in memory of the host."""
    memory = torch.zeros(256, dtype=torch.uint8)
    places = {"a": (0, (3, 4)), "b": (64, (5,)), "c": (128, (0, 2)), "d": (192, (2, 2))}
    weights = {name: device_view(memory, torch.float32, torch.Size(shape), start) for name, (start, shape) in places.items()}
    monkeypatch.setattr(endpoints, "_whole_memory", lambda found: memory if found and endpoints.are_contiguous(found) else None)
    second = Staging()
    ranks = [list(unsharded_weights(weights))]
    for version in range(1, 4):
        for weight in weights.values():
            weight.fill_(version)
        memory[255] = version  # behind the last parameter: what lies there is copied with it
        told = []
        second.fill(ranks, lambda rank, beyond, told=told: told.append(beyond + 1) or beyond + 1)
        assert told == [1, 2, 3, 4]
        assert values(second) == expected(weights)
        assert second._flat is not None
        assert torch.equal(second._flat, memory)
    second.fill([list(rows_of(weights, rank, 2)) for rank in range(2)])  # the same parameters, cut in another way
    assert values(second) == expected(weights)
    second.fill(ranks)
    assert values(second) == expected(weights)
