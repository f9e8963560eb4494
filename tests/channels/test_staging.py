"""The second buffer for weights."""

import pytest
import torch

from rlgraph.channels.staging import Staging
from rlgraph.channels.weight_shards import WeightShard, whole
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


def values(staging):
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in staging.weights.items()}


def expected(weights):
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in weights.items()}


def test_the_rows_of_any_number_of_ranks_come_together_in_order():
    for ranks in (1, 2, 3, 4):
        staging = Staging()
        staging.fill(split(ranks))
        assert values(staging) == expected(WHOLE)


def test_a_later_version_lands_in_the_same_memory():
    staging = Staging()
    staging.fill([list(whole(WHOLE))])
    places = {name: tensor.data_ptr() for name, tensor in staging.weights.items()}
    staging.fill([list(whole({name: tensor + 1 for name, tensor in WHOLE.items()}))])
    assert {name: tensor.data_ptr() for name, tensor in staging.weights.items()} == places
    assert all(torch.equal(staging.weights[name], tensor + 1) for name, tensor in WHOLE.items())


def test_parameters_that_change_their_shape_or_dtype_get_memory_that_fits():
    staging = Staging()
    for weights in (
        WHOLE,
        {**WHOLE, "norm": torch.arange(5.0)},
        {name: tensor.double() for name, tensor in WHOLE.items()},
        {"one": torch.ones(1)},
    ):
        staging.fill([list(whole(weights))])
        assert values(staging) == expected(weights)


def test_the_order_of_the_parameters_may_change():
    staging = Staging()
    square = {"a": torch.zeros(2, 2), "b": torch.ones(2, 2)}
    for names in ("ab", "ba"):
        staging.fill([list(whole({name: square[name].clone() for name in names}))])
        assert values(staging) == expected(square)


def test_shards_that_lie_where_they_lay_bring_their_new_values():
    ranks = [[WeightShard(s.name, s.global_shape, s.offsets, s.tensor.clone()) for s in shards] for shards in split(2)]
    staging = Staging()
    for version in range(3):
        staging.fill(ranks)
        assert all(torch.equal(staging.weights[name], tensor + version) for name, tensor in WHOLE.items())
        for shard in (shard for shards in ranks for shard in shards):
            shard.tensor.add_(1)


def test_a_cut_with_a_hole_is_refused_before_anything_is_copied():
    staging = Staging()
    staging.fill(split(2))
    held = {name: tensor.clone() for name, tensor in staging.weights.items()}
    new = [list(rows_of({name: tensor + 1 for name, tensor in WHOLE.items()}, rank, 3)) for rank in range(3)]
    with pytest.raises(ChannelError, match=r"'embed' \[6, 2\]: its boxes hold 8 of 12 elements \(\[0:2, 0:2\] of trainer rank 0, \[2:4"):
        staging.fill(new[:2])
    assert all(torch.equal(staging.weights[name], tensor) for name, tensor in held.items())


def test_ranks_that_send_nothing_at_all_are_an_error():
    with pytest.raises(ChannelError, match="no trainer rank sends a shard"):
        Staging().fill([[], []])
