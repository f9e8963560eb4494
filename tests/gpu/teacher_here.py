"""A teacher on vLLM scores rows as the model's own forward in float32 does, before and after it has slept: python teacher_here.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.tiny import tiny_qwen

from rlgraph.engines.vllm.scorer import VllmScorer

NEAR, TOP = 0.05, 8  # of log-probs that bfloat16 computes
folder = tiny_qwen(Path("model"), "qwen3", head=64)
draw = torch.Generator().manual_seed(0)
lengths = torch.tensor([12, 1, 700, 5, 0, 40])
mask = torch.arange(700) < lengths[:, None]
mask[2, 3:9] = False  # what a tool wrote
batch = {
    "prompts": torch.randint(1, 300, (6, 9), generator=draw),
    "prompt_mask": torch.arange(9) >= torch.tensor([0, 3, 8, 5, 0, 1])[:, None],
    "responses": torch.randint(1, 300, (6, 700), generator=draw),
    "response_mask": mask,
}


def expected() -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = torch.zeros(6, 700, 300)
    for row, length in enumerate(lengths.tolist()):
        prompt = batch["prompts"][row][batch["prompt_mask"][row]]
        whole = torch.cat([prompt, batch["responses"][row, :length]])[None]
        with torch.no_grad():
            found[row, :length] = model(input_ids=whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return found


true = expected()
engine = VllmScorer(folder, dtype="bfloat16", context=709, shared=torch.cuda.is_available(), memory=0.2)
for _ in range(2):
    own, ids, top = engine.top_scores(batch, TOP)
    torch.testing.assert_close(own[mask], true.gather(-1, batch["responses"][..., None])[..., 0][mask], atol=NEAR, rtol=0)
    torch.testing.assert_close(top[mask], true.gather(-1, ids.long())[mask], atol=NEAR, rtol=0)
    torch.testing.assert_close(top[mask], true.topk(TOP).values[mask], atol=NEAR, rtol=0)
    assert not bool(own[~mask].any())
    torch.testing.assert_close(engine.scores(batch), own, atol=NEAR, rtol=0)
    engine.sleep()
    engine.wake()
engine.close()
print("equal")
