"""Ranks whose moments are bfloat16, forked: started by a test, `run_sixteen_bit`, and what each does, `be_rank`."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.forked_workers import server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlgraph.engines.forward.policy_head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.optimizers import SixteenBitAdamW
from rlgraph.engines.fsdp.sharding import full, local
from rlgraph.engines.optim import AdamW

SETTINGS = AdamW(lr=1e-2, weight_decay=0.1, moments="16bit")
SHAPES = (128, 64), (65, 256), (301, 7), (8192,), (3, 4)


def rows_match() -> list[bool]:
    """Whether this rank's rows of two steps, from equal gradients, have the bits of the steps of one rank, for each shape."""
    draw = torch.Generator().manual_seed(0)
    weights, gradients = ([torch.randn(*shape, generator=draw) for shape in SHAPES] for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one = [torch.nn.Parameter(weight.clone()) for weight in weights]
    cut = [torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in weights]
    for parameters in (one, cut):
        optimizer = SixteenBitAdamW(parameters, SETTINGS)
        for step in range(2):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                given = gradient * (step + 1)
                parameter.grad = distribute_tensor(given, mesh, [Shard(0)]) if isinstance(parameter, DTensor) else given
            optimizer.step()
    return [torch.equal(full(mine), whole) for mine, whole in zip(cut, one, strict=True)]


def be_rank(folder: str, out: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    engine = FsdpEngine(PolicyHead(folder), optimizer=SETTINGS, rank=rank, world=world, dtype=torch.float32)
    engine.load(out / "one")
    state = {name: local(tensor).clone() for name, tensor in engine.state().items()}
    torch.save({"state": state, "bits": rows_match()}, out / f"{rank}.pt")
    engine.close()
    dist.destroy_process_group()


def run_sixteen_bit(folder: Path, out: Path, world: int) -> list[dict[str, Any]]:
    """Return what each rank found."""
    ranks = [server.Process(target=be_rank, args=(str(folder), out, rank, world), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [0] * world
    return [torch.load(out / f"{rank}.pt") for rank in range(world)]
