"""One rank of a data-parallel trainer, started by a test: `python ranks.py FOLDER OUT RANK WORLD`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import LENGTHS, WeightedLikelihood, batch_of

from rlgraph.engines.adamw import AdamW
from rlgraph.engines.fsdp import FsdpEngine
from rlgraph.engines.heads import PolicyHead

MICRO_BATCH_TOKENS = 16


def main(folder: str, out: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    batch = batch_of(LENGTHS, holes=True)
    engine = FsdpEngine(
        PolicyHead(folder),
        optimizer=AdamW(lr=1e-2, eps=1e-3),
        rank=rank,
        world=world,
        dtype=torch.float32,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    log_probs = engine.scores(batch)
    metrics = [engine.update(batch, WeightedLikelihood(entropy=0.1)) for _ in range(2)]
    saved = {"log_probs": log_probs, "metrics": metrics, "weights": engine.weights(), "state": engine.state()}
    torch.save(saved, out / f"{rank}.pt")
    engine.update(batch, WeightedLikelihood())
    engine.load_state(torch.load(out / f"{rank}.pt")["state"])
    torch.save(engine.update(batch, WeightedLikelihood()), out / f"{rank}.resumed.pt")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
