"""Guessed tokens on a GPU: `drafts_here.py` compares an engine that guesses with one that does not, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

ROWS, TOKENS = 8, 60


def sampled(drafts: bool) -> dict[str, Any]:
    import torch
    from support.tiny import tiny_qwen
    from transformers import AutoModelForCausalLM

    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.drafts import PromptLookup
    from rlgraph.values.sampling import Sampling

    lookup = PromptLookup(tokens=3, longest=3, shortest=1, below=ROWS) if drafts else None
    engine = VllmEngine(
        tiny_qwen(Path("model"), "qwen3", head=64), max_model_len=256, kv_cache_bytes=256 << 20, max_sequences=16, memory=0.2, drafts=lookup
    )
    weights = AutoModelForCausalLM.from_pretrained(Path("model") / "qwen3", dtype=torch.bfloat16).state_dict()
    weights = {name: tensor.cuda() for name, tensor in weights.items() if name != "lm_head.weight"}  # tied
    prompts = [[(7 * row + place % 5) % 250 + 1 for place in range(4 + 5 * row)] for row in range(ROWS)]
    found: dict[str, Any] = {"rows": []}
    for temperature, repeats in ((0.0, False), (0.5, False), (0.0, True)):
        # Without what layers add, the next token is the last one again, so that guesses are right.
        off = {name: torch.zeros_like(tensor) for name, tensor in weights.items() if "o_proj" in name or "down_proj" in name}
        engine.load_weights(weights | (off if repeats else {}))
        engine.decode_metrics()
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=temperature)
        responses = engine.generate(prompts, sampling, list(range(ROWS)))
        assert responses == engine.generate(prompts, sampling, list(range(ROWS)))
        found["rows"] += [(response.tokens, response.log_probs) for response in responses]
    found["accepted"] = engine.decode_metrics().get("rollout/accepted_drafts", 0.0)
    return found


if len(sys.argv) > 1:
    Path(sys.argv[2]).write_text(json.dumps(sampled(sys.argv[1] == "drafts")))
    sys.exit()
for name in ("drafts", "none"):
    subprocess.run([sys.executable, __file__, name, f"{name}.json"], check=True)
with_drafts, without = (json.loads(Path(f"{name}.json").read_text()) for name in ("drafts", "none"))
same, distance = 0, 0.0
for (tokens, log_probs), (others, other_log_probs) in zip(with_drafts["rows"], without["rows"], strict=True):
    assert len(tokens) == len(log_probs) == TOKENS
    equal = next((place for place in range(TOKENS) if tokens[place] != others[place]), TOKENS)
    same += equal
    distance = max([distance, *(abs(a - b) for a, b in zip(log_probs[:equal], other_log_probs[:equal], strict=True))])
share = same / (3 * ROWS * TOKENS)
print(f"{with_drafts['accepted']:.2f} guesses accepted a step, {share:.3f} of the tokens are the same, log-probs {distance:.4f} apart")
assert with_drafts["accepted"] > 2  # of 3, where the text repeats
assert share > 0.7  # tokens that are all but equally likely change places by rounding, and what follows them is other text
assert distance < 0.1
print("equal")
