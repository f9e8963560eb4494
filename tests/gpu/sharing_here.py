"""Two ranks with a GPU each that share matrices, rows of tokens, or experts, beside one rank: the same log-probs and the same steps.

python tests/gpu/sharing_here.py              on a machine of two GPUs
python tests/gpu/sharing_here.py --megatron   by Megatron-Core's ranks, beside one rank of FSDP2
python tests/gpu/sharing_here.py --compiled   with layers that are compiled, beside one rank whose layers are not
python tests/gpu/sharing_here.py --smoke      on CPUs, by gloo

In float32 log-probs before and after four updates agree to rounding. In bfloat16 they are as far from float32's as those of one rank are.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
SMOKE, MEGATRON, COMPILED = ("--smoke" in sys.argv, "--megatron" in sys.argv, "--compiled" in sys.argv)
LENGTHS = [40, 30, 61, 12, 50, 44, 33, 64]  # of the responses
WAYS: dict[str, dict[str, int]] = {"dp2": {}, "tp2": {"tensor_parallel": 2}, "cp2": {"context_parallel": 2}}
WAYS |= {"pp2": {"pipeline_parallel": 2}} if MEGATRON else {"ring 2": {"context_parallel": 2, "ring": 2}}
if COMPILED:
    WAYS = {"tp2": {"tensor_parallel": 2, "compiled": True}}
NEAR, UPDATES = 2e-5, 4


def measured(rank: int, world: int, sharing: dict[str, int], folder: Path, rendezvous: str, results: Any) -> None:
    """Train the model by this rank, in both dtypes; the first rank gives the log-probs before and after."""
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        import torch
        import torch.distributed as dist
        from support.tiny import WeightedLikelihood, batch_of
        from support.trainer_engines import fsdp_engine, megatron_engine

        from rlgraph.engines.forward.head import PolicyHead
        from rlgraph.engines.fsdp.sharding import backends
        from rlgraph.values.optimizers import AdamW

        device = "cpu" if SMOKE else "cuda"
        if world > 1:
            dist.init_process_group(backends(), init_method=rendezvous, rank=rank, world_size=world)
        batch, found = batch_of(LENGTHS, holes=True), {}
        for dtype in (torch.float32, torch.bfloat16):
            step = AdamW(lr=1e-3, eps=1e-3)
            more: dict[str, Any] = {"device": device, "dtype": dtype, "micro_batch_tokens": 96, **sharing}
            made: Any = partial(fsdp_engine, flat=True)
            if MEGATRON and world > 1:
                made = megatron_engine
            engine = made(PolicyHead(folder), optimizer=step, rank=rank, world=world, **more)
            before = engine.scores(batch)
            norms = [engine.update(batch, WeightedLikelihood())["actor/grad_norm"] for _ in range(UPDATES)]
            found[str(dtype)] = before.tolist(), engine.scores(batch).tolist(), norms
            engine.close()
        if rank == 0:
            results.put(found)
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.put(traceback.format_exc())
        raise


def of(world: int, sharing: dict[str, int], folder: Path) -> Any:
    """What the first of so many ranks found."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        given = [(rank, world, sharing, folder, f"file://{place}/group", results) for rank in range(world)]
        ranks = [context.Process(target=measured, args=one) for one in given]
        for rank in ranks:
            rank.start()
        found = results.get(timeout=240)
        for rank in ranks:
            rank.join(30)
            rank.kill()
    assert not isinstance(found, str), found
    return found


def main() -> None:
    import torch

    from rlgraph.engines.hf.pretrained import tiny_model

    folder = tiny_model(Path("model"), hidden=256, tied=False)
    float32, bfloat16 = str(torch.float32), str(torch.bfloat16)
    alone = of(1, {}, folder)
    whole, plain = (torch.tensor(alone[float32][when]) for when in (0, 1))
    rounding = (torch.tensor(alone[bfloat16][0]) - whole).abs().max().item()
    for way, sharing in WAYS.items():
        found = of(2, sharing, folder)
        before, after = (torch.tensor(found[float32][when]) for when in (0, 1))
        far, farther = (before - whole).abs().max().item(), (after - plain).abs().max().item()
        half = (torch.tensor(found[bfloat16][0]) - whole).abs().max().item()
        print(
            f"{way}: float32 {far:.1e}, after {UPDATES} updates {farther:.1e}; bfloat16 {half:.1e}, of one rank {rounding:.1e}", flush=True
        )
        assert far < NEAR, (way, far)
        assert farther < 10 * NEAR, (way, farther)
        assert half < 2 * rounding, (way, half, rounding)
    print("equal")


if __name__ == "__main__":
    main()
