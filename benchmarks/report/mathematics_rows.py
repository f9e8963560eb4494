"""The rows of `recipes/mathematics.py`: what its seeds learn on two cores, and what the exported model answers."""

from typing import Any

from benchmarks.lib.figures import Each, Figure, count, share
from benchmarks.report.table import Row

MATHS, SEEDS, BY_SEED = "mathematics_cpu.json", ("runs", Each()), "benchmarks/learning/learning.py"


def of_seeds(field: str, *path: Any) -> Figure:
    """The mean over the seeds of the mathematics recipe."""
    return share(MATHS, *SEEDS, field, *path, reduce="mean")


MATHEMATICS = [
    Row("SmolLM2 learns arithmetic, asked by its chat template: held-out accuracy after {steps} steps, mean of {seeds} seeds",
        of_seeds("final_accuracy"), BY_SEED, "before", of_seeds("accuracy", 0, 2),
        {"steps": count(MATHS, "settings", "steps"), "seeds": count(MATHS, *SEEDS, "steps", reduce="count")}),
    Row("the same: of the worst seed", share(MATHS, *SEEDS, "final_accuracy", reduce="min"), BY_SEED),
    Row("the same: mean reward of the last 4 steps", of_seeds("last_reward"), BY_SEED, "the first 4", of_seeds("first_reward")),
    *(Row(f"the same: the exported model of seed {seed} (float32) by plain vLLM",
          share(MATHS, "runs", f"seed={seed}", "exported_by_vllm", "accuracy"), BY_SEED,
          "by rlgraph at the end", share(MATHS, "runs", f"seed={seed}", "final_accuracy"))
      for seed in (1, 2)),
]  # fmt: skip
MATHEMATICS_IN_TEXT = {
    "mathematics-before": of_seeds("accuracy", 0, 2),
    "mathematics-after": of_seeds("final_accuracy"),
    "mathematics-by-vllm": share(MATHS, "runs", "seed=2", "exported_by_vllm", "accuracy"),
}
