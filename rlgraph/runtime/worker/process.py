"""Run a worker in a separate process: it connects its channels, fires each step that the driver ticks, and reports."""

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlgraph import notices
from rlgraph.channels.api import Onward, Reader, Writer, open_onward, open_reader, open_writer
from rlgraph.channels.host.connection import Connection, bound, dial, listen, talk_at
from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter
from rlgraph.engines.hf.export import write_shards
from rlgraph.engines.lora import HostBase
from rlgraph.errors import ChannelBroken, ChannelClosed, ChannelError, ChannelTimeout, short
from rlgraph.nodes.base import Context
from rlgraph.plan.plan import PlannedLoop
from rlgraph.plan.schedule import Span
from rlgraph.runtime import messages
from rlgraph.runtime.checkpoint.export import boxes
from rlgraph.runtime.checkpoint.gathering import use_job_folder
from rlgraph.runtime.worker.activity import IDLE, Activity, StatusWriter, offer_stacks, status_path
from rlgraph.runtime.worker.executor import EngineSlot, Inbox, Mailbox, Outbox, Worker
from rlgraph.runtime.worker.progress import Progress
from rlgraph.runtime.worker.spec import EdgeEndpoints, WorkerSpec
from rlgraph.runtime.worker.weight_loops import Loop


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Pause Python's garbage collector while an engine loads, which it would slow by a fifth; later it skips the loaded objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


class Process:
    """The body of an actor: call `prepare` once, then `run`, which ends when the driver stops it."""

    def __init__(self, spec: WorkerSpec, driver: str, slot: EngineSlot | None = None) -> None:
        notices.here.carried = True
        self.slot = slot or EngineSlot()
        if spec.listen_at:
            talk_at(spec.listen_at)
        self.spec = spec
        self.name = spec.worker.name
        offer_stacks(spec.folder, self.name)
        self.status = StatusWriter(status_path(spec.folder, self.name))
        sock = dial(f"worker '{self.name}'", driver, spec.deadline_s)
        self.control = Connection(sock, spec.authkey, spec.deadline_s, server=False, encrypt=spec.encrypt)
        messages.send(self.control, messages.Hello(self.name, os.getpid()))
        self.mailbox = Mailbox()
        self.listen_fd = -1
        self.addresses: dict[str, str] = {}
        self.onward: dict[str, Onward] = {}  # by a writer's address: where others receive its messages from this worker
        self.here: dict[str, Any] = {}  # shared by the channel ends of this process
        self.progress: Progress | None = None
        self._speaking = threading.Lock()  # the thread that writes a checkpoint also sends messages
        self.failed = False

    def prepare(self) -> None:
        """Listen for readers and send the addresses to the driver; after its answer connect, load the engine, and report."""
        try:
            self._open()
            messages.send(self.control, messages.Opened(self.name, self.addresses, self.spec.saves_remotely))
            joined = messages.receive(self.control)
            if isinstance(joined, messages.Join):
                self.addresses = joined.addresses
                self._start()
        except Exception as error:  # noqa: BLE001 (the outer edge of a worker)
            self._fail(-1, "start", error)
            return
        self.status.enter(-1, IDLE)
        messages.send(self.control, messages.Ready(self.name))

    def _open(self) -> None:
        self.status.enter(-1, Activity("open"))
        self.spec = use_job_folder(self.spec)
        for channel, posts in self.spec.channels:
            self.mailbox.outboxes += [Outbox(channel, self._listen(post)) for post in posts if post.writer == self.name]
        for post in (post for post in self.spec.posts if post.passes_on(self.name)):
            self.onward[post.address] = onward = open_onward(post.transport, post.listener(self.spec, self.here))
            self.addresses[post.place(self.name)] = onward.address
        worker = self.spec.worker
        if self.spec.listen_at and worker.model and worker.rank == 0 and worker.world > 1:
            listener = listen(f"ranks of {worker.model}", f"{self.spec.listen_at}:0", worker.world)
            self.addresses[f"ranks of {worker.model}"] = f"tcp://{bound(listener)}"
            self.listen_fd = listener.detach()  # the engine closes it; until then no other process can use the port
        self.weights = {plan.name: self._listen(post) for plan, posts, _ in self.spec.loops for post in posts if post.writer == self.name}

    def _listen(self, post: EdgeEndpoints) -> Writer:
        writer = open_writer(post.transport, post.listener(self.spec, self.here))
        self.addresses[post.address] = writer.address
        return writer

    def _connect(self, post: EdgeEndpoints) -> Reader:
        site = post.reader(self.spec, self.here, self.addresses, self.onward.get(post.address))
        return open_reader(post.transport, site)

    def _start(self) -> None:
        import torch

        self.status.enter(-1, Activity("connect"))
        torch.set_num_threads(self.spec.worker.threads)
        for channel, posts in self.spec.channels:
            users = tuple(node.name for node in self.spec.nodes if node.name in channel.readers)
            if users:
                self.mailbox.inboxes.append(Inbox(channel, [self._connect(post) for post in posts], users))
        loops = [self._loop(*loop) for loop in self.spec.loops]
        worker = self.spec.worker
        rendezvous = self.addresses.get(f"ranks of {worker.model}", f"file://{self.spec.folder}/{worker.model}.group")
        device = "cuda" if worker.gpus else "cpu"
        context = Context(
            rank=worker.rank,
            world=worker.world,
            threads=worker.threads,
            rendezvous=rendezvous,
            listen_fd=self.listen_fd,
            device=device,
            shares_devices=self.spec.shares_devices,
            copies=self.spec.copies,
            merging_bytes=self.spec.merging_bytes,
            set_aside=self.spec.set_aside,
            sequences=self.spec.sequences,
            exact=self.spec.exact,
            shared_base=HostBase(self.spec.shared_base) if self.spec.shared_base else None,
            report_progress=self.status.count,
        )
        self.progress = Progress(Worker(self.spec, self.mailbox, loops, context, self.status.enter, self.slot), self._tell)
        self.status.enter(-1, Activity("load_engine"))
        with no_collector():
            self.progress.load()

    def _loop(self, plan: PlannedLoop, posts: tuple[EdgeEndpoints, ...], dtype: str) -> Loop:
        import torch

        loop = Loop(plan)
        if plan.name in self.weights:
            loop.writer = WeightsWriter(self.weights[plan.name], getattr(torch, dtype), plan.bucket_bytes, plan.checksum)
        if any(node.name in plan.readers for node in self.spec.nodes):
            loop.reader = WeightsReader(
                [self._connect(post) for post in posts], plan.buffers, self.spec.resume.step if self.spec.resume else 1
            )
        return loop

    def run(self) -> None:
        """Fire every node for each step that the driver ticks, and report, until the driver stops it."""
        step = self.spec.resume.step if self.spec.resume else 0
        while self._await_tick(step):
            if self.progress is not None and not self.failed:  # on a failure the last activity stays, for the driver to see
                self._fire(step, self.progress)
            step += 1

    def _fire(self, step: int, progress: Progress) -> None:
        try:
            metrics, spans = progress.step(step)
            self.status.enter(step, IDLE)
            self._report(step, metrics, spans)
        except Exception as error:  # noqa: BLE001 (the outer edge of a worker)
            self._fail(step, progress.worker.doing, error)

    def _report(self, step: int, metrics: Mapping[str, float], spans: list[Span]) -> None:
        assert self.progress is not None
        ends, worker = self.mailbox.statistics(), self.progress.worker
        slots = [messages.Slots(end, seen.used, seen.peak_used) for end, seen in ends.items()]
        sampled, published = worker.take_token_counts(), worker.weights.published_bytes()
        for rows in self.progress.taken_samples():  # before the report, so that the driver has all rows of a step when it yields it
            self._tell(rows)
        self._tell(messages.Report(self.name, step, dict(metrics), spans, slots, sampled, published, notices.here.take_new()))

    def _save(self, step: int) -> None:
        assert self.progress is not None
        try:
            self.progress.save(step)
        except Exception as error:  # noqa: BLE001 (the outer edge of a worker)
            self._fail(step, self.progress.worker.doing, error)

    def _export(self, step: int, order: messages.DescribeShards | messages.WriteShards) -> None:
        try:
            if isinstance(order, messages.DescribeShards):
                self._describe_shards()
            else:
                self._write_shards(order)
        except Exception as error:  # noqa: BLE001 (the outer edge of a worker)
            self._fail(step, "export", error)

    def _describe_shards(self) -> None:
        assert self.progress is not None
        shards = self.progress.worker.context.engine.weight_shards()
        self._tell(messages.ShardsDescribed(self.name, self.progress.fired, boxes(shards)))

    def _write_shards(self, order: messages.WriteShards) -> None:
        assert self.progress is not None
        step = self.progress.fired

        def on_bytes(count: int) -> None:  # enters the activity again, so that a large export does not look like a stall
            self.status.enter(step, Activity("export"))

        on_bytes(0)
        try:
            if not Path(order.folder).is_dir():
                raise OSError(
                    f"host '{socket.gethostname()}' does not see '{order.folder}'; pass a folder that all hosts share, or export a "
                    "checkpoint with `rg.runs.export`, which needs only the driver's host"
                )
            write_shards(Path(order.folder), order.layout, self.progress.worker.context.engine.weight_shards(), on_bytes)
        except OSError as error:
            self._tell(messages.ShardsWritten(self.name, str(error), error.errno or 0))
        else:
            self._tell(messages.ShardsWritten(self.name))
        self.status.enter(step, IDLE)

    def _tell(self, message: messages.Message) -> None:
        with self._speaking:
            messages.send(self.control, message)

    def _fail(self, step: int, node: str, error: Exception) -> None:
        """Report a failure, first to the peers, so that none waits in vain, then to the driver."""
        self.failed = True
        reason = f"stopped, since node '{node}' of worker '{self.name}' failed with {type(error).__name__}"
        told = isinstance(error, ChannelBroken | ChannelClosed | ChannelTimeout)  # by the peer, or later by the driver
        if not told:
            self.mailbox.fail(reason)
        name, trace = type(error).__name__, short(error)
        channel, peer, host = (error.channel, error.peer, error.host) if isinstance(error, ChannelError) else ("", 0, "")
        with contextlib.suppress(OSError):  # the driver has ended: the wait for its next message detects it
            self._tell(messages.Failure(self.name, step, node, name, str(error), trace, channel, peer, host))

    def _await_tick(self, step: int) -> bool:
        """Wait for the tick of `step`, and do the driver's other requests meanwhile; False once it stops this worker."""
        while True:
            try:
                message = messages.receive(self.control)
            except (EOFError, OSError):
                os._exit(1)  # the driver has ended, so there is nobody to report to
            if isinstance(message, messages.Go):
                return True
            if isinstance(message, messages.SampleRequest) and self.progress is not None:
                self.progress.worker.tap.request = message
            if isinstance(message, messages.ProfileRequest) and self.progress is not None:
                self.progress.profiler.request = message
            if isinstance(message, messages.Save):
                self._save(message.step)
            if isinstance(message, messages.DescribeShards | messages.WriteShards):
                self._export(step - 1, message)
            if isinstance(message, messages.Shutdown):
                if self.progress is not None:
                    self.progress.close(keep=message.keep)
                self.control.close()
                return False


def serve(spec: WorkerSpec, driver: str, slot: EngineSlot | None = None) -> None:
    """Run a worker without Ray until the driver stops it."""
    worker = Process(spec, driver, slot)
    worker.prepare()
    worker.run()
