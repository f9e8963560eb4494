"""What engines yield as shards of their weights."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked_workers import server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlgraph.channels.weights.shards import Assembly, WeightShard
from rlgraph.engines.fsdp.sharding import as_dtensor, cut_parameter, local, locate_box, shard

WHOLE = torch.arange(7 * 6 * 4.0).view(7, 6, 4)
PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Shard(0), Replicate(), Replicate()],
    "rows of two meshes": [Shard(0), Shard(0), Replicate()],
    "rows and columns": [Replicate(), Shard(1), Shard(0)],
    "three dims": [Shard(2), Shard(0), Shard(1)],
    "replicas": [Replicate(), Replicate(), Replicate()],
}
CUT: dict[str, int | None] = {"cut by rows": 0, "cut by columns": 1, "alike": None}
CASES = dict.fromkeys(PLACEMENTS, WHOLE) | dict.fromkeys(["fsdp over tp", *CUT], torch.arange(64.0).view(16, 4))


def shards_of(rank: int) -> dict[str, Any]:
    """Return (offsets, replica, tensor) of this rank for each placement, and of FSDP2 over tensor parallel shards of one dim."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2))
    found = {name: distribute_tensor(WHOLE, mesh, placements, src_data_rank=None) for name, placements in PLACEMENTS.items()}
    both = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    layer = torch.nn.Linear(4, 16, bias=False)
    whole = torch.arange(64.0).view(16, 4)
    layer.weight = torch.nn.Parameter(distribute_tensor(whole, both["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(layer, mesh=both["fsdp"])
    found["fsdp over tp"] = layer.weight.detach()
    for name, dim in CUT.items():
        plain = torch.nn.Linear(4, 16, bias=False)
        plain.weight = cut_parameter(torch.nn.Parameter(whole), both, dim)
        shard(plain, (), both["fsdp"], torch.float32)
        found[name] = plain.weight
        assert plain.weight.device_mesh.ndim == 1, "FSDP knows of no other ranks"
        assert locate_box(as_dtensor(plain.weight, plain.weight)) == locate_box(plain.weight)
    result = {name: (*locate_box(tensor), local(tensor.detach()).clone()) for name, tensor in found.items()}
    dist.destroy_process_group()
    return result


def run(results: Any) -> None:
    """Put what each rank found, with its number; the ranks are forked from a process that has imported torch."""
    torch.set_num_threads(1)
    for rank in range(8):
        if not (child := os.fork()):
            found = {name: (offsets, replica, t.tolist(), tuple(t.shape)) for name, (offsets, replica, t) in shards_of(rank).items()}
            results.put((rank, found))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


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
    assert all(torch.equal(shard.view_of(whole), shard.tensor) for shard in shards)
