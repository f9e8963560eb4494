"""A run whose vLLM merges an adapter, started by a test: `python adapter_process.py FOLDER OUT`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.generation_requests import FREE, SEEDS
from support.tiny import VLLM_PROMPTS
from transformers import AutoModelForCausalLM

from test_adapters import engine, loop, plan  # isort: skip


def largest_difference(folder: str | Path, responses: Any) -> float:
    """The furthest that log-probs of responses are from those of the model in a folder."""
    model, worst = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 0.0
    for prompt, response in zip(VLLM_PROMPTS, responses, strict=True):
        tokens = torch.tensor([[*prompt, *response.tokens]])
        with torch.no_grad():
            scores = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = scores.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(response.log_probs)).abs().max()))
    return worst


def main(folder: str, out: str) -> None:
    with plan(loop(folder, depth=0, engine="vllm")).run_here() as job:
        for number, _ in enumerate(job.steps(3)):
            job.export(f"{out}/{number}", dtype="float32")
        responses = engine(job, "generator").generate(VLLM_PROMPTS, FREE, SEEDS)  # by the version that the third step sampled with
    print(json.dumps({"from merged": largest_difference(f"{out}/1", responses), "from base": largest_difference(folder, responses)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
