"""What engines yield as shards of their weights."""

import pytest
import torch
from programs.mesh_ranks import CUT, PLACEMENTS, WHOLE, run
from support.forked_workers import server

from rlgraph.channels.weights.shards import Assembly, WeightShard

CASES = dict.fromkeys(PLACEMENTS, WHOLE) | dict.fromkeys(["fsdp over tp", *CUT], torch.arange(64.0).view(16, 4))


@pytest.fixture(scope="module")
def ranks():
    results = server.SimpleQueue()
    process = server.Process(target=run, args=(results,))
    process.start()
    found = dict(results.get() for _ in range(8))
    process.join()
    return [found[rank] for rank in range(8)]


@pytest.mark.parametrize("name", list(CASES))
def test_dtensors_of_any_mesh_are_boxes_that_make_up_the_parameter(ranks, name):
    whole = CASES[name]
    shards = []
    for found in ranks:
        offsets, replica, values, shape = found[name]
        shards.append(WeightShard(name, tuple(whole.shape), offsets, torch.tensor(values).view(shape), replica))
    sent = [[shard] if shard.replica == 0 else [] for shard in shards]
    assert torch.equal(Assembly(sent).assemble([[shard.tensor for shard in shards] for shards in sent])[name], whole)
    copies = sum(len(one) for one in sent)
    assert sorted(shard.replica for shard in shards) == sorted([*range(8 // copies)] * copies)
    assert all(torch.equal(shard.within(whole), shard.tensor) for shard in shards)
