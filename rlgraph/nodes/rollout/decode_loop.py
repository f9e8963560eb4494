"""Decode the batches of a rollout: a task per response, the loop that samples them, and the columns into which they are packed."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rlgraph.columns import FINISH_REASONS, Column, pad_rows
from rlgraph.engines.api import GenerateEngine, Images, Request, Response
from rlgraph.errors import DataError, GraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.rollout.fitting import text_config
from rlgraph.plan.model_shapes import ModelShape
from rlgraph.values.sampling import BatchAdmission

# The routes of a rollout: the experts that its engine chose for each token, as columns, and the checks of generators with routes.

ROUTES = ("prompt_routes", "routes")


def check_told(generator: Any) -> None:
    """Raise GraphError for a generator with routes whose engine does not report them."""
    if generator.routes and (generator.tensor_parallel > 1 or generator.drafts is not None):
        given = "drafts" if generator.drafts is not None else f"tensor_parallel={generator.tensor_parallel}"
        raise GraphError(
            f"Generator(routes=True, {given}): only engines of one GPU that decode one token per step report routes; leave out one"
        )


def route_dims(path: str) -> dict[str, int]:
    """Read the most layers with experts L, and the experts per token E, from a model's config.json; empty without experts."""
    shape = ModelShape.from_config(text_config(path))
    return {} if shape is None or shape.experts == 1 else {"L": shape.layers, "E": shape.experts_used}


def check_routes(where: str, path: str) -> None:
    """Raise GraphError for a model without experts, which has no routes."""
    shape = ModelShape.from_config(text_config(path))
    if shape is not None and shape.experts == 1:
        raise GraphError(f"{where} reads the model '{path}', which has no experts; leave out routes and router_replay")


def routes_of(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> dict[str, Column]:
    """Pack the experts that an engine chose into columns, padded with -1 like tokens: prompts on the left, responses on the right."""
    found = [response.routes for response in responses]
    assert all(routes is not None for routes in found), "an engine with routes=True gave none"
    told = [(routes[: len(prompt)], routes[len(prompt) :]) for prompt, routes in zip(prompts, found, strict=True) if routes is not None]
    if not told:  # a rank without a share of the batch
        return {name: torch.zeros(0, 0, 0, 0, dtype=torch.int16) for name in ROUTES}
    sides = zip(ROUTES, ("left", "right"), zip(*told, strict=True), strict=True)
    packed: dict[str, Column] = {}
    for name, side, rows in sides:
        column = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1, padding_side=side)
        packed[name] = column if column.shape[1] else column.new_full((len(column), 1, *column.shape[2:]), -1)
    return packed


WRITES = (
    *("prompts", "prompt_mask", "responses", "response_mask"),
    *("rollout_log_probs", "weight_version", "finish_reasons", "group_ids"),
)
REWARDS = ("rewards", "token_rewards")  # of environments
OUTPUTS = "outputs"  # of programs


@dataclass(frozen=True)
class Task:
    """A response to sample: its request, its place in its group, and for conversations the `item`, the columns of its prompt."""

    request: Request
    member: int = 0
    item: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Outcome:
    """A response to a prompt. `written` marks the tokens that the policy wrote; None: all of them.

    `rewards` maps places of tokens to an environment's rewards. `counts` belong to a conversation, and `output` is the value that a
    program returned, or its printed text. `images` are those of the prompt and of a conversation's turns.
    """

    prompt: Sequence[int]
    response: Response
    written: Sequence[bool] | None = None
    rewards: Mapping[int, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    output: str = ""
    images: Images | None = None


def seed_of(seed: int, prompt: int, member: int) -> int:
    """Derive a response's seed from the generator's seed, its prompt's place in the data order and its place in the group."""
    return (seed * 1_000_003 + prompt * 65_537 + member) % 2**31


def chain_parts(parts: Sequence[Sequence[Task]]) -> list[Task]:
    """The tasks of all parts of a batch, in order."""
    return [task for part in parts for task in part]


class TaskDecoder(Protocol):
    """Samples the responses of tasks: one decode step at a time, in single turns or in conversations."""

    def submit(self, task: Task) -> None:
        """Queue a task."""

    def step(self) -> Mapping[str, Outcome]:
        """Decode one step, or wait a while if nothing can decode; return the responses that have ended, by request id."""


class OneTurn:
    """Samples each response in one turn. `prefix` begins its request ids, and distinguishes them from other nodes' ids."""

    def __init__(self, engine: GenerateEngine, prefix: str) -> None:
        self.engine, self.prefix = engine, prefix
        self._prompts: dict[str, Sequence[int]] = {}

    def submit(self, task: Task) -> None:
        self._prompts[task.request.id] = task.request.prompt
        self.engine.submit(task.request)

    def step(self) -> Mapping[str, Outcome]:
        return {name: Outcome(self._prompts.pop(name), response) for name, response in self.engine.step(self.prefix).items()}


class _OpenBatch:
    """The tasks of one step, and their responses so far."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.done: dict[str, Outcome] = {}
        self.begun = False  # whether its step has fired; before that, it has joined another step

        self.complete: list[int] = []  # groups, in the order in which they ended
        self.left = 0  # how many of these have left
        self._places = {task.request.id: place for place, task in enumerate(tasks)}

    def groups_of(self, names: Iterable[str], size: int) -> list[int]:
        """List the groups of responses, in the order of the tasks."""
        return sorted({self._places[name] // size for name in names if name in self._places})

    def is_complete(self, group: int, size: int) -> bool:
        """Whether all responses of a group have ended."""
        return all(task.request.id in self.done for task in self.tasks[group * size : (group + 1) * size])

    def tail(self) -> bool:
        """Whether at most half of the responses still decode."""
        return 2 * len(self.done) >= len(self.tasks)


class DecodeLoop:
    """Decodes the batches of one rollout. `upcoming(step)` makes the tasks of a batch before it is due."""

    def __init__(self, context: Context, decoder: TaskDecoder, rule: BatchAdmission, upcoming: Callable[[int], Sequence[Task]]) -> None:
        self.context, self.decoder, self.rule, self.upcoming = context, decoder, rule, upcoming
        self._batches: dict[int, _OpenBatch] = {}
        self._home: dict[str, _OpenBatch] = {}  # of each unfinished task

    def begin(self, step: int, tasks: Sequence[Task]) -> None:
        """Submit the tasks of batch `step`, unless it has joined before. Raises DataError if it joined with other tasks.

        A step that begins again is decoded again: after a kill it first runs one prompt at a time, and then as a whole.
        """
        self._batches = {number: batch for number, batch in self._batches.items() if number >= step and not batch.begun}
        if step not in self._batches:
            self._submit(step, tasks)
        elif self._batches[step].tasks != tasks:
            raise DataError(f"step {step} has different prompts than it had one step before: the items of a data set must not change")
        self._batches[step].begun = True

    def take(self, step: int, tasks: Sequence[Task]) -> list[Outcome]:
        """Decode until these tasks of batch `step` are done, and return their responses, in the order of the tasks."""
        batch = self._batches[step]
        self.context.report_progress(len(batch.done), len(batch.tasks), "responses")
        missing = {task.request.id for task in tasks} - batch.done.keys()
        while missing:
            missing.difference_update(self._advance(step))
        return [batch.done[task.request.id] for task in tasks]

    def _advance(self, step: int) -> Collection[str]:
        """Decode one step, and name the responses that have ended."""
        self._join(step)
        finished, batch = self.decoder.step(), self._batches[step]
        for name, sampled in finished.items():
            self._home.pop(name).done[name] = sampled
        if finished:
            self.context.report_progress(len(batch.done), len(batch.tasks), "responses")
        return finished

    def next_groups(self, step: int, count: int, size: int) -> list[int]:
        """Decode until `count` more groups of `size` responses are complete, and return which these are.

        They are in the order of the decode steps in which their last responses ended, and of the tasks within one.
        """
        batch = self._batches[step]
        while len(batch.complete) < batch.left + count:
            ended = self._advance(step)
            batch.complete += [group for group in batch.groups_of(ended, size) if batch.is_complete(group, size)]
        batch.left += count
        return batch.complete[batch.left - count : batch.left]

    def _submit(self, step: int, tasks: Sequence[Task]) -> None:
        batch = self._batches[step] = _OpenBatch(tasks)
        for task in tasks:
            self.decoder.submit(task)
            self._home[task.request.id] = batch

    def _join(self, step: int) -> None:
        """Load new weights and admit the next batches between two decode steps, as far as the rule allows."""
        arrivals = self.context.arrivals
        if self.rule.interrupt and arrivals is not None:
            arrivals.poll()
        newest = max(self._batches)
        while newest < step + self.rule.ahead() and self._batches[newest].tail():
            needed = self.rule.needs(newest + 1)
            if not self.rule.interrupt and arrivals is not None:
                arrivals.wait(needed)
            if self.context.version < needed:
                return
            newest += 1
            self._submit(newest, self.upcoming(newest))


def columns_of(prompts: Sequence[Sequence[int]], responses: Sequence[Response], group_ids: Column) -> dict[str, Column]:
    """Pack responses into the columns that every rollout writes, one row per response: pad prompts on the left, responses on the right."""
    tokens, mask = pad_rows(prompts, torch.int64, left=True)
    sampled, written = pad_rows([r.tokens for r in responses], torch.int64, left=False)
    log_probs, _ = pad_rows([r.log_probs for r in responses], torch.float32, left=False)
    versions, _ = pad_rows([r.versions for r in responses], torch.int32, left=False)
    return {
        "prompts": tokens,
        "prompt_mask": mask,
        "responses": sampled,
        "response_mask": written,
        "rollout_log_probs": log_probs,
        "weight_version": versions,
        "finish_reasons": torch.tensor([FINISH_REASONS.index(r.finish) for r in responses], dtype=torch.int8),
        "group_ids": group_ids,
    }


def image_columns(sampled: Sequence[Outcome], responses: Column) -> dict[str, Column]:
    """Pack the images of conversations into `images` [B], and `image_mask` [B, T], true on their tokens in the responses [B, T]."""
    assert isinstance(responses, torch.Tensor)
    mask = torch.zeros(responses.shape, dtype=torch.bool)
    for row, one in enumerate(sampled):
        for begin, end in one.images.places if one.images else ():
            mask[row, max(begin - len(one.prompt), 0) : max(end - len(one.prompt), 0)] = True
    return {"images": [one.images.urls if one.images else "[]" for one in sampled], "image_mask": mask}


def pack_outcomes(
    sampled: Sequence[Outcome], group_ids: Column, rewarded: bool = False, outputs: bool = False, routes: bool = False
) -> dict[str, Column]:
    """Pack samples into columns; with `rewarded` also `rewards` [B] and `token_rewards` [B, T], whose sums are equal.

    With `outputs`, add the outputs of programs, as text; with `routes`, the experts that the engine chose.
    """
    columns = columns_of([one.prompt for one in sampled], [one.response for one in sampled], group_ids)
    if routes:
        columns |= routes_of([one.prompt for one in sampled], [one.response for one in sampled])
    mask, tokens = columns["response_mask"], columns["responses"]
    assert isinstance(mask, torch.Tensor)
    assert isinstance(tokens, torch.Tensor)
    for row, one in enumerate(sampled):
        if one.written is not None:
            mask[row, : len(one.written)] = torch.tensor(one.written, dtype=torch.bool)
    if outputs:
        columns[OUTPUTS] = [one.output for one in sampled]
    if not rewarded:
        return columns
    rewards = torch.zeros(tokens.shape, dtype=torch.float32)
    for row, one in enumerate(sampled):
        for place, reward in one.rewards.items():
            rewards[row, place] = reward
    return columns | {"rewards": rewards.sum(-1), "token_rewards": rewards}
