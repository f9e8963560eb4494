"""Runs of the tiny model whose metrics hold digests: two runs share them only if every bit of batch and weights is the same."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from support import forked_workers
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.columns import Column, Columns
from rlgraph.runtime.measure import Step

ITEMS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 5)]


def digest(tensors: Iterable[Any]) -> float:
    """Return a number that two runs share only if every bit is the same."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return float(int.from_bytes(hashed.digest()[:6], "big"))


def with_digests(engine: Any, name: str) -> Any:
    """Return the engine with a digest of its weights among the metrics of each update."""
    apply = engine.apply_gradients

    def apply_and_digest(metrics: Mapping[str, float], **settings: Any) -> dict[str, float]:
        found: dict[str, float] = apply(metrics, **settings)
        return {**found, name: digest(engine.weights().values())}

    engine.apply_gradients = apply_and_digest
    return engine


class DigestPolicy(rg.Policy):
    """A policy that adds a digest of its weights to the metrics of each update."""

    def load(self, context: Any) -> Any:
        return with_digests(super().load(context), "digest/weights")


class DigestCritic(rg.Critic):
    """A critic that adds a digest of its weights to the metrics of each update."""

    def load(self, context: Any) -> Any:
        return with_digests(super().load(context), "digest/critic")


@rg.node(reads="responses rollout_log_probs response_mask", writes="rewards")
def odd_tokens(batch: Columns) -> tuple[dict[str, Column], dict[str, float]]:
    """Reward the share of odd tokens, which a random model can learn; digest the batch on the way."""
    responses, mask = batch["responses"], batch["response_mask"]
    assert isinstance(responses, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    odd = ((responses % 2 == 1) & mask).sum(-1) / mask.sum(-1).clamp(min=1)
    digests = {"digest/batch": digest(batch[c] for c in sorted(batch)), "digest/tokens": digest([responses, mask])}
    return {"rewards": odd.float()}, {**digests, "odd": odd.mean().item()}


def digest_loop(
    model: Path | str,
    engine: Any = "transformers",
    *,
    ranks: int | None = None,
    max_tokens: int = 6,
    depth: int = 1,
    buffers: int = 1,
    old_log_probs: bool = False,
    rewards: Any = odd_tokens,
    **given: Any,
) -> rg.Graph:
    """Train the model with digests of batches and weights, on `ranks`; `given` are settings of the generator."""
    settings = {"dtype": "float32"} | ({"max_context": 64} if engine == "vllm" else {}) | given
    sampling, loss = rg.Sampling(max_tokens=max_tokens, temperature=0.9), rg.ClippedLoss(clip_high=0.28)
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine=engine, sampling=sampling, **settings)
    policy = DigestPolicy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32", data_parallel=ranks)
    edge = {"depth": depth, "buffers": buffers, "old_log_probs": old_log_probs}
    return grpo_graph(generator, policy, ITEMS, name="tiny", rewards=rewards, seed=3, group_size=4, loss=loss, **edge)


def plan(graph: rg.Graph) -> rg.Plan:
    return rg.compile(graph, rg.Cluster(cpus=2))


def clockless_metrics(step: Step) -> dict[str, float]:
    """Return the metrics that do not depend on the clock."""
    return {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}


def run_on_ray(graph: rg.Graph, steps: int) -> list[dict[str, float]]:
    with plan(graph).launch() as job:
        return [clockless_metrics(step) for step in job.steps(steps)]


def run_in_workers(graph: rg.Graph, steps: int) -> list[dict[str, float]]:
    with forked_workers.job(graph) as job:
        return [clockless_metrics(step) for step in job.steps(steps)]


def run_here(graph: rg.Graph, steps: int) -> list[dict[str, float]]:
    with plan(graph).run_here() as job:
        return [clockless_metrics(step) for step in job.steps(steps)]
