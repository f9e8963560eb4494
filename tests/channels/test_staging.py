"""The second buffer for weights."""

import torch

from rlgraph.channels.staging import Staging

WHOLE = {"embed": torch.arange(12.0).view(6, 2), "norm": torch.arange(3.0), "scale": torch.tensor([7.0])}


def split(ranks):
    """Return the rows of each rank as FSDP deals them out: `torch.chunk`, with nothing for ranks that get no row."""
    parts = []
    for rank in range(ranks):
        chunks = {name: tensor.chunk(ranks) for name, tensor in WHOLE.items()}
        parts.append({name: c[rank] if rank < len(c) else WHOLE[name][:0] for name, c in chunks.items()})
    return parts


def test_the_rows_of_any_number_of_ranks_come_together_in_order():
    for ranks in (1, 2, 3, 4):
        staging = Staging()
        staging.fill(split(ranks))
        assert {name: tensor.tolist() for name, tensor in staging.weights.items()} == {n: t.tolist() for n, t in WHOLE.items()}


def test_a_later_version_lands_in_the_same_memory():
    staging = Staging()
    staging.fill([WHOLE])
    places = {name: tensor.data_ptr() for name, tensor in staging.weights.items()}
    staging.fill([{name: tensor + 1 for name, tensor in WHOLE.items()}])
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
        staging.fill([weights])
        assert {name: (t.dtype, t.tolist()) for name, t in staging.weights.items()} == {
            n: (t.dtype, t.tolist()) for n, t in weights.items()
        }


def test_the_order_of_the_parameters_may_change():
    staging = Staging()
    square = {"a": torch.zeros(2, 2), "b": torch.ones(2, 2)}
    for names in ("ab", "ba"):
        staging.fill([{name: square[name].clone() for name in names}])
        assert {name: tensor.tolist() for name, tensor in staging.weights.items()} == {n: t.tolist() for n, t in square.items()}


def test_rows_that_lie_where_they_lay_bring_their_new_values():
    parts = [{name: tensor.clone() for name, tensor in part.items()} for part in split(2)]
    staging = Staging()
    for _ in range(3):
        staging.fill(parts)
        assert all(torch.equal(staging.weights[name], torch.cat([part[name] for part in parts])) for name in WHOLE)
        for part in parts:
            for tensor in part.values():
                tensor += 1
