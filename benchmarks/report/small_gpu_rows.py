"""The tables of docs/developers/measurements.md: jobs whose models take turns on one H200, and learning with fp8 rollouts on an H100."""

import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.lib.figures import RESULTS

JOBS = {"1.7B in full": "colocated", 'with `offload="never"`': "colocated_stay", "8B by an adapter of rank 32": "colocated_8b"}
NAMES = {
    "bfloat16": "bfloat16, with truncated importance sampling",
    "fp8": "fp8, with truncated importance sampling",
    "fp8, not corrected": "fp8, without it",
}


def tables() -> dict[str, str]:
    """Write the tables by their names."""
    return {"in-turns": turns(), "fp8-learning": learning()}


def learning() -> str:
    """Write the table of runs that learn with fp8 rollouts and with bfloat16 ones."""
    found = json.loads((RESULTS / "small_gpu_h100.json").read_text(encoding="utf-8"))["parts"]["fp8_learning"]
    lines = ["| rollouts | share of right sums, last 4 steps, by seed | KL(rollout \\|\\| trainer), mean |", "|---|---|---|"]
    for name, runs in found["runs"].items():
        ends = ", ".join(f"{statistics.fmean(run['rewards'][-4:]):.3f}" for run in runs)
        distances = [run["metrics"]["rollout_corr/kl"] for run in runs if run["metrics"]]
        lines.append(f"| {NAMES[name]} | {ends} | {f'{statistics.fmean(distances):.4f}' if distances else 'not asked'} |")
    return "\n".join(lines) + "\n"


def turns() -> str:
    """Write the table of jobs in turns."""
    parts = json.loads((RESULTS / "small_gpu_h200.json").read_text(encoding="utf-8"))["parts"]
    columns = [column(parts[part], parts["colocated_halves"]) for part in JOBS.values()]
    lines = [f"| on one H200 | {' | '.join(JOBS)} |", "|---" * (1 + len(JOBS)) + "|"]
    lines += [f"| {what} | {' | '.join(each[what] for each in columns)} |" for what in columns[0]]
    return "\n".join(lines) + "\n"


def column(job: Mapping[str, Any], halves: Mapping[str, Any]) -> dict[str, str]:
    """Write the cells of a job by their rows."""
    spans, same = job["spans_s"], job["shape"] == halves["shape"]
    return {
        "a step": f"{job['step_s']:.2f} s",
        "its rollout and update": f"{spans['fire of rollout']:.2f} + {spans['fire of update']:.2f} s",
        "step over these": f"{job['step_to_nodes']:.2f}",
        "step over both, each with the GPU to itself": f"{job['step_s'] / halves['halves_s']:.2f}" if same else "not measured",
        "the engine sleeps and wakes": f"{spans['sleep of sleep after rollout']:.2f} + {spans['wake of wake for rollout']:.2f} s",
        "moments leave and come back": f"{spans['sleep of sleep after update']:.2f} + {spans['wake of wake for update']:.2f} s",
        "most memory, of all processes": f"{job['peak_bytes'] / 1e9:.1f} GB",
        "launch": f"{job['launch_s']:.0f} s",
    }
