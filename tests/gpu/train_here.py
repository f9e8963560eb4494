"""A step of training on a CPU and on a GPU, compared."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.tiny import LENGTHS, WeightedLikelihood, batch_of, tiny_llama
from support.trainer_engines import fsdp_engine

from rlgraph.engines.forward.head import PolicyHead
from rlgraph.values.optimizers import AdamW

STEP = AdamW(lr=1e-2, eps=1e-3)
folder, batch = tiny_llama(Path("model")), batch_of(LENGTHS, holes=True)
found = []
for device in ("cpu", "cuda"):
    engine = fsdp_engine(PolicyHead(folder), optimizer=STEP, device=device, dtype=torch.float32)
    before = engine.scores(batch)
    engine.update(batch, WeightedLikelihood())
    engine.sleep()
    engine.wake()
    engine.update(batch, WeightedLikelihood())
    found.append((before, {name: weight.cpu().clone() for name, weight in engine.weights().items()}))
    engine.close()
(cpu, cpu_weights), (gpu, gpu_weights) = found
assert torch.allclose(cpu, gpu, atol=1e-4), (cpu - gpu).abs().max()
for name, weight in cpu_weights.items():
    assert torch.allclose(weight, gpu_weights[name], atol=1e-4), name
print("equal")
