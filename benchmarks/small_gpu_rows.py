"""The table of docs/small_gpu.md: jobs whose models take turns on one H200, of `results/small_gpu_h200.json`."""

import json
from collections.abc import Mapping
from typing import Any

from figures import RESULTS

JOBS = {"1.7B in full": "colocated", 'with `offload="never"`': "colocated_stay", "8B by an adapter of rank 32": "colocated_8b"}


def tables() -> dict[str, str]:
    """Write the table by its name."""
    parts = json.loads((RESULTS / "small_gpu_h200.json").read_text(encoding="utf-8"))["parts"]
    columns = [column(parts[part], parts["colocated_halves"]) for part in JOBS.values()]
    lines = [f"| on one H200 | {' | '.join(JOBS)} |", "|---" * (1 + len(JOBS)) + "|"]
    lines += [f"| {what} | {' | '.join(each[what] for each in columns)} |" for what in columns[0]]
    return {"in-turns": "\n".join(lines) + "\n"}


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
