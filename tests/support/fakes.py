"""A small training loop without a model: real nodes, channels, weights and dispatch around arithmetic on one vector.

What a batch holds depends on every weight version before it, so a wrong or a missing version changes all that follows.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from rlgraph.channels.weights.shards import WeightShard, unsharded_weights
from rlgraph.columns import Column, Columns
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Feedback, Model, Operation, Output, declare, feedback
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import ChunkedStage, Context, Fired, Stage, node
from rlgraph.nodes.prompts import prompts
from rlgraph.values.pool import Pool

ITEMS = [{"prompt": f"item {i}", "answer": str(i)} for i in range(12)]


class Vector:
    """An engine whose weights are one vector."""

    def __init__(self) -> None:
        self.vector = torch.arange(8, dtype=torch.float32)

    @cached_property
    def saver(self) -> Any:
        from rlgraph.engines.fsdp import distributed_checkpoint  # takes a process two seconds, and most save nothing

        return distributed_checkpoint.Saver(0, 1)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.vector.copy_(weights["vector"])

    def weight_shards(self) -> Iterator[WeightShard]:
        return unsharded_weights({"vector": self.vector})

    def save(self, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        return self.saver.save({"vector": self.vector}, folder, deadline_s)

    def load(self, folder: Path) -> None:
        from rlgraph.engines.fsdp import distributed_checkpoint

        distributed_checkpoint.read(folder, {"vector": self.vector})

    def close(self) -> None:
        pass


@dataclass(frozen=True, eq=False, kw_only=True)
class VectorModel(Model):
    """A model of one vector; `count` fixes its ranks, `dtype` is what a generator wants its weights in."""

    count: int | None = None
    dtype: str = "float32"

    @property
    def ranks(self) -> int | None:
        return self.count

    def load(self, context: Context) -> Any:
        return Vector()


@dataclass(frozen=True, eq=False, kw_only=True)
class VectorGenerator(VectorModel):
    role: ClassVar[str] = "generator"


@dataclass(frozen=True, eq=False, kw_only=True)
class VectorPolicy(VectorModel):
    role: ClassVar[str] = "policy"


@dataclass(frozen=True, eq=False, kw_only=True)
class VectorCritic(VectorModel):
    role: ClassVar[str] = "critic"


@dataclass(frozen=True)
class Generate(Operation):
    seconds: float
    chunks: int = 1
    begun: Callable[[int], None] | None = None  # told of each step that it begins

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="generate")

    def start(self, context: Context) -> Any:
        def part(ids: torch.Tensor) -> Fired:
            time.sleep(self.seconds / self.chunks)
            ids = ids[len(ids) * context.rank // context.world : len(ids) * (context.rank + 1) // context.world]
            mask = torch.ones(len(ids), 4, dtype=torch.bool)
            return {
                "values": context.engine.vector[ids % 8][:, None] + torch.zeros(len(ids), 4),
                "response_mask": mask,
                "weight_version": torch.full((len(ids), 4), context.version, dtype=torch.int32),
                "group_ids": ids.clone(),
            }

        def parts(step: int, columns: Columns) -> Iterator[Fired]:
            return (part(ids) for ids in columns["prompt_ids"].chunk(self.chunks))  # type: ignore[union-attr]

        def whole(step: int, columns: Columns) -> Fired:
            if self.begun is not None:
                self.begun(step)
            return part(columns["prompt_ids"])  # type: ignore[arg-type]

        return ChunkedStage(parts) if self.chunks > 1 else whole


@dataclass(frozen=True)
class Train(Operation):
    seconds: float

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="train")

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Fired:
            time.sleep(self.seconds)
            loss = (columns["values"].mean(-1) * columns["rewards"]).mean()  # type: ignore[union-attr]
            context.engine.vector.mul_(0.9).add_(loss)
            return {}, {"loss": loss.item(), "weight": context.engine.vector.sum().item()}

        return fire


@dataclass(frozen=True)
class TrainCritic(Operation):
    """What a critic learns goes nowhere, so nobody waits for it; `meanwhile` is called before it is done."""

    seconds: float
    meanwhile: Callable[[int], None] | None = None

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="train")

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Fired:
            time.sleep(self.seconds)
            if self.meanwhile is not None:
                self.meanwhile(step)
            return {}, {"critic/values": columns["values"].mean().item()}  # type: ignore[union-attr]

        return fire


@node(reads="values group_ids", writes="rewards", by_group=True)
def score(batch: Columns) -> tuple[dict[str, Column], dict[str, float]]:
    rewards = batch["values"].mean(-1) * 0.5 + batch["group_ids"].float() * 0.01  # type: ignore[union-attr]
    return {"rewards": rewards}, {"rewards/max": rewards.max().item(), "rewards/rows": float(len(rewards))}


@dataclass(frozen=True)
class Judge(Operation):
    """Gives the rewards of `score` on a model's devices."""

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="forward", by_group=True)

    def start(self, context: Context) -> Stage:
        return lambda step, columns: score.function(columns)


def score_on_pool(pool: Pool, rollout: Output) -> Output:
    """Return rewards that a model on a pool gives."""
    model = VectorCritic("vector", pool=pool)
    return Output(declare("judge", Judge(), (rollout,), reads=("values", "group_ids"), writes=("rewards",), model=model))


def vector_loop(
    depth: int,
    *,
    buffers: int = 1,
    latest: bool = False,
    generate_s: float = 0.0,
    train_s: float = 0.0,
    ranks: int | None = None,
    pools: tuple[Pool, Pool] | None = None,
    middle: Callable[..., Output] = score,
    count: int = 4,
    chunks: int = 1,
    begun: Callable[[int], None] | None = None,
    critic: TrainCritic | None = None,
    critic_pool: Pool | None = None,
) -> Graph:
    """Return the graph: prompts, rollout, a reward of the user's own, update, and weights back; and a critic's update, in the
    pool of training unless it has one of its own."""
    rollout_pool, train_pool = pools or (Pool("rollout"), Pool("train"))
    weights: Feedback = feedback("weights", depth=depth, buffers=buffers, latest=latest)
    source = prompts(ITEMS, count, seed=1)
    rollout = Output(
        declare(
            "rollout",
            Generate(generate_s, chunks, begun),
            (source,),
            reads=("prompt_ids",),
            writes=("values", "response_mask", "weight_version", "group_ids"),
            model=VectorGenerator("vector", pool=rollout_pool, count=ranks),
            feedback=weights,
            chunks=chunks,
        )
    )
    rewards = middle(rollout)
    policy = VectorPolicy("vector", pool=train_pool)
    reads = ("values", "response_mask", "weight_version", "rewards")
    update = declare("update", Train(train_s), (rollout, rewards), reads=reads, writes=(), model=policy)
    weights.close(Output(update, "weights"))
    outputs = [Output(update, "metrics")]
    if critic is not None:
        model = VectorCritic("vector", pool=critic_pool or train_pool)
        outputs.append(Output(declare("critic_update", critic, (rollout,), reads=("values",), writes=(), model=model), "metrics"))
    return Graph("vector", *outputs)
