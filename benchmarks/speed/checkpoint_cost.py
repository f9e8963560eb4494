"""The cost of checkpoints to a trainer: SmolLM2-135M, an update of 64 short responses a step, a checkpoint every 10 steps.

    python benchmarks/speed/checkpoint_cost.py [--steps 32] [--json PATH]

The batches are made up and cost nothing, so that the trainer is never idle: the worst case. Two figures: how long the update waits
for the copy of weights and moments, and how much slower the steps are during which the copy is written beside them.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rlgraph as rg
from rlgraph.graph.nodes import Operation, Output, declare
from rlgraph.nodes.base import Context, Stage

EVERY, ROWS, PROMPT, RESPONSE = 10, 64, 22, 8
WRITES = ("prompts", "prompt_mask", "responses", "response_mask", "rollout_log_probs", "weight_version", "advantages")


@dataclass(frozen=True)
class MadeUp(Operation):
    """The same batch at every step."""

    def start(self, context: Context) -> Stage:
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, 49_000, (ROWS, PROMPT + RESPONSE), generator=draw)

        def fire(step: int, columns: Any) -> Any:
            return {
                "prompts": tokens[:, :PROMPT],
                "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.bool),
                "responses": tokens[:, PROMPT:],
                "response_mask": torch.ones(ROWS, RESPONSE, dtype=torch.bool),
                "rollout_log_probs": torch.full((ROWS, RESPONSE), -10.0),
                "weight_version": torch.full((ROWS, RESPONSE), step, dtype=torch.int32),
                "advantages": torch.linspace(-1, 1, ROWS)[:, None].expand(ROWS, RESPONSE).contiguous(),
            }

        return fire


def graph() -> rg.Graph:
    policy = rg.Policy(rg.model_folder("smollm2"), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-6))
    batch = Output(declare("batch", MadeUp(), (), reads=(), writes=WRITES, rows=ROWS))
    return rg.Graph("cost", policy.update(batch, loss=rg.ClippedLoss()).metrics)


def run(steps: int, folder: Path) -> tuple[list[float], list[float]]:
    """Measure the seconds of each step, and the seconds that its update waited for a copy."""
    seconds, stalls = [], []
    with rg.compile(graph(), rg.local_cluster()).launch(checkpoint=folder, every=EVERY) as job:
        for step in job.steps(steps):
            seconds.append(step.seconds)
            stalls.append(step.metrics.get("timing_s/save_checkpoint", 0.0))
            print(f"step {step.index}: {step.seconds:.2f} s, waited {stalls[-1]:.2f} s", flush=True)
    return seconds, stalls


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=32, help="one more than a multiple of 10, and one to warm up")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-cost-"))
    try:
        seconds, stalls = run(given.steps, folder)
        size = sum(path.stat().st_size for path in max(folder.glob("step-*")).rglob("*"))
    finally:
        shutil.rmtree(folder)
    # The first checkpoint also takes the memory of its copy for the first time; from then on the memory is there.
    periods = [seconds[start : start + EVERY] for start in range(EVERY - 1, len(seconds) - EVERY + 1, EVERY)]
    plain = statistics.median(second for period in periods for second in period[EVERY // 2 :])  # nothing is written any more
    figures = {
        "seconds of a step without a checkpoint (median)": plain,
        "seconds that an update waited for its copy": [stall for stall in stalls if stall],
        "training stalled, share of ten steps (median)": statistics.median(stall for stall in stalls if stall) / (EVERY * plain),
        "ten steps with a checkpoint over ten without": [sum(period) / (EVERY * plain) for period in periods],
        "bytes of a checkpoint": size,
        "cores": os.cpu_count(),
        "load average": os.getloadavg(),
    }
    print(json.dumps(figures, indent=1))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
