"""Rewards: a node that scores each response by a function of texts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch

from rlgraph.columns import COLUMNS, Columns
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Node, Output, declare
from rlgraph.graph.operation import NodeTraits, Operation
from rlgraph.nodes.base import Context, Fired, Stage, carried
from rlgraph.nodes.rewards.calls import Calls
from rlgraph.nodes.rewards.retry import Retry
from rlgraph.nodes.rewards.scoring import Scoring, scoring, tokenizer_of
from rlgraph.nodes.training.guards import Outliers
from rlgraph.notices import renamed
from rlgraph.settings import Name, Range, Seconds, checked

DEADLINE_S = 300.0  # half of a job's own, so that the error names the response and not only the node
OUTLIERS = 20.0
OUTLIERS_RULE = "a number of standard deviations above 0, or None to look for none"
RewardFunction: TypeAlias = Annotated[Callable[..., Any], Range(rule="a function that returns one number a response")]
RewardColumn: TypeAlias = Annotated[str, Range(least=1, rule="the name of the column that the rewards go to, as writes='baseline_rewards'")]
Concurrency: TypeAlias = Annotated[int, Range(least=1, rule="how many responses are scored at a time, at least 1")]


@dataclass(frozen=True, eq=False)
class Reward(Operation):
    """Score the responses, measure their spread and count outliers."""

    scoring: Scoring
    writes: str = "rewards"
    by_group: bool = True
    outliers: float | None = OUTLIERS
    name: str = "reward"

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(by_group=self.by_group, given=(self.scoring,))

    def check(self, node: Node) -> None:
        self.scoring.check()

    def trial(self, node: Node, columns: Columns, rows: int) -> Columns:
        scores = self.scoring.try_on(columns)
        return {self.writes: torch.arange(rows).remainder(2).float() if scores is None else scores}

    def start(self, context: Context) -> Stage:
        self.scoring.start(context)
        outliers = None if self.outliers is None else Outliers(self.name, self.outliers)
        return lambda step, columns: self.fire(context, outliers, columns)

    def fire(self, context: Context, outliers: Outliers | None, columns: Columns) -> Fired:
        graded = self.scoring.graded(context, columns)
        scores = graded.tensor
        metrics = spread(self.writes, scores)
        metrics |= {f"critic/{self.writes}/{name}": value for name, value in graded.metrics(self.scoring.retry).items()}
        if outliers is not None:
            metrics["guards/reward_outliers"] = float(outliers.look(scores))
        return {self.writes: scores}, metrics


def spread(column: str, scores: torch.Tensor) -> dict[str, float]:
    """Compute mean, largest and smallest reward as metrics."""
    found = {"mean": scores.mean(), "max": scores.max(), "min": scores.min()}
    return {f"critic/{column}/{name}": value.item() for name, value in found.items()}


@renamed(at_once="concurrency")
@checked()
def reward(
    function: RewardFunction,
    *inputs: Output,
    writes: RewardColumn = "rewards",
    concurrency: Concurrency | None = None,
    deadline_s: Seconds = DEADLINE_S,
    retries: Retry | None = None,
    by_group: bool = True,
    outliers: Annotated[float, Range(above=0, rule=OUTLIERS_RULE)] | None = OUTLIERS,
    trial: bool = True,
    name: Name = "reward",
) -> Output:
    """Declare a reward: one number a response, from a function whose parameters are named for the columns they get.

    >>> import rlgraph as rg
    >>> prompts = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], 1)
    >>> reward(lambda answers: [1.0 for answer in answers], prompts).columns
    ('rewards',)

    `def right(responses, answers)` is called once with the columns of all responses and returns one number for each;
    `def right(response, answer)` is called for each response and returns its number, and so is `async def judge(response)`.
    Calls for single responses run `concurrency` at a time (16, or as the scorer says), on threads or, if async, in one event loop.
    A function may also return the answer that it found, for `rg.evaluate`: see `rg.scorers.Score`.

    `responses` and `prompts` are texts, or token ids if the parameter is annotated `torch.Tensor`. `answers` is the field `answer` of
    the data set, repeated for each response. `writes` names the column of the rewards: `baseline_rewards` for those of greedy
    responses, or a name of your own for an estimator of several rewards, as `rg.algorithms.GDPO(keys=("right", "brief"))`.

    In a rollout with `chunks` the function gets each chunk as it arrives; a chunk holds whole groups. Give `by_group=False` for a
    function that compares responses to different prompts: it then gets the whole batch.

    A reward farther than `outliers` standard deviations from the mean of the earlier ones gives a warning and counts in
    `guards/reward_outliers`. It is used as it is. None looks for no outliers.

    `retries=rg.Retry(times=3, default=0.0)` repeats calls that fail. Metrics: `critic/rewards/retries`, repeated calls a response, and
    `critic/rewards/defaults`, the share of responses that got the default.

    Without `retries`, or if all calls fail and there is no default, a call that raises, takes longer than `deadline_s` or returns no
    finite number ends the run with an error that names the response and its prompt.

    The launch calls the function once on a made-up batch of two prompts with their groups, before anything starts, and refuses what it
    returns as the run would. Give `trial=False` for a function with side effects, or one that loads a model or asks a network.

    Raises GraphError for a parameter whose column no input carries, a function without parameters, or a column of another kind.
    """
    check_column(name, writes)
    where = f"node '{name}'"
    scored = scoring(where, function, carried(inputs), tokenizer_of(inputs), Calls(concurrency, deadline_s, retries, trial))
    operation = Reward(scored, writes, by_group, outliers, name)
    return Output(declare(name, operation, inputs, reads=operation.scoring.reads, writes=(writes,)))


def check_column(name: str, writes: str) -> None:
    """Raise GraphError unless a column of that name can hold rewards."""
    spec = COLUMNS.get(writes)
    if spec is not None and (spec.dtype, spec.dims) != (torch.float32, ("B",)):
        raise GraphError(
            f"node '{name}' has writes='{writes}', which holds {spec.meaning}; a reward is one number a response: name another"
        )
