"""A discrete-event simulator of the runtime's own rules, which knows nothing of a schedule's dependencies.

Each worker is a process that does what `rlgraph.runtime.worker.executor` does: fire in order, wait where it takes, put into bounded
channels, give slots back when its firing ends, publish last. A thread receives weights where there are two buffers. The
driver ticks a step once the one that lies a window before it is reported. Of a plan it takes the workers, channels, loops,
the order of firing and the seconds of each event.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop

Await = float | Callable[[], bool]  # seconds to spend, or what must hold before going on
Process = Iterator[Await]


@dataclass
class Channel:
    """Messages put so far, and how many each reading worker has given back."""

    plan: PlannedChannel
    users: dict[str, list[str]]  # of each reading worker its nodes, in firing order
    put: int = 0
    released: dict[str, int] = field(default_factory=dict)
    held: dict[str, set[int]] = field(default_factory=dict)

    def room(self) -> bool:
        return self.put - min(self.released.values()) < self.plan.slots


@dataclass
class Weights:
    """Versions published so far; of each reader how many it has received, and has loaded."""

    plan: PlannedLoop
    readers: list[str]
    published: int = 0
    received: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)


class Simulator:
    """Plays a plan for `steps` steps; `started` and `worked` are by (event, step), `reported` by step.

    `window` is how many steps the driver keeps in flight: those of the plan unless given.
    """

    def __init__(self, plan: Plan, steps: int, window: int | None = None) -> None:
        self.plan, self.steps, self.window = plan, steps, window or plan.window
        self.now = 0.0
        self.started: dict[tuple[str, int], float] = {}
        self.worked: dict[tuple[str, int], float] = {}
        self.reported: list[float] = []
        self.finished = {w.name: 0 for w in plan.workers if w.rank == 0}
        self.home = {node: w.name for w in plan.workers if w.rank == 0 for node in w.nodes}
        self.seconds = {event.name: event.seconds for event in plan.schedule.events}
        self.fires = {w: [e for e in plan.schedule.events if e.kind == "fire" and self.home[e.node] == w] for w in self.finished}
        self.around = {e.kind + " " + e.node + str(e.chunk): e.name for e in plan.schedule.events if e.kind in ("wake", "sleep")}
        self.channels = [self._channel(channel) for channel in plan.channels]
        self.nodes = {node.name: node for node in plan.nodes}
        self.read = {
            (worker, node, kind): [c for c in self.channels if c.plan.kind == kind and node in c.users.get(worker, ())]
            for node, worker in self.home.items()
            for kind in ("order", "batch")
        }
        self.written = {node: [c for c in self.channels if c.plan.writer == node] for node in self.home}
        self.loops = [Weights(p, list(dict.fromkeys(self.home[r] for r in p.readers))) for p in plan.loops]
        self.awake: set[str] = set()
        self.ahead = plan.steps_ahead()
        self._run()

    def period(self, rounds: int) -> float:
        """Seconds a step over the last `rounds` steps."""
        return (self.reported[-1] - self.reported[-1 - rounds]) / rounds

    def _channel(self, plan: PlannedChannel) -> Channel:
        users: dict[str, list[str]] = {}
        for worker in self.plan.workers:
            if worker.rank == 0 and (names := [n for n in worker.nodes if n in plan.readers]):
                users[worker.name] = names
        skipped = max(-plan.credits, 0)  # are never sent
        return Channel(plan, users, skipped, dict.fromkeys(users, skipped), {worker: set() for worker in users})

    def _run(self) -> None:
        tickets, heap, blocked = count(), list[tuple[float, int, Process]](), list[tuple[Callable[[], bool], Process]]()
        processes = [self._worker(name) for name in self.finished]
        processes += [self._receiver(w, r) for w in self.loops if w.plan.buffers == 2 for r in w.readers]
        heap += [(0.0, next(tickets), process) for process in processes]
        while heap:
            self.now, _, process = heapq.heappop(heap)
            ready = [process]
            while ready:
                process = ready.pop()
                for wanted in process:
                    if callable(wanted):
                        if wanted():
                            continue
                        blocked.append((wanted, process))
                    else:
                        if not wanted:
                            continue
                        heapq.heappush(heap, (self.now + wanted, next(tickets), process))
                    break
                while len(self.reported) < min(done - self.ahead[name] for name, done in self.finished.items()):
                    self.reported.append(self.now)
                if not ready:
                    holding = [holds() for holds, _ in blocked]
                    ready = [p for (_, p), holds in zip(blocked, holding, strict=True) if holds]
                    blocked = [each for each, holds in zip(blocked, holding, strict=True) if not holds] if ready else blocked
        assert len(self.reported) == self.steps, "a deadlock"

    def _worker(self, name: str) -> Process:
        for step in range(self.steps + self.ahead[name]):
            yield lambda step=step: step < len(self.reported) + self.window + self.ahead[name]  # type: ignore[misc]
            for event in self.fires[name]:
                yield from self._fire(name, event.name, event.node, event.chunk, step)
            self.finished[name] += 1

    def _fire(self, worker: str, event: str, node: str, chunk: int, step: int) -> Process:
        planned = self.nodes[node]
        yield from self._take(worker, node, chunk, step, "order")
        for weights in self.loops:
            users = [n for n in self.plan.worker(worker).nodes if n in weights.plan.readers]
            if users and users[0] == node and chunk == 0:
                yield from self._load(weights, worker, node, chunk, step)
        yield from self._take(worker, node, chunk, step, "batch")
        yield from self._wake(worker, node, chunk)
        self.started[event, step] = self.now
        yield self.seconds[event]
        self.worked[event, step] = self.now
        if (sleep := self.around.get(f"sleep {node}{chunk}")) is not None:
            yield self.seconds[sleep]
            self.awake.discard(worker)
        message = step * planned.chunks + chunk
        for channel in (c for c in self.written[node] if message + c.plan.credits >= 0):
            yield channel.room
            assert channel.put == message
            channel.put += 1
        for channel in (*self.read[worker, node, "order"], *self.read[worker, node, "batch"]):
            wanted = self._messages(channel.plan, node, step, chunk)
            if node == channel.users[worker][-1] and (len(wanted) < channel.plan.chunks or chunk == planned.chunks - 1):
                channel.released[worker] += len(channel.held[worker] & set(wanted))
                channel.held[worker] -= set(wanted)
        for weights in self.loops:
            if weights.plan.writer == node and chunk == planned.chunks - 1:
                yield self.seconds[f"publish {weights.plan.name}"]
                weights.published += 1

    def _take(self, worker: str, node: str, chunk: int, step: int, kind: str) -> Process:
        for channel in self.read[worker, node, kind]:
            wanted = self._messages(channel.plan, node, step, chunk)
            if wanted.start < 0:
                continue
            yield lambda channel=channel, wanted=wanted: channel.put >= wanted.stop  # type: ignore[misc]
            channel.held[worker] |= {m for m in wanted if m >= channel.released[worker]}

    def _messages(self, channel: PlannedChannel, node: str, step: int, chunk: int) -> range:
        """Of a channel whose chunks the node works on, its chunk; else all of a step."""
        first = step * channel.chunks - channel.credits
        by_chunk = channel.chunks == self.nodes[node].chunks > 1 and channel.stream is not None
        return range(first + chunk, first + chunk + 1) if by_chunk else range(first, first + channel.chunks)

    def _load(self, weights: Weights, worker: str, node: str, chunk: int, step: int) -> Process:
        version = step - weights.plan.depth
        if weights.plan.buffers == 2:
            yield lambda: weights.received.get(worker, 0) > step
        else:
            yield lambda: weights.published >= version
        yield from self._wake(worker, node, chunk)
        name = f"load {weights.plan.name} for {node}"
        yield self.seconds[name]
        weights.loaded[worker] = step + 1

    def _receiver(self, weights: Weights, worker: str) -> Process:
        node = next(n for n in self.plan.worker(worker).nodes if n in weights.plan.readers)
        for step in range(self.steps + self.ahead[worker]):
            yield lambda step=step: weights.published >= step - weights.plan.depth  # type: ignore[misc]
            yield lambda step=step: weights.loaded.get(worker, 0) >= step  # type: ignore[misc]
            yield self.seconds[f"receive {weights.plan.name} for {node}"]
            weights.received[worker] = step + 1

    def _wake(self, worker: str, node: str, chunk: int) -> Process:
        wake = self.around.get(f"wake {node}{chunk}")
        if wake is not None and worker not in self.awake:
            self.awake.add(worker)
            yield self.seconds[wake]
