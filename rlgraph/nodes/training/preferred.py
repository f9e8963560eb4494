"""Preference pairs out of a rollout: of each group the responses of the highest and of the lowest reward."""

from dataclasses import dataclass

import torch

from rlgraph.columns import Column, Columns
from rlgraph.engines.api import Sampling
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Output, declare
from rlgraph.graph.operation import NodeTraits, Operation
from rlgraph.graph.rules import SAMPLED
from rlgraph.nodes.base import Context, Fired, Stage, carried, tensor_of
from rlgraph.nodes.training.trained_model import TOKENS
from rlgraph.settings import AtLeastZero, Name, checked

CARRIED = ("weight_version", "finish_reasons", SAMPLED, "ref_log_probs", "data_sources")


@dataclass(frozen=True, eq=False)
class Preferred(Operation):
    """Choose two rows of each group, and copy their columns."""

    columns: tuple[str, ...]
    group_size: int
    gap: float
    sampling: Sampling | None

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(given=(), sampling=self.sampling, preferences="pairs")

    def start(self, context: Context) -> Stage:
        return lambda step, columns: self.choose(columns)

    def choose(self, columns: Columns) -> Fired:
        """Choose the first best and the first worst response of each group; equal ones get the preference 0."""
        rewards = tensor_of(columns, "rewards").reshape(-1, self.group_size)
        first = torch.arange(len(rewards)) * self.group_size
        best, worst = rewards.argmax(-1), rewards.argmin(-1)
        apart = rewards.amax(-1) - rewards.amin(-1)
        differ = apart > self.gap
        rows = torch.stack([first + best, first + torch.where(best == worst, (best + 1) % self.group_size, worst)], -1).flatten()
        made: dict[str, Column] = {name: _pick(columns[name], rows) for name in self.columns}
        made["preferences"] = torch.stack([differ.float(), -differ.float()], -1).flatten()
        made["margins"] = apart.repeat_interleave(2)
        return made, {"preferred/share": differ.float().mean().item(), "preferred/gap": apart.mean().item()}


def _pick(column: Column, rows: torch.Tensor) -> Column:
    return column[rows] if isinstance(column, torch.Tensor) else [column[row] for row in rows.tolist()]


@checked()
def preferred(*inputs: Output, gap: AtLeastZero = 0.0, name: Name = "preferred") -> Output:
    """Declare preference pairs out of a rollout and its rewards: of each group the best response and the worst.

    >>> import rlgraph as rg
    >>> prompts = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts, group_size=8)
    >>> rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], rollout)
    >>> rg.preferred(rollout, rewards).node.rows  # for policy.update(pairs, reference.log_probs(pairs), loss=rg.DPO())
    8

    A pair is two rows, the chosen one first, with `preferences` 1 and -1, or 0 where the rewards differ by at most `gap`: the loss
    leaves these out. `margins` is the difference of the rewards. Metrics: `preferred/share` of the groups that give a pair, and
    `preferred/gap`, the mean difference. Raises GraphError for inputs without the rewards of a rollout, and groups of one.
    """
    given = carried(inputs)
    sources = [o.node.traits for o in inputs if isinstance(o, Output) and (o.node.traits.group_size or 1) > 1]
    if not sources:
        raise GraphError(f"node '{name}' needs a rollout with a group_size of 2 or more among its inputs, to take the best and the worst")
    whole = all(source.sampling is None or source.sampling.whole for source in sources)
    passed = (column for column in CARRIED if column in given and (whole or column != SAMPLED))
    kept, size = (*TOKENS, *passed), sources[0].group_size or 1
    operation = Preferred(kept, size, gap, sources[0].sampling)
    rows = 2 * (max(o.node.rows for o in inputs) // size)
    return Output(declare(name, operation, inputs, reads=(*kept, "rewards"), writes=(*kept, "preferences", "margins"), rows=rows))
