"""A teacher that scores while its student trains: on a pool of its own and on the student's pool, each predicted and then measured.

    python benchmarks/speed/teacher_overlap.py [--json PATH] [--student MODEL] [--teacher MODEL] [--scored-by fsdp] [--smoke | --waiting]

On-policy distillation on two devices, two GPUs or two cores. With a pool of its own the teacher scores batch k + 1 on one device while the
student, one step off, trains on batch k on the other. On the student's pool rollout, teacher and update take turns on both devices. Each
placement is profiled for a few steps, which predict its step; then it runs from the beginning, and its step is the median after the
warm-up. `overlap` is the share of the teacher's seconds in which the student generates or trains, as played and as measured.

A MODEL is a folder, smollm2, tiny, or a shape of Qwen3 with random weights, as 0.6B. All responses have `--tokens` tokens. `--smoke` runs
two steps of a tiny model. With `--waiting` rollout, teacher and update wait instead of computing, so that other programs on the machine
do not slow them down; everything else is as in the other runs.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from support import fakes

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from benchmarks.lib.machine import machine
from benchmarks.lib.shapes import SHAPES, random_model
from rlgraph.columns import Columns
from rlgraph.graph.nodes import declare
from rlgraph.nodes.base import Context, Stage
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import Span

QUESTIONS = [{"prompt": f"What is {a} times {a + 1}? Think step by step, and then"} for a in range(512)]
WARM_UP = 2
SCORED = "teacher_top_log_probs"
ON_GPUS = {"student": "0.6B", "teacher": "8B", "engine": "vllm", "prompts": 128, "tokens": 512, "steps": 8, "profiled": 3}
ON_CORES = {"student": "smollm2", "teacher": "smollm2", "engine": "transformers", "prompts": 8, "tokens": 16, "steps": 10, "profiled": 3}
SMOKE = {"student": "tiny", "teacher": "tiny", "engine": "transformers", "prompts": 2, "tokens": 4, "steps": 2, "profiled": 1}
WAITING = {"steps": 12, "profiled": 3}
SECONDS = {"rollout": 0.6, "teacher": 0.4, "update": 0.5}  # of nodes that wait


def folder(model: str) -> str:
    return random_model(model, ".models") if model in SHAPES else rg.model_folder(model)


@dataclass(frozen=True)
class Wait(fakes.Judge):
    """A teacher that waits."""

    def start(self, context: Context) -> Stage:
        score = super().start(context)

        def fire(step: int, columns: Columns) -> Any:
            time.sleep(SECONDS["teacher"])
            return score(step, columns)

        return fire


def waiting(own: bool) -> rg.Graph:
    """The same nodes on the same pools, which wait."""
    pool = rg.Pool("student", share=1)
    teacher = fakes.VectorCritic("vector", pool=rg.Pool("teacher", share=1) if own else pool)

    def scored(rollout: rg.Output) -> rg.Output:
        return rg.Output(declare(SCORED, Wait(), (rollout,), reads=("values", "group_ids"), writes=("rewards",), model=teacher))

    return fakes.vector_loop(int(own), pools=(pool, pool), generate_s=SECONDS["rollout"], train_s=SECONDS["update"], middle=scored)


def graph(given: argparse.Namespace, own: bool) -> rg.Graph:
    """Distillation with the teacher on a pool of its own, or on the student's."""
    if given.waiting:
        return waiting(own)
    path, pool = folder(given.student), rg.Pool("student", share=1)
    sampling = rg.Sampling(max_tokens=given.tokens, ignore_eos=True)
    generator = rg.Generator(path, pool=pool, sampling=sampling, engine=given.engine, max_context=given.tokens + 128)
    policy = rg.Policy(path, pool=pool, optimizer=rg.AdamW(lr=1e-6))
    teacher = rg.Teacher(folder(given.teacher), pool=rg.Pool("teacher", share=1) if own else pool, trainer=given.scored_by)
    weights = rg.feedback("weights", depth=int(own))
    rollout = generator.rollout(rg.prompts(QUESTIONS, count=given.prompts), weights)
    scored = teacher.top_log_probs(rollout, top_k=given.top_k, name=SCORED)
    step = policy.update(rollout, scored, loss=rg.losses.DistillationLoss(divergence="reverse_kl"))
    weights.close(step.weights)
    return rg.Graph("distillation", step.metrics)


def overlap(spans: Sequence[Span], steps: int) -> float:
    """Compute the share of the teacher's seconds in which the student is at work; first steps warm up, and the last has no next one.

    >>> spans = [Span("rollout", "fire", 3, "g", 0, 2), Span(SCORED, "fire", 2, "t", 1, 3), Span("update", "fire", 2, "p", 3, 4)]
    >>> overlap(spans, 4)
    0.5
    """
    fired = [span for span in spans if span.kind == "fire"]
    taught = [span for span in fired if span.name == SCORED and min(WARM_UP, steps - 1) <= span.step < steps - 1]
    student = [span for span in fired if span.name in ("rollout", "update")]
    together = sum(max(min(a.end_s, b.end_s) - max(a.start_s, b.start_s), 0.0) for a in taught for b in student)
    return together / max(sum(span.end_s - span.start_s for span in taught), 1e-9)


def measured(given: argparse.Namespace, own: bool) -> dict[str, Any]:
    """Predict the step of a placement from a profile, then run it and measure its step."""
    cluster, made, before, place = rg.local_cluster(), graph(given, own), os.getloadavg()[0], "own pool" if own else "student's pool"
    plan = rg.compile(made, cluster, rg.planning.profile(made, cluster, given.profiled))
    predicted_s = plan.prediction.step_s
    print(f"{place}: a step is predicted to take {predicted_s:.2f} s", flush=True)
    with plan.launch() as job:
        seconds = [step.seconds for step in job.steps(given.steps)]
        fitted, spans = rg.compile(made, cluster, job.costs()), job.spans()
    found = {
        "predicted_s": predicted_s,
        "measured_s": statistics.median(seconds[min(WARM_UP, len(seconds) - 1) :]),
        "fitted_s": fitted.prediction.step_s,
        "predicted_overlap": overlap(simulate(plan.schedule, given.steps), given.steps),
        "overlap": overlap(spans, given.steps),
        "nodes_s": {name: fitted.node(name).seconds for name in ("rollout", SCORED, "update")},
        "steps_s": seconds,
        "load": [before, os.getloadavg()[0]],
    }
    print(f"{place}: measured {found['measured_s']:.2f} s; overlap {found['overlap']:.2f}, predicted {found['predicted_overlap']:.2f}")
    return found


def main() -> None:
    arguments = command_line(__doc__, smoke="two steps of a tiny model")
    arguments.add_argument("--scored-by", default="vllm", help="what runs the teacher: the engine vllm, or the trainer fsdp")
    arguments.add_argument("--top-k", type=int, default=64, help="tokens a position")
    arguments.add_argument("--waiting", action="store_true", help="nodes that wait instead of computing")
    for name, value in ON_GPUS.items():
        arguments.add_argument(f"--{name}", type=type(value))
    given = arguments.parse_args()
    defaults = WAITING if given.waiting else SMOKE if given.smoke else ON_GPUS if torch.cuda.is_available() else ON_CORES
    for name, value in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    figures: dict[str, Any] = {
        "machine": machine(),
        "settings": {key: value for key, value in vars(given).items() if key not in ("json", "smoke")},
    }
    for name, own in (("own_pool", True), ("students_pool", False)):
        figures[name] = measured(given, own)
    figures["ratio"] = figures["own_pool"]["measured_s"] / figures["students_pool"]["measured_s"]
    figures["predicted_ratio"] = figures["own_pool"]["predicted_s"] / figures["students_pool"]["predicted_s"]
    print(f"the step on a pool of its own is {figures['ratio']:.3f} of the other one, predicted {figures['predicted_ratio']:.3f}")
    write(given.json, figures)


if __name__ == "__main__":
    main()
