"""Moments of 8 bits on a GPU: ten updates have the bits of bitsandbytes' own optimizer, and a checkpoint goes on with the same bits.

A base of 4 bits there: the log-probs of a trainer over it, beside those over the model with the rounded matrices.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from bitsandbytes.optim import AdamW8bit
from support.tiny import LENGTHS, WeightedLikelihood, batch_of, tiny_qwen
from support.trainer_engines import fsdp_engine
from transformers import AutoModelForCausalLM

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.fsdp.sharding import local
from rlgraph.engines.lora import round_matrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = rg.AdamW(lr=1e-2, weight_decay=0.1, warmup_steps=2, moments="8bit")
folder = tiny_qwen(Path("model"), "qwen3", vocab=320, head=64)
kind = torch.bfloat16 if DEVICE == "cuda" else torch.float32
batch = batch_of(LENGTHS)


def made(adapter: rg.LoRA | None) -> FsdpEngine:
    return fsdp_engine(PolicyHead(folder), optimizer=SETTINGS, device=DEVICE, dtype=kind, adapter=adapter)


for adapter in (None, rg.LoRA(rank=64)):
    engine = made(adapter)
    named = engine.trained_parameters()
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in engine.weights().items()}
    library: Any = AdamW8bit(theirs.values(), lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay)

    def same_gradients(*_: Any, engine: Any = engine, named: Any = named, theirs: Any = theirs, library: Any = library) -> None:
        for name, parameter in named.items():
            theirs[name].grad = local(parameter.grad).clone()
        library.param_groups[0]["lr"] = engine._optimizer.param_groups[0]["lr"]

    engine._optimizer.register_step_pre_hook(same_gradients)
    for _ in range(10):
        engine.update(batch, WeightedLikelihood())
        library.step()
    differ = [name for name, tensor in engine.weights().items() if not torch.equal(tensor, theirs[name])]
    assert not differ, differ
    eight = sum(state["state1"].dtype == torch.uint8 for state in library.state.values())
    assert eight >= 8, eight
    engine.save(Path(f"saved{adapter is not None}"), 60.0)()
    metrics = engine.update(batch, WeightedLikelihood())
    after = {name: tensor.clone() for name, tensor in engine.weights().items()}
    engine.sleep()
    engine.wake()
    slept = engine.update(batch, WeightedLikelihood())
    engine.close()
    again = made(adapter)
    again.load(Path(f"saved{adapter is not None}"))
    assert again.update(batch, WeightedLikelihood()) == metrics
    assert all(torch.equal(tensor, after[name]) for name, tensor in again.weights().items())
    assert again.update(batch, WeightedLikelihood()) == slept
    again.close()
    print(f"{'adapter' if adapter else 'whole'}: equal, {eight} of {len(theirs)} parameters have moments of 8 bits", flush=True)


model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
for name, parameter in model.named_parameters():
    if "_proj" in name:
        parameter.data = round_matrix(parameter.data, torch.float32)
model.save_pretrained("rounded")
found, updates = [], []
for place, base in ((folder, "nf4"), ("rounded", None)):
    lora = rg.LoRA(rank=16, base=base)  # type: ignore[arg-type]
    engine = fsdp_engine(PolicyHead(place), optimizer=rg.AdamW(lr=1e-3), device=DEVICE, dtype=kind, adapter=lora)
    found.append(engine.scores(batch))
    updates.append([engine.update(batch, WeightedLikelihood()) for _ in range(3)])
    engine.close()
distance = (found[0] - found[1]).abs().max().item()
norms = [[step["actor/grad_norm"] for step in steps] for steps in updates]
print(f"4 bits: log-probs {distance:.1e} apart, norms of gradients {norms}", flush=True)
assert distance < 0.05, distance
