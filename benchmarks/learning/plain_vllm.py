"""Accuracy of a model folder by vLLM alone, without rlgraph's engines: chat template, sampling and scores of the mathematics recipe.

    python benchmarks/learning/plain_vllm.py FOLDER questions.json answers.json

`questions.json` has `rows` with messages and answer, `system`, and the settings `max_tokens`, `max_context`, `samples` and `seed`.
"""

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # some virtual machines announce AMX and cannot use it
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # its kernels are compiled when they are first used, which needs a compiler


def main() -> None:
    folder, questions, target = map(Path, sys.argv[1:4])
    asked = json.loads(questions.read_text(encoding="utf-8"))
    answers = sampled(str(folder), asked)
    target.write_text(json.dumps(accuracy([row["answer"] for row in asked["rows"]], answers)) + "\n", encoding="utf-8")


def sampled(folder: str, asked: dict[str, Any]) -> list[list[str]]:
    """Sample the answers to each question."""
    import torch
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(folder)
    system = [{"role": "system", "content": asked["system"]}] if asked["system"] else []
    messages = [[*system, *row["messages"]] for row in asked["rows"]]
    prompts = [
        {"prompt_token_ids": tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)} for each in messages
    ]
    machine: dict[str, Any] = (
        {} if torch.cuda.is_available() else {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    )
    engine = LLM(folder, max_model_len=asked["max_context"], seed=asked["seed"], generation_config="vllm", **machine)
    sampling = SamplingParams(n=asked["samples"], temperature=1.0, max_tokens=asked["max_tokens"], seed=asked["seed"])
    return [[answer.text for answer in found.outputs] for found in engine.generate(prompts, sampling, use_tqdm=False)]


def accuracy(wanted: list[str], answers: list[list[str]]) -> dict[str, float]:
    """Compute the share of right answers, by math-verify, and its standard error over the questions."""
    import rlgraph as rg

    score = rg.scorers.math_verify()
    right = [statistics.fmean(score(text, answer) >= 1 for text in texts) for answer, texts in zip(wanted, answers, strict=True)]
    return {"accuracy": statistics.fmean(right), "stderr": statistics.stdev(right) / len(right) ** 0.5, "questions": len(right)}


if __name__ == "__main__":
    main()
