"""An engine on a GPU: the same seeds give the same responses, log-probs are the model's, recorded copies leave what the loader leaves."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tiny import tiny_qwen
from transformers import AutoModelForCausalLM

from rlgraph.engines.base import Request, Response, Sampling
from rlgraph.engines.vllm import VllmEngine

folder = tiny_qwen(Path("model"), "qwen3", head=64)  # whose log-probs are 2 apart where a prompt is lost, and 0.02 by rounding
engine = VllmEngine(folder, max_model_len=64, kv_cache_bytes=256 << 20, max_sequences=16, shared=True)
prompts, sampling = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], Sampling(max_tokens=12, ignore_eos=True)


def responses() -> list[list[int]]:
    return [response.tokens for response in engine.generate(prompts, sampling, [1, 2, 3])]


first = responses()
assert responses() == first


def joined() -> list[Response]:
    """Return responses to prompts of many lengths, some of which come while others are decoded."""
    found: dict[str, Response] = {}
    for number in range(24):
        prompt = [(7 * number + place) % 250 + 1 for place in range(1, 2 * number + 2)]
        engine.submit(Request(str(number), prompt, sampling, number))
        found |= engine.step()
    while len(found) < 24:
        found |= engine.step()
    return [found[str(number)] for number in range(24)]


model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
for number, response in enumerate(joined()):
    prompt = [(7 * number + place) % 250 + 1 for place in range(1, 2 * number + 2)]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response.tokens]).cuda()).logits[0, len(prompt) - 1 : -1].float()
    own = logits.log_softmax(-1)[range(len(response.tokens)), response.tokens].tolist()
    apart = max(abs(a - b) for a, b in zip(own, response.log_probs, strict=True))
    assert apart < 0.1, (number, apart, own, response.log_probs)
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
