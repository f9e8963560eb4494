"""Stages that wait as long as their cost says, over real nodes, channels, weights and dispatch: what predictions are held against.

Response lengths are drawn by (step, row), so they are the same however the rows are split.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from support.fakes import ITEMS, Vector

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.columns import Columns
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Operation, Output, declare, feedback
from rlgraph.graph.traits import ModelTraits, NodeTraits, Work
from rlgraph.nodes.base import Context, Fired, Stage
from rlgraph.nodes.prompts import prompts
from rlgraph.plan.lengths import Lengths
from rlgraph.values.pool import Pool

UNIFORM = Lengths((0.0, 1.0), (60.0, 120.0), prompt_tokens=8.0)
LONG_TAIL = Lengths((0.0, 0.5, 0.9, 0.98, 1.0), (20.0, 60.0, 120.0, 250.0, 400.0), prompt_tokens=8.0)
PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Turns:
    """How long an engine takes to wake and to sleep, and the bytes it then tells; `memory` is a file that is there while one is awake."""

    wake_s: float = 0.0
    sleep_s: float = 0.0
    bytes: int | None = None
    memory: str | None = None
    who: str = ""


class Part(Vector):
    """A vector of which each rank publishes its part."""

    def __init__(self, rank: int, world: int, turns: Turns) -> None:
        super().__init__()
        self.turns, self.rank = turns, rank
        self.mine = slice(len(self.vector) * rank // world, len(self.vector) * (rank + 1) // world)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard("vector", tuple(self.vector.shape), (self.mine.start,), self.vector[self.mine])

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self.turns.memory is not None:
            assert Path(self.turns.memory).read_text() == self.turns.who, "the device's memory is not this engine's"
        super().load_weights(weights)

    def save(self, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        return list if self.rank else super().save(folder, deadline_s)  # every rank holds the whole vector

    def wake(self) -> None:
        if self.turns.memory is not None:
            with Path(self.turns.memory).open("x") as file:  # raises where another engine is awake
                file.write(self.turns.who)
        time.sleep(self.turns.wake_s)

    def sleep(self) -> int | None:
        time.sleep(self.turns.sleep_s)
        if self.turns.memory is not None:
            Path(self.turns.memory).unlink()
        return self.turns.bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class Simulated(Model):
    """A model whose weights are a vector, of `count` ranks."""

    count: int = 1
    micro_batch_tokens: int | None = None

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(dtype=self.dtype, micro_batch_tokens=self.micro_batch_tokens)

    dtype: str = "float32"
    turns: Turns = Turns()

    @property
    def ranks(self) -> int:
        return self.count

    def load(self, context: Context) -> Any:
        return Part(context.rank, context.world, replace(self.turns, who=f"{self.role} {context.rank}"))


class SimulatedGenerator(Simulated):
    role: ClassVar[str] = "generator"


class SimulatedPolicy(Simulated):
    role: ClassVar[str] = "policy"


class SimulatedReference(Simulated):
    role: ClassVar[str] = "reference"


@dataclass(frozen=True)
class Times:
    """The costs: an engine's decode step `step_s + sequence_s · active`, and seconds a token of the batch for the rest."""

    step_s: float = 0.8e-3
    sequence_s: float = 0.03e-3
    start_s: float = 0.01
    train_token_s: float = 0.1e-3
    train_start_s: float = 0.02
    score_token_s: float = 0.03e-3
    reward_s: float = 0.01


@dataclass(frozen=True)
class Generate(Operation):
    """Waits as an engine would decode, and gives the batch whole, or in parts as each is done."""

    lengths: Lengths
    times: Times
    chunks: int = 1
    growth: float = 0.0

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="generate")

    def start(self, context: Context) -> Any:
        def parts(step: int, columns: Columns) -> Iterator[Fired]:
            ids = columns["prompt_ids"]
            assert isinstance(ids, torch.Tensor)
            rows = len(ids)
            drawn = np.random.default_rng([7, step]).random(rows)
            grown = (1 + self.growth * step) * np.array(self.lengths.tokens)
            every = np.ceil(np.interp(drawn, self.lengths.at, grown)).astype(int)
            mine = slice(rows * context.rank // context.world, rows * (context.rank + 1) // context.world)
            done_s, longest = 0.0, 0
            for part, part_ids in zip(np.array_split(every[mine], self.chunks), ids[mine].chunk(self.chunks), strict=True):
                longest = max(longest, int(part.max()))
                active = int(np.minimum(every[mine], longest).sum())
                at_s = self.times.start_s + self.times.step_s * longest + self.times.sequence_s * active
                time.sleep(at_s - done_s)
                done_s = at_s
                mask = torch.arange(int(part.max()))[None] < torch.tensor(part)[:, None]
                yield {
                    "prompt_mask": torch.ones(len(part), int(self.lengths.prompt_tokens), dtype=torch.bool),
                    "response_mask": mask,
                    "weight_version": torch.full(mask.shape, context.version, dtype=torch.int32),
                    "group_ids": part_ids.clone(),
                }

        return parts if self.chunks > 1 else lambda step, columns: next(parts(step, columns))


@dataclass(frozen=True)
class ByTokens(Operation):
    """Waits a time for each token of the batch, its devices sharing them."""

    start_s: float
    token_s: float
    column: str | None = None
    work: Work = "train"

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work=self.work, by_group=self.work == "forward")

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Fired:
            tokens = int(columns["response_mask"].sum() + columns["prompt_mask"].sum())  # type: ignore[union-attr]
            time.sleep(self.start_s + self.token_s * tokens / context.world)
            if self.column is None:
                return {}, {"tokens": float(tokens)}
            return {self.column: torch.zeros(len(columns["response_mask"]), 1)}

        return fire


@dataclass(frozen=True)
class Reward(Operation):
    seconds: float  # of a whole batch of `rows`
    rows: int
    by_group: bool = True

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(by_group=self.by_group)

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Fired:
            time.sleep(self.seconds * len(columns["group_ids"]) / self.rows)
            return {"rewards": torch.zeros(len(columns["group_ids"]))}

        return fire


@dataclass(frozen=True)
class Loop:
    """A training loop of waiting stages. Devices are cores, or GPUs, of a pretended cluster, one rank each."""

    depth: int = 1
    buffers: int = 1
    rows: int = 16
    generators: int = 1
    trainers: int = 1
    rollout_share: int | None = None  # of the devices, where it is not a device for each engine
    chunks: int = 1
    shared: bool = False  # one pool for all
    micro_batch_tokens: int | None = None  # on GPUs, where a batch is cut into passes
    reference: str | None = None  # the pool of a reference pass: "train", "rollout", or one of its own
    lengths: Lengths = UNIFORM
    growth: float = 0.0  # of the lengths with each step, as a part of the first ones
    times: Times = field(default_factory=Times)
    turns: Mapping[str, Turns] = field(default_factory=dict)  # of "generator", "policy", "reference"

    @property
    def devices(self) -> int:
        if self.shared:
            return max(self.generators, self.trainers)
        return self.generators + self.trainers + (1 if self.reference == "own" else 0)

    def graph(self) -> Graph:
        together = Pool("shared")
        pools = {
            "rollout": together if self.shared else Pool("rollout", share=self.rollout_share or self.generators),
            "train": together if self.shared else Pool("train", share=self.trainers),
            "own": Pool("score"),
        }
        weights = feedback("weights", depth=self.depth, buffers=self.buffers)
        source = prompts(ITEMS, self.rows, seed=1)
        sampled = ("prompt_mask", "response_mask", "weight_version", "group_ids")
        turns = {role: self.turns.get(role, Turns()) for role in ("generator", "policy", "reference")}
        generator = SimulatedGenerator("vector", pool=pools["rollout"], count=self.generators, turns=turns["generator"])
        operation = Generate(self.lengths, self.times, self.chunks, self.growth)
        rollout = Output(
            declare(
                "rollout",
                operation,
                (source,),
                reads=("prompt_ids",),
                writes=sampled,
                model=generator,
                feedback=weights,
                chunks=self.chunks,
            )
        )
        rewards = Output(declare("reward", Reward(self.times.reward_s, self.rows), (rollout,), reads=("group_ids",), writes=("rewards",)))
        inputs, reads = [rollout, rewards], ["prompt_mask", "response_mask", "weight_version", "rewards"]
        if self.reference is not None:
            model = SimulatedReference("vector", pool=pools[self.reference], turns=turns["reference"])
            score = ByTokens(0.0, self.times.score_token_s, "ref_log_probs", "forward")
            tokens = ("prompt_mask", "response_mask")
            inputs.append(Output(declare("ref_log_probs", score, (rollout,), reads=tokens, writes=("ref_log_probs",), model=model)))
            reads.append("ref_log_probs")
        limit = self.micro_batch_tokens
        policy = SimulatedPolicy("vector", pool=pools["train"], count=self.trainers, micro_batch_tokens=limit, turns=turns["policy"])
        train = ByTokens(self.times.train_start_s, self.times.train_token_s)
        update = declare("update", train, inputs, reads=tuple(reads), writes=(), model=policy)
        weights.close(Output(update, "weights"))
        return Graph("simulated", Output(update, "metrics"))
