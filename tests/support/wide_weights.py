"""A loop whose weights are large: two trainer ranks with half of them each, and four generators that compare every bit they load.

Version v is known to all: numbers drawn with the seed v. A trainer's metric `same` counts the rows of generators whose weights were those.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from support import fakes

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.columns import Columns
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Operation, Output, declare, feedback
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage
from rlgraph.nodes.prompts import prompts
from rlgraph.values.pool import Pool

PARAMETERS, GENERATORS, TRAINERS = 4, 4, 2


def draw_weights(version: int, mib: int) -> dict[str, torch.Tensor]:
    """The weights of a version: `mib` MiB in all."""
    dice = torch.Generator().manual_seed(version)
    shape = (TRAINERS * 64, mib * (1 << 18) // PARAMETERS // (TRAINERS * 64))
    return {f"w{i}": torch.randint(-(1 << 20), 1 << 20, shape, generator=dice, dtype=torch.int32).float() for i in range(PARAMETERS)}


class Wide(fakes.Vector):
    """An engine of one rank."""

    def __init__(self, context: Context, mib: int) -> None:
        self.rank, self.mib, self.same, self.weights = context.rank, mib, True, draw_weights(0, mib)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = {name: weight.clone() for name, weight in weights.items()}

    def weight_shards(self) -> Iterator[WeightShard]:
        for name, weight in self.weights.items():
            rows = len(weight) // TRAINERS
            yield WeightShard(name, tuple(weight.shape), (self.rank * rows, 0), weight[self.rank * rows : (self.rank + 1) * rows])


@dataclass(frozen=True, eq=False, kw_only=True)
class WideGenerator(fakes.VectorGenerator):
    mib: int = 1

    def load(self, context: Context) -> Any:
        return Wide(context, self.mib)


@dataclass(frozen=True, eq=False, kw_only=True)
class WidePolicy(fakes.VectorPolicy):
    mib: int = 1

    def load(self, context: Context) -> Any:
        return Wide(context, self.mib)


@dataclass(frozen=True)
class Compare(Operation):
    mib: int

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="generate")

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Fired:
            expected = draw_weights(context.version, self.mib)
            same = all(torch.equal(context.engine.weights[name], weight) for name, weight in expected.items())
            ids = columns["prompt_ids"][context.rank :: context.world]
            return {
                "values": torch.full((len(ids), 1), float(same)),
                "response_mask": torch.ones(len(ids), 1, dtype=torch.bool),
                "weight_version": torch.full((len(ids), 1), context.version, dtype=torch.int32),
                "group_ids": ids.clone(),  # type: ignore[union-attr]
            }

        return fire


@dataclass(frozen=True)
class Redraw(Operation):
    mib: int

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="train")

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Fired:
            context.engine.weights = draw_weights(step + 1, self.mib)
            values, versions = columns["values"], columns["weight_version"]
            return {}, {"same": values.sum().item(), "version": versions.float().mean().item()}  # type: ignore[union-attr]

        return fire


def graph(mib: int, buffers: int = 1) -> Graph:
    """Make the graph, with weights of `mib` MiB."""
    weights = feedback("weights", depth=1, buffers=buffers)
    source = prompts(fakes.ITEMS, GENERATORS, seed=1)
    generator = WideGenerator("wide", pool=Pool("rollout", share=2.0), count=GENERATORS, mib=mib)
    writes = ("values", "response_mask", "weight_version", "group_ids")
    rollout = declare("rollout", Compare(mib), (source,), reads=("prompt_ids",), writes=writes, model=generator, feedback=weights)
    policy = WidePolicy("wide", pool=Pool("train"), count=TRAINERS, mib=mib)
    reads = ("values", "response_mask", "weight_version")
    update = declare("update", Redraw(mib), (Output(rollout),), reads=reads, writes=(), model=policy)
    weights.close(Output(update, "weights"))
    return Graph("wide", Output(update, "metrics"))
