"""Run one worker: its nodes fire in the plan's order; each reads its inputs from channels, runs, and writes its outputs.

`Inbox`, `Outbox` and `Mailbox` are the ends of its channels, which take, put and release messages. `EngineSlot` loads and closes its
engine, or caches it for the next job of this process. A cached engine begins a job like a newly loaded one: with the weights of its folder,
without requests, and with the process state and the notices of its loading.

This module depends neither on Ray nor on processes: the local executor runs the same workers in one process.
"""

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from rlgraph import notices
from rlgraph.channels.api import Reader, Statistics, Writer
from rlgraph.columns import Column, Columns, concat_rows, repeat_rows, rows_of_rank
from rlgraph.data.images import thumbnails
from rlgraph.engines.hf.model_files import forbid_downloads
from rlgraph.errors import GraphError, StalenessError, show_value
from rlgraph.graph.nodes import Model
from rlgraph.graph.traits import HasState, Stateful
from rlgraph.nodes.base import ChunkedStage, Context, Fired, Metrics, Stage, checked_columns, checked_metrics, fired_parts
from rlgraph.plan.events import TimeSlice, fire_event
from rlgraph.plan.plan import ChannelEnd, PlannedChannel, PlannedLoop
from rlgraph.plan.schedule import Sampled, Span
from rlgraph.runtime.messages import Cells, SampledRows, SampleRequest, SampleSource
from rlgraph.runtime.worker.activity import Activity, SpanRecorder
from rlgraph.runtime.worker.spec import NodeSpec, WorkerSpec
from rlgraph.runtime.worker.weight_loops import Loop, OnEnter, WeightLoops

# Load and close a worker's engine, or cache it for the next job of this process.


@dataclass(frozen=True)
class ProcessState:
    """The state that an engine's loading sets for the process, and users' code may change: random generators, threads, variables."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    threads: int
    variables: dict[str, str]

    @classmethod
    def now(cls) -> "ProcessState":
        """Copy the present state of the process."""
        generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
        return cls(*generators, threads=torch.get_num_threads(), variables=dict(os.environ))

    def restore(self) -> None:
        """Set the process back to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        torch.set_num_threads(self.threads)
        for name in os.environ.keys() - self.variables.keys():
            del os.environ[name]
        os.environ.update(self.variables)


@dataclass
class EngineSlot:
    """The place of an engine in a process. If it `keeps` engines, it holds one from the end of a job to the start of the next."""

    keeps: bool = False
    held: Any = None
    begun: ProcessState | None = field(default=None, repr=False)
    said: tuple[str, ...] = ()  # notices of its loading

    def load(self, model: Model, context: Context) -> Any:
        """Load the model's engine, or renew the held one, which is of the same model in the same place."""
        engine, self.held = self.held, None
        if engine is None:
            engine = model.load(context)
            self.begun, self.said = ProcessState.now(), notices.here.list_all()
            return engine
        engine.renew()
        assert self.begun is not None
        self.begun.restore()
        for text in self.said:
            notices.here.say(text)
        return engine

    def end(self, engine: Any, *, keep: bool) -> None:
        """Hold an engine for the next job if this slot keeps engines and the driver asks for it; otherwise close it."""
        if self.keeps and keep:
            engine.forget()
            self.held = engine
            notices.here.forget()
        else:
            engine.close()


# Metrics of a batch whose node fired for each of its chunks.


def reduce_metrics(chunks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of equally large chunks into the batch's metrics: by the mean, `…/max` and `…/min` by the extreme."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk)
    return {name: _reduce_metric(name, [chunk[name] for chunk in chunks if name in chunk]) for name in names}


def _reduce_metric(name: str, values: Sequence[float]) -> float:
    if name.endswith("/max"):
        return max(values)
    return min(values) if name.endswith("/min") else fmean(values)


# Keep only the rows of a worker's batches that a recorder has asked for.
#
# Every worker draws the same rows of a step, so the recorder receives all columns of a response, also if several workers write them.

MESSAGE_BYTES = 1 << 24  # approximate size of one message; the driver reads none above 64 MiB
TOKENS = (  # columns with one number per token that a recorder shows; other columns are sent only if they have one number per row
    *("prompts", "prompt_mask", "responses", "response_mask", "rollout_log_probs", "weight_version"),
    *("old_log_probs", "advantages", "loss_mask", "token_rewards", "image_mask"),
)


def chosen_rows(request: SampleRequest, rollout: str, rows: int, step: int) -> Sequence[int]:
    """Draw the rows of a step that are recorded, in their order: the same in every worker.

    >>> chosen_rows(SampleRequest(0.25, None, 0, []), "rollout", 8, step=3)
    [4, 7]
    >>> chosen_rows(SampleRequest(1.0, None, 0, []), "rollout", 3, step=3)
    range(0, 3)
    """
    count = max(round(request.share * rows), 1)
    if request.most is not None:
        count = min(count, request.most)
    if count >= rows:
        return range(rows)
    return sorted(random.Random(f"{request.seed} {rollout} {step}").sample(range(rows), count))


class SampleTap:
    """The rows that one worker has kept since the last `take`. Without a request it keeps none, and needs no time."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.request: SampleRequest | None = None
        self._kept: list[SampledRows] = []

    def take(self) -> list[SampledRows]:
        """Return the rows kept since the last call."""
        found, self._kept = self._kept, []
        return found

    def keep(self, node: NodeSpec, step: int, chunk: int, written: Columns) -> None:
        """Copy the requested rows of one firing to host memory."""
        for source in self.request.sources if self.request is not None else ():
            if source.node == node.name and written:
                self._kept += self._rows(source, node, step, chunk, written)

    def _rows(self, source: SampleSource, node: NodeSpec, step: int, chunk: int, written: Columns) -> Iterator[SampledRows]:
        assert self.request is not None
        here = rows_of_firing(node, chunk, source.rows // source.repeat, self.rank, self.world)
        columns = {name: column for name, column in written.items() if name in source.columns and _is_sampled_column(name, column)}
        if not columns or len(next(iter(columns.values()))) != len(here):
            return  # nothing was due, or another rank writes this batch
        chosen = dict.fromkeys(row // source.repeat for row in chosen_rows(self.request, source.rollout, source.rows, step))
        own = [row for row in chosen if row in here]
        size = max(MESSAGE_BYTES // max(sum(_row_bytes(column) for column in columns.values()), 1), 1)
        for first in range(0, len(own), size):
            rows = own[first : first + size]
            cells = {name: _cells(name, column, [row - here.start for row in rows]) for name, column in columns.items()}
            yield SampledRows(source.node, source.rollout, step, rows, cells)


def rows_of_firing(node: NodeSpec, chunk: int, rows: int, rank: int, world: int) -> range:
    """The indices of the rows that a firing writes, among the `rows` of its step: a generator's rank writes the rows of its prompts."""
    size = rows // node.chunks
    if node.traits.work != "generate":
        return range(chunk * size, (chunk + 1) * size) if rank == 0 else range(0)
    group = node.traits.group_size or 1
    own = rows_of_rank(size // group, rank, world)
    return range(chunk * size + own.start * group, chunk * size + own.stop * group)


def _is_sampled_column(name: str, column: Column) -> bool:
    """Whether a sample has this column. Images of prompts it has by its response."""
    return name != "prompt_images" and (not isinstance(column, torch.Tensor) or column.ndim == 1 or name in TOKENS)


def _row_bytes(column: Column) -> int:
    return column[0].nbytes if isinstance(column, torch.Tensor) and len(column) else 64


def _cells(name: str, column: Column, rows: list[int]) -> Cells:
    if not isinstance(column, torch.Tensor):
        text = [thumbnails(column[row]) if name == "images" else column[row] for row in rows]
        return Cells("text", [len(rows)], text=text)
    picked = column.detach()[torch.tensor(rows, device=column.device)]
    if picked.dtype == torch.int64 and picked.ndim > 1:
        picked = picked.to(torch.int32)  # token ids
    if picked.dtype in (torch.bfloat16, torch.float16):
        picked = picked.float()
    array: Any = picked.cpu().contiguous().numpy()
    return Cells(str(array.dtype), list(array.shape), data=array.tobytes())


@dataclass
class Inbox:
    """One channel as a worker reads it: a reader per writing rank; the worker's nodes share the messages."""

    channel: PlannedChannel
    readers: Sequence[Reader]
    users: tuple[str, ...]  # this worker's nodes that read it, in firing order
    held: dict[int, Mapping[str, Column]] = field(default_factory=dict)

    def take(self, messages: Iterable[int], timeout_s: float) -> Mapping[str, Column]:
        """Take these messages as one batch: the rows of all writing ranks, in rank order."""
        for message in messages:
            if message not in self.held:
                self.held[message] = concat_rows([reader.take(message, timeout_s) for reader in self.readers])
        return concat_rows([self.held[message] for message in messages])

    def blocked_s(self) -> float:
        """Sum the seconds for which `take` has waited for messages so far."""
        return sum(reader.statistics().blocked_s for reader in self.readers)

    def release(self, node: str, messages: Iterable[int]) -> None:
        """Release the slots of these messages when the last of the worker's nodes has used them."""
        if node != self.users[-1]:
            return
        for message in messages:
            if self.held.pop(message, None) is not None:
                for reader in self.readers:
                    reader.release()


@dataclass
class Outbox:
    """One channel as a worker writes it."""

    channel: PlannedChannel
    writer: Writer

    def put(self, message: int, columns: Columns, timeout_s: float) -> None:
        self.writer.put(message, {name: columns[name] for name in self.channel.columns}, timeout_s)

    def blocked_s(self) -> float:
        """Read the seconds for which `put` has waited for a free slot so far."""
        return self.writer.statistics().blocked_s


@dataclass
class Mailbox:
    """All ends of one worker."""

    inboxes: list[Inbox] = field(default_factory=list)
    outboxes: list[Outbox] = field(default_factory=list)

    def read_by(self, node: str) -> list[Inbox]:
        return [box for box in self.inboxes if node in box.users]

    def written_by(self, node: str) -> list[Outbox]:
        return [box for box in self.outboxes if box.channel.writer == node]

    def statistics(self) -> dict[ChannelEnd, Statistics]:
        """Collect the counts of each end."""
        found = {ChannelEnd(box.channel.name, "put"): box.writer.statistics() for box in self.outboxes}
        for box in self.inboxes:
            for rank, reader in enumerate(box.readers):
                found[ChannelEnd(box.channel.name, "take", rank)] = reader.statistics()
        return found

    def fail(self, reason: str) -> None:
        """Break every channel, so that no peer waits for messages that will not come."""
        for outbox in self.outboxes:
            outbox.writer.fail(reason)
        for inbox in self.inboxes:
            for reader in inbox.readers:
                reader.fail(reason)

    def close(self) -> None:
        for outbox in self.outboxes:
            outbox.writer.close()
        for inbox in self.inboxes:
            for reader in inbox.readers:
                reader.close()


@dataclass(frozen=True)
class Firing:
    """One firing of a node: for a step, or for one chunk of the step's batch."""

    node: NodeSpec
    step: int
    chunk: int = 0

    @property
    def due(self) -> bool:
        """Whether the node has work at this step; otherwise it passes on an empty batch."""
        return self.node.due is None or self.node.due(self.step)

    @property
    def ends_batch(self) -> bool:
        return self.chunk == self.node.chunks - 1

    @property
    def message(self) -> int:
        """The index of the message that it puts into each channel."""
        return self.step * self.node.chunks + self.chunk

    def messages(self, channel: PlannedChannel) -> range:
        """The indices of the messages that it takes from a channel."""
        return self.node.messages(channel, self.step, self.chunk)


@dataclass
class Worker:
    """The nodes of one worker, ready to fire. It calls `on_enter(step, activity)` when an activity begins, so that a stall has a name."""

    spec: WorkerSpec
    mailbox: Mailbox
    loops: InitVar[list[Loop]]
    context: Context
    on_enter: OnEnter = lambda step, activity: None
    slot: EngineSlot = field(default_factory=EngineSlot)
    stages: dict[str, Stage | ChunkedStage] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    sampled: list[Sampled] = field(default_factory=list)
    chunk_metrics: dict[str, list[Metrics]] = field(default_factory=dict)  # of the batch on which a node works
    streams: dict[str, Iterator[Fired]] = field(default_factory=dict)  # of nodes that yield a batch in chunks
    kept: dict[str, list[Columns]] = field(default_factory=dict)  # chunks of a batch that a checkpoint may need, by node
    doing: str = "starting"
    time_slice: TimeSlice | None = None  # the current one, if models time-share the devices
    awake: bool = False  # whether its engine uses the memory of shared devices

    def __post_init__(self, loops: list[Loop]) -> None:
        self.recorder = SpanRecorder(self.spec.worker.name)
        self.weights = WeightLoops(loops, self.spec, self.context, self.recorder, self._enter, self._wake)
        self.tap = SampleTap(self.spec.worker.rank, self.spec.worker.world)

    def _enter(self, step: int, activity: Activity) -> None:
        self.on_enter(step, activity)

    def load(self) -> None:
        """Load the engine and start the nodes. Raises errors of loading here, before the first step."""
        if self.spec.model is not None:
            with forbid_downloads():
                self.context.engine = self.slot.load(self.spec.model, self.context)
        self.stages = {node.name: checked_stage(node.name, node.operation.start(self.context)) for node in self.spec.nodes}

    def step(self, step: int) -> None:
        """Fire every node, once or for each chunk of the batch."""
        for name, chunk in self.spec.firings:
            self.fire(self.spec.node(name), step, chunk)

    def fire(self, node: NodeSpec, step: int, chunk: int = 0) -> None:
        """Fire one node, for a step or for one chunk of its batch."""
        firing = Firing(node, step, chunk)
        self._wait_for_turn(firing)
        self._load_weights(firing)
        written = self._run(firing, self._take_inputs(firing))
        self._put(node, firing.message, written)
        self.tap.keep(node, step, chunk, written)  # after `put`, so that no reader waits for it
        self._release_inputs(firing)
        self._publish_weights(firing)

    def _wait_for_turn(self, firing: Firing) -> None:
        """Wait for the previous node of the pool; if engines take turns, it has released its memory by then."""
        self.recorder.begin(firing.step)
        self.time_slice = self.spec.time_slice(firing.node.name, firing.chunk)
        self._take(firing, "order")

    def _load_weights(self, firing: Firing) -> None:
        """Load the version of each edge that no earlier node of this worker uses."""
        for loop in self.weights.loops_loaded_by(firing.node.name) if firing.chunk == 0 else ():
            self.doing = firing.node.name
            self.weights.load(loop, firing.node.name, firing.step)

    def _take_inputs(self, firing: Firing) -> Columns:
        """Take the node's inputs from its channels, and measure their staleness if the node trains on them."""
        columns = self._take(firing, "batch") | self._take(firing, "earlier")
        publishing = [loop for loop in self.weights.written_by(firing.node.name) if loop.due is None]
        if publishing:  # the deepest edge is the rollout's; other edges lead to nodes that only read the batch on its way
            behind = staleness(columns, firing.step, max(publishing, key=lambda loop: loop.depth))
            self.chunk_metrics.setdefault(firing.node.name, []).append(behind)
        return columns

    def _run(self, firing: Firing, columns: Columns) -> Columns:
        """Run the node's work, with the memory of the devices if it is due; time it, and check its results."""
        node, step = firing.node, firing.step
        self.doing = node.name
        if firing.due:
            self._wake(step)
        if self.spec.probe == (node.name, step) and node.chunks == 1 and not node.traits.looks_ahead:
            self._probe(node, step, columns)
        self.on_enter(step, Activity("fire", node.name))
        self.context.arrivals = self.weights.arrivals(node.name, step)
        self.context.waiting = partial(self.recorder.span, node.name, "tools", step)
        self.recorder.carry(node.name, step)
        with self.recorder.span(fire_event(node.name, firing.chunk, node.chunks), "fire", step) if firing.due else nullcontext():
            fired = self._call_stage(firing, columns)
        if self.time_slice is not None and self.time_slice.firings[-1] == (node.name, firing.chunk):  # before the pool's next node may fire
            self._sleep(self.time_slice, step)
        written, metrics = fired_parts(fired)
        self._record(firing, written, metrics)
        return copy_views(written, columns)

    def _call_stage(self, firing: Firing, columns: Columns) -> Fired:
        """Call the node's stage; if it yields its batch in chunks, run it until the next chunk is ready."""
        stage = self.stages[firing.node.name]
        if not isinstance(stage, ChunkedStage):
            return stage(firing.step, columns)
        if firing.chunk == 0:
            self.streams[firing.node.name] = stage.chunks(firing.step, columns)
        return next(self.streams[firing.node.name])

    def _record(self, firing: Firing, written: Columns, metrics: Metrics) -> None:
        """Check the results of a firing, and keep its metrics and token counts for the report of the step."""
        node = firing.node
        if node.writes:
            checked_columns(node.name, node.writes, written, node.count if self.spec.worker.world == 1 else None)
        self.chunk_metrics.setdefault(node.name, []).append(checked_metrics(node.name, metrics))
        if firing.ends_batch:
            self.metrics.update({node.front + name: value for name, value in reduce_metrics(self.chunk_metrics.pop(node.name)).items()})
        if node.traits.work == "generate" and node.due is None:
            self.sampled.append(count_sampled_tokens(node.name, firing.step, self.spec.worker.name, written))

    def _release_inputs(self, firing: Firing) -> None:
        """Release the slots of the node's inputs: of a chunk at once, of a whole batch after its last chunk."""
        for box in self.mailbox.read_by(firing.node.name):
            messages = firing.messages(box.channel)
            if len(messages) < box.channel.chunks or firing.ends_batch:
                box.release(firing.node.name, messages)

    def _publish_weights(self, firing: Firing) -> None:
        """Publish the weights that the node has trained, after the last chunk of its batch."""
        if not firing.ends_batch:
            return
        self.recorder.carry(firing.node.name, firing.step)
        self.weights.publish(firing.node.name, firing.step)

    def _wake(self, step: int) -> None:
        """Wake an engine that time-shares its devices, unless it is awake."""
        if self.time_slice is None or self.awake:
            return
        self.recorder.carry(self.doing, step)
        self.on_enter(step, Activity("wake", self.time_slice.firings[0][0]))
        with self.recorder.span(self.time_slice.wake, "wake", step):
            self.context.engine.wake()
        self.awake = True

    def _sleep(self, time_slice: TimeSlice, step: int) -> None:
        """Put an engine that time-shares its devices to sleep, unless it sleeps because nothing was due."""
        if not self.awake:
            return
        self.on_enter(step, Activity("sleep", time_slice.firings[-1][0]))
        with self.recorder.span(time_slice.sleep, "sleep", step) as moved:
            moved.append(self.context.engine.sleep() or 0)
        self.awake = False

    def _probe(self, node: NodeSpec, step: int, columns: Columns) -> None:
        """Fire a node that has killed its worker at this step, for one prompt after another, and drop the results."""
        stage: Any = self.stages[node.name]
        before = stage.state() if isinstance(stage, Stateful) else None
        rank, world, count = self.context.rank, self.context.world, self.spec.prompts
        mine = rows_of_rank(count, rank, world) if node.traits.work == "generate" else range(count)
        self.context.rank, self.context.world = 0, 1
        for prompt in mine:
            self.on_enter(step, Activity("probe", node.name, prompt=prompt))
            stage(
                step,
                {name: column[len(column) * prompt // count : len(column) * (prompt + 1) // count] for name, column in columns.items()},
            )
        self.context.rank, self.context.world = rank, world
        if before is not None:
            stage.load_state(before)

    def _take(self, firing: Firing, kind: Literal["batch", "order", "earlier"]) -> dict[str, Column]:
        """Take messages of the node's channels of one kind as columns: with the node's names, repeated rows, and only its chunk."""
        node, step, columns = firing.node, firing.step, dict[str, Column]()
        for box in (box for box in self.mailbox.read_by(node.name) if box.channel.kind == kind):
            wanted = firing.messages(box.channel)
            if wanted.start < 0 or (kind == "order" and wanted.start < self.spec.begin[box.channel.writer]):
                continue
            self.on_enter(step, Activity("take", node.name, box.channel.name))
            self.doing = node.name
            if step == self.spec.first and firing.chunk == 0 and node.name == box.users[0]:
                self._drop(box)
            with self.recorder.time_transfer(box.channel.name, "wait", box.blocked_s, (node.name, "carry"), step):
                batch = box.take(wanted, self.spec.deadline_s)
            for column, name, repeat in node.columns.get(box.channel.writer, ()) if kind != "order" else ():
                columns[name] = repeat_rows(node.rows(batch[column], box.channel, firing.chunk), repeat)
        return columns

    def _drop(self, box: Inbox) -> None:
        """Drop the messages that this worker, but not every reader of the channel, had read before the checkpoint."""
        chunks, begin = box.channel.chunks, [self.spec.begin[reader] for reader in box.channel.readers]
        for message in range(min(begin) * chunks, self.spec.first * chunks) if box.channel.kind == "batch" else ():
            box.take((message,), self.spec.deadline_s)
            box.release(box.users[-1], (message,))

    def reopen(self, step: int, opened: Mapping[int, Mapping[str, Sequence[Columns]]]) -> None:
        """Resume from a checkpoint after `step` steps: put its open batches into the channels again, and publish its weights."""
        for at in sorted(opened):
            for node in self.spec.nodes:
                for chunk, columns in enumerate(opened[at].get(node.name, ())):
                    self._put(node, at * node.chunks + chunk, columns, again=True)
        self.weights.republish(step)
        self.kept = {}

    def _put(self, node: NodeSpec, message: int, columns: Columns, *, again: bool = False) -> None:
        """Put a batch into its node's channels, and tell the pool's next node to fire, unless this puts the batch `again`."""
        if self.spec.saving is not None and node.name in self.spec.saving.open:
            self.kept.setdefault(node.name, []).append({n: c.clone() if isinstance(c, torch.Tensor) else c for n, c in columns.items()})
        step = message // node.chunks
        for box in self.mailbox.written_by(node.name):
            read_at = (message + box.channel.credits) // box.channel.chunks
            if read_at < min(self.spec.begin[reader] for reader in box.channel.readers):
                continue  # read before the checkpoint from which this run resumed, or no message
            if again and box.channel.kind == "order":
                continue
            self.on_enter(step, Activity("put", node.name, box.channel.name))
            with self.recorder.time_transfer(box.channel.name, "room", box.blocked_s, (node.name, "carry"), step):
                box.put(message, columns, self.spec.deadline_s)

    def report(self) -> tuple[dict[str, float], list[Span]]:
        """Return the metrics and spans since the last report."""
        metrics, self.metrics = self.metrics, {}
        return metrics, self.recorder.take()

    def take_token_counts(self) -> list[Sampled]:
        """Return the counts of sampled tokens since the last report."""
        found, self.sampled = self.sampled, []
        return found

    def close(self, *, keep: bool = False) -> None:
        """Close the ends and the engine; with `keep`, a slot that keeps engines holds it instead."""
        self.mailbox.close()
        self.weights.close()
        if self.context.engine is not None:
            self.slot.end(self.context.engine, keep=keep)


def checked_stage(node: str, stage: Any) -> Stage | ChunkedStage:
    """Check the result of an operation's `start`. Raises GraphError if it is not callable, or has only one method of `Stateful`."""
    if isinstance(stage, ChunkedStage):
        return stage
    if not callable(stage):
        raise GraphError(
            f"node '{node}': start(context) returned {show_value(stage)}; it must return a function of (step, columns), called at each "
            "firing"
        )
    if isinstance(stage, HasState) and not isinstance(stage, Stateful):
        raise GraphError(f"node '{node}' has a state() for checkpoints and no load_state(state) to resume from it; add the other one")
    found: Stage = stage
    return found


def copy_views(written: Columns, read: Columns) -> Columns:
    """Copy the written columns that are views of read columns, whose slots are released when the firing ends."""
    slots = {column.untyped_storage().data_ptr() for column in read.values() if isinstance(column, torch.Tensor)}
    return {
        name: column.clone() if isinstance(column, torch.Tensor) and column.untyped_storage().data_ptr() in slots else column
        for name, column in written.items()
    }


def count_sampled_tokens(node: str, step: int, worker: str, columns: Columns) -> Sampled:
    """Count the tokens that a node has sampled; none without masks among its columns."""
    responses, prompts = columns.get("response_mask"), columns.get("prompt_mask")
    lengths = responses.sum(-1).tolist() if isinstance(responses, torch.Tensor) and len(responses) else []
    prompt_tokens = int(prompts.sum()) if isinstance(prompts, torch.Tensor) else 0
    return Sampled(node, step, worker, prompt_tokens, tuple(lengths))


def staleness(columns: Mapping[str, Column], step: int, loop: PlannedLoop) -> dict[str, float]:
    """Measure by how many versions the tokens of a batch are behind; tokens that no version wrote, e.g. of examples, do not count.

    Raises StalenessError if the oldest exceeds the bound.
    """
    fronts = [name.removesuffix("weight_version") for name in columns if name.rpartition(".")[2] == "weight_version"]
    behind = torch.cat([step - _versions(columns, front) for front in fronts] or [torch.zeros(0)])
    if behind.numel() == 0:
        return {"staleness/max": 0.0, "staleness/mean": 0.0}
    oldest = int(behind.max())
    if oldest > loop.depth:
        raise StalenessError(
            f"node '{loop.writer}' got a batch at step {step} whose oldest token is {oldest} versions behind, but '{loop.name}' has "
            f"depth {loop.depth}: the plan's count of credits was broken, which is a bug in rlgraph; please report it with the plan"
        )
    return {"staleness/max": float(oldest), "staleness/mean": float(behind.float().mean())}


def _versions(columns: Mapping[str, Column], front: str) -> torch.Tensor:
    mask, versions = columns[f"{front}response_mask"], columns[f"{front}weight_version"]
    assert isinstance(mask, torch.Tensor)
    assert isinstance(versions, torch.Tensor)
    return versions[mask]
