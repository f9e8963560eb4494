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
