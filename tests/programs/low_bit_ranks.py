"""Ranks whose moments have 8 or 16 bits."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.forked_ranks import process_group, run_ranks
from support.trainer_engines import fsdp_engine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.optimizers import EightBitAdamW, SixteenBitAdamW
from rlgraph.engines.fsdp.sharding import full, local
from rlgraph.values.optimizers import AdamW

OPTIMIZERS = {"8bit": EightBitAdamW, "16bit": SixteenBitAdamW}
SHAPES = ((128, 64), (65, 256), (300, 64), (301, 7), (8192,), (3, 4))  # 8 bits cut the third within a block, the fifth in its middle


def settings_of(moments: Any) -> AdamW:
    return AdamW(lr=1e-2, weight_decay=0.1, moments=moments)


def rows_match(settings: AdamW) -> list[bool]:
    """Whether this rank's rows of two steps, from equal gradients, have the bits of the steps of one rank, for each shape."""
    draw = torch.Generator().manual_seed(0)
    weights, gradients = ([torch.randn(*shape, generator=draw) for shape in SHAPES] for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one = [torch.nn.Parameter(weight.clone()) for weight in weights]
    cut = [torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in weights]
    for parameters in (one, cut):
        optimizer = OPTIMIZERS[settings.moments](parameters, settings)
        for step in range(2):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                given = gradient * (step + 1)
                parameter.grad = distribute_tensor(given, mesh, [Shard(0)]) if isinstance(parameter, DTensor) else given
            optimizer.step()
    return [torch.equal(full(mine), whole) for mine, whole in zip(cut, one, strict=True)]


def be_rank(folder: Path, moments: str, out: Path, rank: int, world: int) -> None:
    settings = settings_of(moments)
    with process_group(out, rank, world):
        engine = fsdp_engine(PolicyHead(folder), optimizer=settings, rank=rank, world=world, dtype=torch.float32)
        engine.load(out / "one")
        state = {name: local(tensor).clone() for name, tensor in engine.state().items()}
        engine.save(out / "stored", 60.0)()
        torch.save({"state": state, "bits": rows_match(settings)}, out / f"{rank}.pt")
        engine.close()


def run_low_bit(folder: Path, moments: str, out: Path) -> list[dict[str, Any]]:
    """Return what each of two ranks found, which load `out / "one"`."""
    return run_ranks(be_rank, 2, folder, moments, out=out)
