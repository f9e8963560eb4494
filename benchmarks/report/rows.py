"""The tables in README.md and docs/benchmarks.md: which rows each has, and the figures in running text.

The rows of a table are in the file of its subject, `*_rows.py`: what was measured, its file and field, and one peer of each.
"""

from collections.abc import Mapping

from benchmarks.learning import adapters_learning, exact_learning
from benchmarks.lib.figures import Figure, count, ms, percent, seconds, share, times
from benchmarks.prediction import announced, predicted_runs
from benchmarks.report import recipe_tables, scale_tables, small_gpu_rows, staleness_tables, wall_clock_tables
from benchmarks.report.accuracy_rows import ACCURATE, PREDICTED
from benchmarks.report.channel_rows import BY_RAY, CHANNELS, HOPS_BY_RAY, MIB, hop
from benchmarks.report.exact_rows import EXACT, EXACT_ON_GPUS
from benchmarks.report.gpu_rows import BESIDE_PEERS, ON_GPUS, weights
from benchmarks.report.h100_rows import ON_H100S
from benchmarks.report.learning_rows import LEARNING
from benchmarks.report.mathematics_rows import MATHEMATICS_IN_TEXT
from benchmarks.report.reliability_rows import RELIABLE
from benchmarks.report.replay_rows import ROUTES
from benchmarks.report.stage_rows import STAGES
from benchmarks.report.streamed_rows import STREAMED
from benchmarks.report.table import Row, table
from benchmarks.report.two_gpu_rows import ON_TWO_H200S

# Those of README.md.
SHOWN: list[Row] = [
    *BESIDE_PEERS,
    weights("8B")[1],
    ACCURATE[1],
    ACCURATE[10],
    RELIABLE[5],
]

# Figures in running text, by the name in their comment.
FIGURES: Mapping[str, Figure] = MATHEMATICS_IN_TEXT | {
    "staleness-step-0": seconds("staleness_alone_cpu.json", "alone", "depth=0,correction=disabled", form="{:.1f} s"),
    "staleness-step-1": seconds("staleness_alone_cpu.json", "alone", "depth=1,correction=disabled", form="{:.1f} s"),
    "hop-shm": hop("rlgraph shm", 16 * MIB, file=HOPS_BY_RAY),
    "hop-ray": hop(BY_RAY, 16 * MIB, file=HOPS_BY_RAY),
    "two-gpus-gap": ms("weights_two_gpus_h200.json", "shapes", "8B", "median", "decode_gap_s", form="{:.0f} ms"),
    "tools-smollm2": share("tool_rollouts_smollm2_cpu.json", "ratio"),
    "tools-tiny": share("tool_rollouts_cpu.json", "ratio"),
    "tools-256": count("tool_rollouts_256_h200.json", "with_tools"),
    "tools-256-without": count("tool_rollouts_256_h200.json", "without"),
    "tools-256-own": count("tool_rollouts_own_scheduler_h200.json", "256 conversations", "with_tools"),
    "tools-256-own-without": count("tool_rollouts_own_scheduler_h200.json", "256 conversations", "without"),
    "interrupt-speed": share("rollout_cpu.json", "depth 1, update 0.0 of a step", "interrupt, recompute", "speed"),
    "a-priori-median": times("a_priori_h200.json", "median_factor_held_out"),
    "a-priori-worst": times("a_priori_h200.json", "worst_factor_held_out"),
    "overlap-predicted": seconds("overlap_h200.json", "predicted_colocated_s"),
    "overlap-time-shared": seconds("overlap_h200.json", "colocated", "step_s"),
    "overlap-ahead": seconds("overlap_h200.json", "one_step_off", "step_s"),
    "prediction-median": percent(PREDICTED, "median_error"),
    "prediction-worst": percent(PREDICTED, "worst_error"),
    "prediction-engines-median": ACCURATE[1].figure,
    "prediction-engines-worst": ACCURATE[1].beside or ACCURATE[1].figure,
    "prediction-h200-median": percent("prediction_h200.json", "fit_median_error"),
    "prediction-h200-worst": percent("prediction_h200.json", "fit_worst_error"),
    "growing-64": share("growing.json", "runs", 0, "replanned_over_fixed"),
    "growing-1024": share("growing.json", "runs", 1, "replanned_over_fixed"),
    "replan-best": share("replan_cpu.json", "over_best_at_each_step"),
    "replan-fixed": share("replan_cpu.json", "over_best_fixed"),
}

HEAD = ("what", "measured", "compared with", "script")


def tables() -> tuple[dict[str, str], list[str]]:
    """Write every table, by its name, and list what is declared but not measured."""
    groups = {"channels": CHANNELS, "learning": LEARNING, "stages": [*STAGES, *STREAMED, *EXACT, *ROUTES],
              "accuracy": ACCURATE, "reliability": RELIABLE, "gpus": [*ON_GPUS, *EXACT_ON_GPUS], "h100s": ON_H100S,
              "two-h200s": ON_TWO_H200S}  # fmt: skip
    found = (
        scale_tables.tables()
        | staleness_tables.tables()
        | wall_clock_tables.tables()
        | recipe_tables.tables()
        | adapters_learning.tables()
        | exact_learning.tables()
        | small_gpu_rows.tables()
        | predicted_runs.tables()
        | announced.tables()
    )
    missing: list[str] = []
    for name, rows in groups.items():
        found[name], left_out = table((*HEAD, "file: field"), rows, 5)
        missing += left_out
    found["readme"], _ = table(HEAD, SHOWN, 4)
    return found, missing
