"""An engine on a GPU: the same seeds give the same responses, log-probs are the model's, recorded copies leave what the loader leaves.

`generate_here.py HEAD` takes a model of that head size, by which attention chooses its kernels.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.tiny import tiny_qwen
from transformers import AutoModelForCausalLM

from rlgraph.engines.api import Request, Response
from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.values.sampling import Sampling

head = int(sys.argv[1])
folder = tiny_qwen(Path("model"), "qwen3", head=head)  # whose log-probs are 2 apart where a prompt is lost, and 0.02 by rounding
engine = VllmEngine(folder, max_model_len=512, kv_cache_bytes=256 << 20, max_sequences=16, shared=True)
prompts, sampling = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], Sampling(max_tokens=12, ignore_eos=True)


def responses() -> list[list[int]]:
    return [response.tokens for response in engine.generate(prompts, sampling, [1, 2, 3])]


first = responses()
assert responses() == first
assert engine.scheduler.short > 0
engine.scheduler.watched.add("each request")  # steps in vLLM's own way
assert responses() == first
engine.scheduler.watched.clear()
LENGTHS = (*range(1, 60, 2), 130, 260, 450)
LONG = [[(7 * number + place) % 250 + 1 for place in range(1, length + 1)] for number, length in enumerate(LENGTHS)]


def joined() -> list[Response]:
    """Return responses to prompts of many lengths, each of which comes while others are decoded."""
    found: dict[str, Response] = {}
    for number, prompt in enumerate(LONG):
        engine.submit(Request(str(number), prompt, sampling, number))
        found |= engine.step()
    while len(found) < len(LONG):
        found |= engine.step()
    return [found[str(number)] for number in range(len(LONG))]


def replayed(manager: Any) -> list[int]:
    """Return a list to which each replay of a recorded step that reads prompts adds its tokens."""
    found: list[int] = []
    run = manager.run_fullgraph

    def counted(step: Any) -> Any:
        if step.uniform_token_count is None:
            found.append(step.num_tokens)
        return run(step)

    manager.run_fullgraph = counted
    return found


model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
replays = replayed(engine.llm.model_executor.driver_worker.worker.model_runner.cudagraph_manager)
worst = 0.0
for number, (prompt, response) in enumerate(zip(LONG, joined(), strict=True)):
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response.tokens]).cuda()).logits[0, len(prompt) - 1 : -1].float()
    own = logits.log_softmax(-1)[range(len(response.tokens)), response.tokens].tolist()
    worst = max(worst, *(abs(a - b) for a, b in zip(own, response.log_probs, strict=True)))
    assert worst < 0.1, (number, worst, own, response.log_probs)
assert len(replays) > len(LONG) // 2, replays
assert max(replays) > max(map(len, LONG)), replays
weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
engine.load_weights(weights)
assert responses() == first
changed = {name: weight * 1.5 for name, weight in weights.items()}
engine.load_weights(changed)
copied = {name: parameter.clone() for name, parameter in engine.model().named_parameters()}
engine.model().load_weights(iter(changed.items()))
assert all(torch.equal(parameter, copied[name]) for name, parameter in engine.model().named_parameters())
engine.sleep()
engine.load_weights(weights)
engine.wake()
assert responses() == first
print(f"equal; log-probs at most {worst:.3f} apart", flush=True)
engine.close()
