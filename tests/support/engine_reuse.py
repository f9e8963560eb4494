"""Jobs with an engine that `rg.warm(engines=True)` keeps, and what tests ask of it."""

import time
from pathlib import Path

from support import forked_workers
from support.digests import ITEMS, DigestPolicy, clockless_metrics, odd_tokens
from support.renewable_engine import ENGINE

import rlgraph as rg

GONE_S = 30.0
Found = tuple[list[dict[str, float]], int]  # the metrics of a job's steps, and the process of its engine


def grpo(
    model: Path, engine: object = ENGINE, *, depth: int = 1, max_tokens: int = 6, reward: object = odd_tokens, **more: object
) -> rg.Graph:
    settings = {"dtype": "float32"} | ({"max_context": 64} if engine == "vllm" else {}) | more
    sampling = rg.Sampling(max_tokens=max_tokens, temperature=0.9)
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine=engine, sampling=sampling, **settings)
    policy = DigestPolicy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights = rg.feedback("weights", depth=depth)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4)
    advantages = rg.advantages(rollout, reward(rollout), estimator=rg.GRPO())  # type: ignore[operator]
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("tiny", step.metrics)


def run_job(graph: rg.Graph, steps: int = 3, **options: object) -> Found:
    with rg.compile(graph, rg.Cluster(cpus=2)).launch(**options) as job:  # type: ignore[arg-type]
        return [clockless_metrics(step) for step in job.steps(steps)], job.pids["generator"]


def wait_until_gone(pid: int) -> bool:
    end = time.monotonic() + GONE_S
    while forked_workers.alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not forked_workers.alive(pid)
