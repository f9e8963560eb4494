"""An engine with fp8 weights on a GPU: versions leave the bits that vLLM's own loader leaves, responses repeat, also after sleep."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.tiny import tiny_qwen
from transformers import AutoModelForCausalLM

from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.values.sampling import Sampling

folder = tiny_qwen(Path("model"), "qwen3", head=64)
engine = VllmEngine(folder, max_model_len=512, kv_cache_bytes=256 << 20, max_sequences=16, shared=True, weights_dtype="fp8")
prompts, sampling = [[5, 6, 7], [8, 9], list(range(10, 150))], Sampling(max_tokens=12, ignore_eos=True)


def responses() -> list[tuple[list[int], list[float]]]:
    return [(response.tokens, response.log_probs) for response in engine.generate(prompts, sampling, [1, 2, 3])]


def held() -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in engine.model().state_dict().items()}


first, loaded = responses(), held()
assert responses() == first
weights = {name: tensor.cuda() for name, tensor in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict().items()}
weights.pop("lm_head.weight", None)  # tied
others = {name: tensor * 1.5 for name, tensor in weights.items()}
engine.load_weights(others)
assert responses() != first
assert any(not torch.equal(tensor, loaded[name]) for name, tensor in held().items())
engine.load_weights(weights)
differ = [name for name, tensor in held().items() if not torch.equal(tensor, loaded[name])]
assert not differ, differ
assert responses() == first
engine.sleep()
engine.wake()
assert responses() == first
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
for prompt, (tokens, log_probs) in zip(prompts, first, strict=True):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    own = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens, device="cuda")].cpu()
    distance = (own - torch.tensor(log_probs)).abs().max().item()
    assert distance < 0.5, distance  # a matrix in the wrong place is 2 apart
print("equal")
