"""Dynamic sampling: a rollout that keeps the groups whose rewards differ, and draws other prompts to replace the rest.

A batch has the first groups of the data order whose rewards differ, however long each decodes. The next prompt replaces a constant
group at once, and a prompt starts only when a batch needs it, so no prompt is lost and none is trained on twice.

With `continuous` the groups of batch k + 1 decode next to the last ones of batch k. If batch k then lacks a group, the first group of
batch k + 1 moves into it, and batch k + 1 draws another. Groups only move to earlier batches, so the bound on staleness holds.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any

import torch

from rlgraph import settings
from rlgraph.columns import Column, Columns, rows_of_rank
from rlgraph.errors import GraphError, choices
from rlgraph.graph.nodes import Feedback, Node, Operation, Output, declare
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage
from rlgraph.nodes.prompts import Prompts
from rlgraph.nodes.rewards.calls import Calls, Retry
from rlgraph.nodes.rewards.reward import DEADLINE_S, Concurrency, RewardColumn, RewardFunction, check_column
from rlgraph.nodes.rewards.scoring import Scoring, match_parameters
from rlgraph.nodes.rollout.conversation import ConversationLoop, turn_metrics
from rlgraph.nodes.rollout.decode_loop import Outcome, Task, TaskDecoder, pack_outcomes
from rlgraph.nodes.rollout.rollout import Rollout, item_of
from rlgraph.nodes.trial import made_up
from rlgraph.notices import accept_old_names
from rlgraph.settings import Range, Seconds

# The rule of dynamic sampling: which groups of the data order form a batch, and when to draw the next group.


@dataclass(eq=False)
class Group:
    """The tasks of one prompt, their responses by request id, and their rewards once all responses are complete."""

    position: int
    item: Mapping[str, Any]
    tasks: Sequence[Task]
    responses: dict[str, Outcome] = field(default_factory=dict)
    rewards: torch.Tensor | None = None
    constant: bool = False  # whether all rewards are known and exactly equal

    @property
    def running_count(self) -> int:
        """The number of responses that still decode."""
        return len(self.tasks) - len(self.responses)

    def score(self, rewards: torch.Tensor) -> None:
        """Set the rewards of the responses, [group_size]."""
        self.rewards, self.constant = rewards, bool((rewards == rewards[0]).all())


def batches(groups: Sequence[Group], wanted: int, most: int) -> Iterator[Sequence[Group]]:
    """Split groups in the data order into batches: each ends with its `wanted`-th group that differs, or with its `most`-th group.

    A group that still decodes counts as one that differs. If it turns out constant, the ends of its batch and of later ones move forward,
    never back; so a group ends up in its present batch or in an earlier one.
    """
    begin = differing = 0
    for place, group in enumerate(groups):
        differing += not group.constant
        if differing == wanted or place + 1 - begin == most:
            yield groups[begin : place + 1]
            begin, differing = place + 1, 0


def batch_of_next(groups: Sequence[Group], wanted: int, most: int) -> int:
    """Compute the batch of the group that would be drawn next, counted from the due batch. The group cannot move to a later batch."""
    return sum(1 for _ in batches(groups, wanted, most))


def choose_groups(batch: Sequence[Group], wanted: int) -> list[Group]:
    """Choose the groups of a complete batch to train on, in the data order: the groups that differ, and the earliest constant ones if
    too few do."""
    constant = [group for group in batch if group.constant]
    filling = set(map(id, constant[: wanted - (len(batch) - len(constant))]))
    return [group for group in batch if not group.constant or id(group) in filling]


@accept_old_names(at_once="concurrency")
@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Refill:
    """Replace groups whose responses all have the same reward, since they teach nothing: DAPO's dynamic sampling.

    >>> import rlgraph as rg
    >>> prompts, generator = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], 1), rg.Generator("tiny", pool=rg.Pool("rollout"))
    >>> refill = rg.options.Refill(reward=lambda response, answer: float(answer in response))
    >>> generator.rollout(prompts, group_size=4, refill=refill).columns[-3:]
    ('prompt_texts', 'answers', 'rewards')

    If too few groups differ after `rounds` rounds, the earliest constant groups fill the batch, and `dynamic_sampling/unfilled_groups`
    counts them.
    With `continuous=True` the next batch draws and decodes while the last groups of this batch decode.

    Metrics: `dynamic_sampling/prompts` counts the drawn prompts, `.../filtered_groups` the groups left out. `critic/rewards/drawn_mean`
    is the mean reward of all samples, and `critic/rewards/mean` the mean of the trained samples. Source: Yu et al., 2025, 2503.14476.

    * `reward`: a function as for `rg.reward`. The generator's process calls it as soon as a group is complete; decoding waits for it.
    * `writes`: the column of the rewards.
    * `rounds`: a step draws at most this many times the prompts that it trains on.
    * `concurrency`: how many calls of `reward` run at once; None: as for `rg.reward`.
    * `deadline_s`: the most seconds per call.
    * `retries`: how often a call that raised is made again; None: never.
    * `trial`: tries `reward` on a made-up response before the launch.
    """

    reward: RewardFunction
    writes: RewardColumn = "rewards"
    rounds: Annotated[int, Range(least=2, rule="the most draws of its prompts in a step, a whole number of at least 2")] = 10
    concurrency: Concurrency | None = None
    deadline_s: Seconds = DEADLINE_S
    retries: Retry | None = None
    trial: bool = True

    def __post_init__(self) -> None:
        settings.check(self)

    def declare(self, name: str, rollout: Rollout, prompts: Output, weights: Feedback | None) -> Output:
        """Declare the rollout that draws its own prompts.

        Raises GraphError for options that exclude a refill, and for a reward that reads a missing column.
        """
        where = f"node '{name}'"
        source = prompts.node.operation
        if not isinstance(source, Prompts):
            raise GraphError(
                f"{where} draws from the data order, but its prompts come from another node or a stream; pass rg.prompts(rows) of rows "
                "with a length"
            )
        self._check(where, name, rollout)
        own = tuple(column for column in prompts.columns if column != "prompt_ids")
        carried = (*rollout.writes, *own)
        scored = match_parameters(
            where, self.reward, carried, rollout.generator.path, Calls(self.concurrency, self.deadline_s, self.retries, self.trial)
        )
        missing = [column for column in scored.reads if column not in carried]
        if missing:
            said = choices(missing[0], carried)
            raise GraphError(f"{where}: the reward reads column '{missing[0]}', which neither responses nor prompts have; {said}")
        if self.writes in carried:
            raise GraphError(f"{where} has Refill(writes='{self.writes}'), a column that it has already; name another for the rewards")
        operation = DynamicRollout(rollout, source, scored, self.writes, self.rounds)
        rows, writes = prompts.node.rows * rollout.group_size, (*carried, self.writes)
        return Output(declare(name, operation, (), reads=(), writes=writes, rows=rows, model=rollout.generator, feedback=weights))

    def _check(self, where: str, name: str, rollout: Rollout) -> None:
        if rollout.rewards_per_prompt < 2:
            raise GraphError(f"{where} has refill= and group_size=1, and a group of one is never constant; use larger groups, or no refill")
        if rollout.chunks > 1:
            raise GraphError(f"{where} has refill= and chunks={rollout.chunks}, but a batch ends only with its last group: choose one")
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

    def trial(self, node: Node, columns: Columns, rows: int) -> Columns:
        sampled = {**self.draws_from.columns([self.draws_from.first] * rows), **made_up(self.rollout.writes, rows)}
        scores = self.scoring.try_on(sampled)
        return {**sampled, self.writes: torch.arange(rows).remainder(2).float() if scores is None else scores}

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.rollout.generator.path)  # loaded before the first step, not in it
        self.scoring.start(context)
        return DynamicSampler(self, context, self.rollout.decoder(context))


@dataclass
class DynamicSampler:
    """Samples the batch of one rank at each firing. The rank draws every `world`-th prompt and continues where its last batch ended.

    `groups` holds the groups of the due batch and of later ones, in the data order; `newest` is the last batch that may draw.
    """

    operation: DynamicRollout
    context: Context
    decoder: TaskDecoder
    passed: int = 0  # prompts of this rank in finished batches
    newest: int = -1
    groups: list[Group] = field(default_factory=list)
    waiting: dict[str, Group] = field(default_factory=dict)  # by request
    calls: Counter[str] = field(default_factory=Counter)  # of the reward, since the last batch

    def __call__(self, step: int, columns: Columns) -> Fired:
        self.newest = max(self.newest, step)
        world, wanted = self.context.world, self.groups_per_batch
        batch = self._sample_batch(step) if wanted else []
        self.groups = self.groups[len(batch) :]
        self.passed += len(batch)
        trained = choose_groups(batch, wanted)
        unfilled = sum(group.constant for group in trained)
        counts = {"prompts": len(batch), "filtered_groups": len(batch) - wanted, "unfilled_groups": unfilled}
        # Metrics are averaged over ranks, so each rank reports its count times `world`: the average is then the total.
        metrics = {f"dynamic_sampling/{name}": float(number * world) for name, number in counts.items()}
        metrics |= self.operation.draws_from.metrics | self._spread(trained, batch)
        if isinstance(self.decoder, ConversationLoop):
            drawn = [sampled for group in batch for sampled in group.responses.values()]
            metrics |= turn_metrics(drawn, self.decoder.seconds, self.operation.rollout.tools is not None, world, self.decoder.counted)
        return self._columns(trained) | {self.operation.writes: _rewards(trained)}, metrics

    @property
    def groups_per_batch(self) -> int:
        """The groups of a batch that this rank samples."""
        return len(rows_of_rank(self.operation.draws_from.count, self.context.rank, self.context.world))

    def _sample_batch(self, step: int) -> Sequence[Group]:
        """Sample the due batch. If this fails, close conversations."""
        try:
            return self._sample(step)
        except BaseException:
            if isinstance(self.decoder, ConversationLoop):
                self.decoder.close()
            raise

    def _sample(self, step: int) -> Sequence[Group]:
        """Decode until the due batch is complete. Return all its groups in the data order, including those left out."""
        while True:
            self._draw(step)
            due = next(self._batches(), None)
            if due is not None and not any(group.rewards is None for group in due):
                return due
            differing = sum(group.rewards is not None and not group.constant for group in due or self.groups)
            self.context.report_progress(differing, self.groups_per_batch, "groups that differ")
            self._join(step)
            self._score(self._advance())

    def _batches(self) -> Iterator[Sequence[Group]]:
        return batches(self.groups, self.groups_per_batch, self.groups_per_batch * self.operation.rounds)

    def _draw(self, step: int) -> None:
        """Submit requests for the next prompts of this rank, up to the number that the joined batches need."""
        rollout, source = self.operation.rollout, self.operation.draws_from
        while step + batch_of_next(self.groups, self.groups_per_batch, self.groups_per_batch * self.operation.rounds) <= self.newest:
            position = (self.passed + len(self.groups)) * self.context.world + self.context.rank
            item = source.item(position)
            columns = source.columns([item])
            prompt = rollout.encode_prompts(self.context, columns)[0][0] if rollout.agent is None else ()
            own = item_of(columns, 0) if rollout.agent is not None else {}
            tasks = [rollout.task(position, member, prompt, own) for member in range(rollout.group_size)]
            group = Group(position, item, tasks)
            self.groups.append(group)
            for task in tasks:
                self.decoder.submit(task)
                self.waiting[task.request.id] = group

    def _join(self, step: int) -> None:
        """Load new weights and let the next batches draw, as far as the rule allows: once at most half of the newest still decodes."""
        rule, arrivals = self.operation.rollout.admission, self.context.arrivals
        if rule.interrupt and arrivals is not None:
            arrivals.poll()
        while self.newest < step + rule.ahead() and self._tail(self.newest - step):
            needed = rule.needs(self.newest + 1)
            if not rule.interrupt and arrivals is not None:
                arrivals.wait(needed)
            if self.context.version < needed:
                return
            self.newest += 1
            self._draw(step)

    def _tail(self, number: int) -> bool:
        """Whether at most half of the responses of a batch, counted from the due one, still decode."""
        found = next(islice(self._batches(), number, None), None)
        return (
            found is not None
            and 2 * sum(group.running_count for group in found) <= self.groups_per_batch * self.operation.rollout.group_size
        )

    def _advance(self) -> list[Group]:
        """Decode one step, and return the groups that it completes."""
        complete = []
        for name, sampled in self.decoder.step().items():
            group = self.waiting.pop(name)
            group.responses[name] = sampled
            if not group.running_count:
                complete.append(group)
        return complete

    def _score(self, groups: Sequence[Group]) -> None:
        if groups:
            graded = self.operation.scoring.grade(self.context, self._columns(groups))
            self.calls.update(rows=len(graded.scores), retries=graded.retries, defaults=graded.defaults)
            for group, own in zip(groups, graded.tensor.view(len(groups), -1), strict=True):
                group.score(own)

    def _columns(self, groups: Sequence[Group]) -> dict[str, Column]:
        """Build the columns of responses and prompts, one row per response."""
        rows = [(group, group.responses[task.request.id]) for group in groups for task in group.tasks]
        positions = torch.tensor([group.position for group, _ in rows], dtype=torch.int64)
        rollout = self.operation.rollout
        sampled = pack_outcomes([one for _, one in rows], positions, rollout.gives_rewards, rollout.has_outputs, rollout.generator.routes)
        return self.operation.draws_from.columns([group.item for group, _ in rows]) | sampled

    def _spread(self, trained: Sequence[Group], batch: Sequence[Group]) -> dict[str, float]:
        if not trained:
            return {}
        rewards = _rewards(trained)
        spread = {"mean": rewards.mean(), "max": rewards.max(), "min": rewards.min(), "drawn_mean": _rewards(batch).mean()}
        found = {name: value.item() for name, value in spread.items()}
        if self.operation.scoring.retry is not None:
            found |= {name: self.calls[name] / max(self.calls["rows"], 1) for name in ("retries", "defaults")}
            self.calls.clear()
        return {f"critic/{self.operation.writes}/{name}": value for name, value in found.items()}

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint: the prompts of finished batches. A resume draws prompts that decode ahead again."""
        return {"drawn": self.passed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Restore a `state` from a checkpoint."""
        self.passed = state["drawn"]


def _rewards(groups: Sequence[Group]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(group.rewards for group in groups if group.rewards is not None)])
