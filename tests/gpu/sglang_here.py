"""SGLang on a GPU: log-probs are the model's, seeds repeat, alone and in a batch, recorded copies leave what the loader leaves.

`sglang_here.py OVERLAP [shared]` schedules a step while the GPU is at another or not ("yes", "no"). A shared engine sleeps too.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.tiny import tiny_qwen
from transformers import AutoModelForCausalLM

from rlgraph.engines.api import Request, Response
from rlgraph.engines.sglang.engine import SglangEngine
from rlgraph.values.sampling import Sampling

overlap, shared = sys.argv[1] == "yes", "shared" in sys.argv
began = time.perf_counter()


def tell(what: str) -> None:
    print(f"{time.perf_counter() - began:.1f} s: {what}", flush=True)


folder = tiny_qwen(Path("model"), "qwen3", head=128)  # whose log-probs are 2 apart where a prompt is lost, and 0.02 by rounding
engine = SglangEngine(folder, max_context=512, max_sequences=16, memory=0.2, shared=shared, overlap=overlap)
tell("started")
sampling = Sampling(max_tokens=12, ignore_eos=True)
LENGTHS = (*range(1, 60, 2), 130, 260, 450)
LONG = [[(7 * number + place) % 250 + 1 for place in range(1, length + 1)] for number, length in enumerate(LENGTHS)]
SHORT = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def responses() -> list[Response]:
    """Return the responses to the same requests under new keys and values: requests under other weights share no prefix."""
    engine.load_weights(weights)
    return engine.generate(SHORT, sampling, [1, 2, 3])


def check_as_at_first(found: list[Response]) -> None:
    assert [response.tokens for response in found] == [response.tokens for response in first], (found, first)
    tell("the same tokens" + (" and bits" if found == first else ", other bits of log-probs"))


def joined() -> list[Response]:
    """Return responses to prompts of many lengths, each of which comes while others are decoded."""
    found: dict[str, Response] = {}
    for number, prompt in enumerate(LONG):
        engine.submit(Request(str(number), prompt, sampling, number))
        found |= engine.step()
    while len(found) < len(LONG):
        found |= engine.step()
    return [found[str(number)] for number in range(len(LONG))]


def apart(prompt: list[int], response: Response) -> float:
    """Compute how far the log-probs of a response are from the model's own."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response.tokens]).cuda()).logits[0, len(prompt) - 1 : -1].float()
    own = logits.log_softmax(-1)[range(len(response.tokens)), response.tokens].tolist()
    return max(abs(a - b) for a, b in zip(own, response.log_probs, strict=True))


def parameters() -> dict[str, torch.Tensor]:
    return dict(engine._scheduler.tp_worker.model_runner.model.named_parameters())


first = responses()
tell("first responses")
check_as_at_first(responses())

together = joined()
worst = max(apart(prompt, response) for prompt, response in zip(LONG, together, strict=True))
assert worst < 0.1, worst
tell(f"log-probs at most {worst:.3f} from the model's")

alone = [engine.generate([prompt], sampling, [number])[0] for number, prompt in enumerate(LONG)]
same = sum(a.tokens == b.tokens for a, b in zip(alone, together, strict=True))
tell(f"{same} of {len(LONG)} responses have the same tokens alone")  # where a draw is near the edge of a token, rounding decides
assert same >= 0.8 * len(LONG), same

changed = {name: weight * 1.5 for name, weight in weights.items()}
engine.load_weights(changed)
copied = {name: parameter.clone() for name, parameter in parameters().items()}
engine._scheduler.tp_worker.model_runner.model.load_weights(iter(changed.items()))
assert all(torch.equal(parameter, copied[name]) for name, parameter in parameters().items())
tell("recorded copies have the loader's bits")
check_as_at_first(responses())

if shared:
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    freed = torch.cuda.mem_get_info()[0] - free
    assert freed > 5 << 30, freed
    tell(f"asleep; {freed / 2**30:.1f} GiB freed")
    engine.load_weights(weights)  # wakes what it needs
    engine.wake()
    tell("awake with new weights")
    check_as_at_first(responses())
    engine.sleep()
    engine.wake()
    tell("awake with the weights it had")
    check_as_at_first(engine.generate(SHORT, sampling, [1, 2, 3]))
print(f"equal; log-probs at most {worst:.3f} apart", flush=True)
engine.close()
