"""A run without workers: a plan's schedule, played with times that vary, its waits and metrics as a real run records them."""

import math
import random
from dataclasses import replace
from itertools import pairwise

from rlgraph.analysis.run import Run
from rlgraph.plan.plan import Plan
from rlgraph.plan.play import Played, play
from rlgraph.plan.schedule import Event, Span

LAUNCH_S = -4.0


def simulate_run(plan: Plan, steps: int, *, scale: float = 1.0, tail: float = 2.0, priced: Plan | None = None, jitter: float = 0.05) -> Run:
    """Simulate a run whose nodes take `scale` times their seconds, with jitter; `tail` is the longest over the mean response."""
    draw = random.Random(3)
    times = {(e.name, k): e.seconds * scale * draw.uniform(1 - jitter, 1 + jitter) for k in range(steps) for e in plan.schedule.events}
    found = play(plan.schedule, steps, lambda event, step: times[event.name, step])
    spans = [span for event in found.order for rank in plan.node(event.node).workers for span in _spans(event, rank, found, plan, steps)]
    ends = found.step_ends()
    taken = [ends[0], *(b - a for a, b in pairwise(ends))]
    metrics = tuple(_metrics(plan, step, taken[step], tail, draw) for step in range(steps))
    settings = {"generator of rollout": {"path": "some/model", "engine": "vllm"}, "node <odd> & name": {"value": "<1> & 'quoted'"}}
    return Run(plan, metrics, tuple(spans), LAUNCH_S, ends[-1], priced, settings)


def _spans(event: Event, worker: str, found: Played, plan: Plan, steps: int) -> list[Span]:
    """List the firings of an event with the wait before each, from the time its worker was free."""
    spans = []
    for step in range(steps):
        start, end, held = found.starts[event.name][step], found.worked[event.name][step], found.held[event.name][step]
        if end > start:
            spans.append(Span(event.name, event.kind, step, worker, start, end, step if event.kind == "load" else None))
        if held is not None:
            spans.append(Span(held.via, "room", step, worker, end, found.ends[event.name][step]))
        cause = found.causes[event.name][step]
        if cause is None or event.kind == "receive" or cause.reason in ("order", "self"):
            continue
        earlier = [d for d in plan.schedule.dependencies if d.after == event.name and d.reason in ("order", "self") and step >= d.credits]
        free = max((found.ends[d.before][step - d.credits] for d in earlier), default=0.0)
        if start > free:
            spans.append(Span(cause.via, "wait", step, worker, free, start))
    return spans


def _metrics(plan: Plan, step: int, seconds: float, tail: float, draw: random.Random) -> dict[str, float]:
    mean = 180 + 40 * math.tanh(step / 50) + draw.uniform(-9, 9)
    depth = max((loop.depth for loop in plan.loops), default=0)
    return {
        "training/global_step": float(step),
        "timing_s/step": seconds,
        "timing_s/wait_prev_gen": seconds * 0.2,
        "critic/rewards/mean": 0.2 + 0.7 * math.tanh(step / 40) + draw.uniform(-0.05, 0.05),
        "staleness/max": float(min(step, depth)),
        "staleness/mean": float(min(step, depth)) * 0.9,
        "response_length/mean": mean,
        "response_length/max": mean * tail,
        "actor/pg_loss": draw.gauss(0, 0.02) if step != 5 else math.nan,
        "actor/ppo_kl": abs(draw.gauss(0, 0.002)),
        "actor/pg_clipfrac": 0.02,
        "actor/entropy": 1.2 - 0.5 * math.tanh(step / 60),
        "actor/grad_norm": 0.4 + draw.uniform(0, 0.2),
        "rollout_corr/k3_kl": 0.001 + draw.uniform(0, 0.0005),
        "rollout_corr/kl": 0.001 + draw.uniform(0, 0.0005),
    }


def scale_times(plan: Plan, scale: float) -> Plan:
    """Scale every time of a plan, as compiling with measured costs would."""
    events = tuple(replace(event, seconds=event.seconds * scale) for event in plan.schedule.events)
    nodes = tuple(replace(node, seconds=node.seconds * scale, cost="measured") for node in plan.nodes)
    told = replace(plan.prediction, step_s=plan.prediction.step_s * scale, period_s=plan.prediction.period_s * scale, cost="measured")
    return replace(plan, schedule=replace(plan.schedule, events=events), nodes=nodes, prediction=told)
