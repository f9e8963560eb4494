"""Dynamic sampling: a rollout that keeps the groups whose rewards differ, and draws other prompts in place of the rest.

A batch holds the first groups of the data order whose rewards differ, however long each takes to decode. A constant group gives its
place to the next prompt at once, and a prompt starts only when the batch needs it, so no prompt is lost and none is trained twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch

from rlgraph import settings
from rlgraph.columns import Column, Columns, rows_of_rank
from rlgraph.deprecation import renamed
from rlgraph.engines.api import Request, Response
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Feedback, Node, Output, declare
from rlgraph.graph.operation import NodeTraits, Operation
from rlgraph.nodes.base import Context, Fired, Stage
from rlgraph.nodes.prompts import Prompts
from rlgraph.nodes.rewards.calls import Calls
from rlgraph.nodes.rewards.retry import Retry
from rlgraph.nodes.rewards.reward import DEADLINE_S, Concurrency, RewardColumn, RewardFunction, check_column
from rlgraph.nodes.rewards.scoring import Scoring, scoring
from rlgraph.nodes.rollout.responses import WRITES, columns_of, seed_of
from rlgraph.nodes.rollout.rollout import Rollout
from rlgraph.setting_types import Range
from rlgraph.settings import Seconds


@renamed(at_once="concurrency")
@dataclass(frozen=True, kw_only=True)
class Refill:
    """Replace groups whose responses all have the same reward, since they teach nothing: DAPO's dynamic sampling.

    >>> import rlgraph as rg
    >>> prompts, generator = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], 1), rg.Generator("tiny", pool=rg.Pool("rollout"))
    >>> refill = rg.Refill(reward=lambda response, answer: float(answer in response))
    >>> generator.rollout(prompts, group_size=4, refill=refill).columns[-3:]
    ('prompt_texts', 'answers', 'rewards')

    `reward` is a function as for `rg.reward`. The generator's process calls it as soon as a group is complete; decoding waits for it.
    The rewards become the column `writes` of the rollout. A step draws at most `rounds` times the prompts that it trains on. If too
    few groups differ by then, the earliest constant groups fill the batch, and `dynamic_sampling/unfilled_groups` counts them.

    Metrics: `dynamic_sampling/prompts` counts the drawn prompts, `.../filtered_groups` the groups left out. `critic/rewards/drawn_mean`
    is the mean reward of all samples; `critic/rewards/mean` is that of the trained ones. Source: Yu et al., 2025, 2503.14476.
    """

    reward: RewardFunction
    writes: RewardColumn = "rewards"
    rounds: Annotated[int, Range(least=2, rule="how many times its prompts a step draws at most, a whole number of at least 2")] = 10
    concurrency: Concurrency | None = None
    deadline_s: Seconds = DEADLINE_S
    retries: Retry | None = None

    def __post_init__(self) -> None:
        settings.check(self)

    def declare(self, name: str, rollout: Rollout, prompts: Output, weights: Feedback | None) -> Output:
        """Declare the rollout that draws its own prompts.

        Raises GraphError for options that exclude a refill, and for a reward that reads a column that is not there.
        """
        where = f"node '{name}'"
        source = prompts.node.operation
        if not isinstance(source, Prompts):
            raise GraphError(f"{where} draws from the data order, but its prompts are of another node; pass the output of rg.prompts(...)")
        self._check(where, name, rollout)
        own = tuple(column for column in prompts.columns if column != "prompt_ids")
        carried = (*WRITES, *own)
        scored = scoring(where, self.reward, carried, rollout.generator.path, Calls(self.concurrency, self.deadline_s, self.retries))
        missing = [column for column in scored.reads if column not in carried]
        if missing:
            raise GraphError(f"{where}: the reward reads column '{missing[0]}', which neither responses nor prompts have: {list(carried)}")
        if self.writes in carried:
            raise GraphError(f"{where} has Refill(writes='{self.writes}'), a column that it has already; name another for the rewards")
        operation = DynamicRollout(rollout, source, scored, self.writes, self.rounds)
        rows, writes = prompts.node.rows * rollout.group_size, (*carried, self.writes)
        return Output(declare(name, operation, (), reads=(), writes=writes, rows=rows, model=rollout.generator, feedback=weights))

    def _check(self, where: str, name: str, rollout: Rollout) -> None:
        if rollout.group_size < 2:
            raise GraphError(f"{where} has refill= and group_size=1, and a group of one is never constant; use larger groups, or no refill")
        if rollout.tools is not None:
            raise GraphError(f"{where} has refill= and tools=; a refill is for single turns: use rg.filter_groups instead")
        if rollout.chunks > 1:
            raise GraphError(f"{where} has refill= and chunks={rollout.chunks}, but a batch is known when its last group is: choose one")
        if rollout.admission.continuous:
            raise GraphError(
                f"{where} has refill= and continuous=True, but which prompts the next batch has is known when this one is full: choose one"
            )
        check_column(name, self.writes)


@dataclass(frozen=True, eq=False)
class DynamicRollout(Operation):
    """Sample groups of responses until enough of them have rewards that differ."""

    rollout: Rollout
    draws_from: Prompts
    scoring: Scoring
    writes: str
    rounds: int

    @property
    def traits(self) -> NodeTraits:
        return replace(self.rollout.traits, draws_from=self.draws_from, one_turn=False, given=(self.scoring,))

    def check(self, node: Node) -> None:
        self.draws_from.check(node)
        self.rollout.check_prompts(node, self.draws_from)
        self.scoring.check()

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.rollout.generator.path)  # loaded before the first step, not in it
        self.scoring.start(context)
        return DynamicSampler(self, context)


@dataclass(eq=False)
class Group:
    """The requests to one prompt, their responses by request id, and their rewards once all responses are there."""

    position: int
    item: Mapping[str, Any]
    requests: Sequence[Request]
    responses: dict[str, Response] = field(default_factory=dict)
    rewards: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def constant(self) -> bool:
        """Whether all rewards are exactly equal."""
        return bool((self.rewards == self.rewards[0]).all())


@dataclass
class DynamicSampler:
    """Samples the batch of one rank at each firing. The rank draws every `world`-th prompt and goes on where its previous step ended."""

    operation: DynamicRollout
    context: Context
    drawn: int = 0

    def __call__(self, step: int, columns: Columns) -> Fired:
        world = self.context.world
        wanted = len(rows_of_rank(self.operation.draws_from.count, self.context.rank, world))
        groups = self._sample(wanted)
        differing = [group for group in groups if not group.constant]
        unfilled = wanted - len(differing)
        kept = differing + [group for group in groups if group.constant][:unfilled]
        kept.sort(key=lambda group: group.position)
        counts = {"prompts": len(groups), "filtered_groups": len(groups) - wanted, "unfilled_groups": unfilled}
        # Metrics are averaged over ranks, so each rank reports its count times `world`: the average is then the total.
        metrics = {f"dynamic_sampling/{name}": float(number * world) for name, number in counts.items()}
        return self._columns(kept) | {self.operation.writes: _rewards(kept)}, metrics | self.operation.draws_from.metrics | self._spread(
            kept, groups
        )

    def _sample(self, wanted: int) -> list[Group]:
        """Draw and decode until `wanted` groups differ or the rounds are used up. Returns all drawn groups in the data order."""
        done: list[Group] = []
        waiting: dict[str, Group] = {}  # by request
        missing, left = wanted, wanted * self.operation.rounds
        open_groups = 0
        while missing:
            self.context.report_progress(wanted - missing, wanted, "groups that differ")
            for _ in range(min(missing - open_groups, left)):
                group = self._draw()
                waiting |= {request.id: group for request in group.requests}
                open_groups, left = open_groups + 1, left - 1
            if not open_groups:
                break
            complete = self._advance(waiting)
            self._score(complete)
            open_groups -= len(complete)
            missing -= sum(not group.constant for group in complete)
            done += complete
        return sorted(done, key=lambda group: group.position)

    def _draw(self) -> Group:
        """Submit the requests to the next prompt of this rank."""
        rollout, source = self.operation.rollout, self.operation.draws_from
        position = self.drawn * self.context.world + self.context.rank
        self.drawn += 1
        item = source.item(position)
        prompt = rollout.encoded(self.context, source.columns([item]))[0]
        seeds = [seed_of(rollout.generator.seed, position, member) for member in range(rollout.group_size)]
        requests = [Request(f"{rollout.prefix}{position}.{m}", prompt, rollout.sampling, seed) for m, seed in enumerate(seeds)]
        for request in requests:
            self.context.engine.submit(request)
        return Group(position, item, requests)

    def _advance(self, waiting: dict[str, Group]) -> list[Group]:
        """Take new weights if the rollout allows interrupts, decode one step, and return the groups that it completes."""
        rollout = self.operation.rollout
        if rollout.admission.interrupt and self.context.arrivals is not None:
            self.context.arrivals.poll()
        complete = []
        for name, response in self.context.engine.step(rollout.prefix).items():
            group = waiting.pop(name)
            group.responses[name] = response
            if len(group.responses) == len(group.requests):
                complete.append(group)
        return complete

    def _score(self, groups: Sequence[Group]) -> None:
        if groups:
            rewards = self.operation.scoring.graded(self.context, self._columns(groups)).tensor
            for group, own in zip(groups, rewards.view(len(groups), -1), strict=True):
                group.rewards = own

    def _columns(self, groups: Sequence[Group]) -> dict[str, Column]:
        """Build the columns of responses and prompts, one row a response."""
        rows = [(group, request) for group in groups for request in group.requests]
        positions = torch.tensor([group.position for group, _ in rows], dtype=torch.int64)
        responses = [group.responses[request.id] for group, request in rows]
        return self.operation.draws_from.columns([group.item for group, _ in rows]) | columns_of(
            [request.prompt for _, request in rows], responses, positions
        )

    def _spread(self, kept: Sequence[Group], groups: Sequence[Group]) -> dict[str, float]:
        if not kept:
            return {}
        rewards = _rewards(kept)
        spread = {"mean": rewards.mean(), "max": rewards.max(), "min": rewards.min(), "drawn_mean": _rewards(groups).mean()}
        return {f"critic/{self.operation.writes}/{name}": value.item() for name, value in spread.items()}

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint: the number of prompts that this rank has drawn."""
        return {"drawn": self.drawn}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Restore a `state` from a checkpoint."""
        self.drawn = state["drawn"]


def _rewards(groups: Sequence[Group]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(group.rewards for group in groups)])
