"""An engine on a GPU: the same seeds give the same responses, and recorded copies leave the weights that the loader leaves."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tiny import tiny
from transformers import AutoModelForCausalLM

from rlgraph.engines.base import Sampling
from rlgraph.engines.vllm import VllmEngine

folder = tiny(Path("model"))
engine = VllmEngine(folder, max_model_len=64, kv_cache_bytes=256 << 20, max_sequences=16, shared=True)
prompts, sampling = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], Sampling(max_tokens=12, ignore_eos=True)


def responses() -> list[list[int]]:
    return [response.tokens for response in engine.generate(prompts, sampling, [1, 2, 3])]


first = responses()
assert responses() == first
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
engine.load_weights(weights)
assert responses() == first
changed = {name: weight * 1.5 for name, weight in weights.items()}
engine.load_weights(changed)
replayed = {name: parameter.clone() for name, parameter in engine._model().named_parameters()}
engine._model().load_weights(iter(changed.items()))
assert all(torch.equal(parameter, replayed[name]) for name, parameter in engine._model().named_parameters())
engine.sleep()
engine.load_weights(weights)
engine.wake()
assert responses() == first
print("equal")
sys.stdout.flush()
engine.close()
