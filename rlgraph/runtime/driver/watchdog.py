"""Watch the workers while none sends a message: find the stuck worker, the worker to blame, or the lost host."""

import logging
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from rlgraph.errors import ChannelBroken, ChannelTimeout, WorkerDied
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.plan.schedule import WORK, Span
from rlgraph.runtime.driver.hosts import Hosts
from rlgraph.runtime.messages import Failure, Report
from rlgraph.runtime.worker.activity import Heartbeat, describe_activity, edge_of, event_name, of_interest

# Find the worker that keeps others waiting: follow the waits from a worker that waited too long to a worker that does not wait.
#
# If `score` waits for channel 'rollout', its writer `generator` waits for channel 'prompts', and `prompts` runs its node, then `prompts`
# is to blame, whichever wait times out first.


@dataclass(frozen=True)
class Wait:
    """The wait of a worker for the workers `of`: for a message or a version of weights, or for `room` that they must free."""

    end: PlannedChannel | PlannedLoop
    of: tuple[str, ...]
    room: bool
    version: int = 0  # of weights


def wait_of(plan: Plan, state: Heartbeat) -> Wait | None:
    """Find what a worker waits for; None if it works. A worker that publishes may work or wait."""
    activity = state.activity
    end = edge_of(plan, activity) if activity.waits or activity.kind == "publish" else None
    if end is None:
        return None
    room = activity.kind in ("put", "publish")
    nodes = end.readers if room else (end.writer,)
    of = tuple(dict.fromkeys(worker for node in nodes for worker in plan.node(node).workers))
    return Wait(end, of, room, activity.version)


def keeps_slots(wait: Wait, writer: Heartbeat, reader: Heartbeat) -> bool:
    """Whether a reader has finished with a message and still holds its slot, for which the writer waits."""
    if isinstance(wait.end, PlannedChannel):
        wanted = (writer.step + 1) * wait.end.chunks - 1 - wait.end.slots  # or an earlier message, if a batch has chunks
        return (reader.step + reader.activity.idle) * wait.end.chunks - wait.end.credits > wanted
    if wait.end.due is not None or wait.end.latest:
        return False
    receives = reader.activity.kind == "receive" and reader.activity.edge == wait.end.name
    loaded = reader.activity.version - 1 if receives else reader.step - 1 - wait.end.depth
    return loaded >= max(wait.version - wait.end.slots, 1)


@dataclass(frozen=True)
class Culprit:
    """The worker that keeps another one waiting, and the channel whose slots it holds, if this is the reason."""

    worker: str
    keeps: str | None = None


def culprit(plan: Plan, states: Mapping[str, Heartbeat], waiting: str, held: Mapping[tuple[str, str], int]) -> Culprit | None:
    """Find the worker at the end of a chain of waits; None if all known workers wait for one another.

    `held` counts the slots that a worker held between its last two steps, by worker and channel.
    """
    seen: set[str] = set()
    at_work: list[str] = []
    todo = [waiting]
    while todo:
        name = todo.pop(0)
        if name in seen or name not in states:
            continue
        seen.add(name)
        state = states[name]
        wait = None if state.stopped else wait_of(plan, state)
        if wait is None:
            at_work.append(name)
            continue
        others = [other for other in wait.of if other != name]
        for other in others if wait.room else ():
            known = other in states and not states[other].stopped
            if known and held.get((other, wait.end.name), 1) and keeps_slots(wait, state, states[other]):
                return Culprit(other, wait.end.name)
        if state.activity.kind == "publish" and name != waiting:
            at_work.append(name)
            continue
        todo += others
    found = max(at_work, key=lambda name: (states[name].stopped, not states[name].activity.idle, states[name].for_s), default=None)
    return Culprit(found) if found is not None else None


@dataclass(frozen=True)
class Cut:
    """Connections between living processes that ended; each of `workers` is an end of all of them."""

    workers: tuple[str, ...]
    channels: tuple[str, ...]


def find_disconnected(failures: Sequence[Failure], pids: Mapping[str, int]) -> Cut | None:
    """Find the worker that lost its channels, from its reports and its peers'; two workers if only one connection ended."""
    names = {pid: name for name, pid in pids.items()}
    lost = [(failure.worker, names.get(failure.peer), failure.channel) for failure in failures if failure.peer]
    ends: list[Collection[str]] = [{worker, peer} for worker, peer, _ in lost if peer is not None]
    if not ends:
        return None
    common = [name for name in pids if all(name in end for end in ends)]
    return Cut(tuple(common), tuple(dict.fromkeys(channel for _, _, channel in lost))) if common else None


# Watch the workers while none sends a message: warn about a slow node, find a stuck worker, and describe what every worker does.

log = logging.getLogger("rlgraph.watchdog")

LOOK_S = 0.25  # of silence between two looks; a look reads one small file per worker
SLOW = 5.0  # a firing that lasts this many medians is slow
SLOW_LEAST_S = 2.0
REMEMBERED = 50  # firings of which the median is computed
FIRST_S = 0.75  # a worker's wait ends this long after the deadline, so that the node for which it waits is named first
LATE_S = 2.0  # after the deadline: if the worker has not ended its wait by then, the driver does

Work: TypeAlias = tuple[str, str, str]  # the kind, node and edge of an event: all chunks of a batch count as one


@dataclass
class Watchdog:
    """Watches the pace of a job's workers. `states` and `stacks` ask the hosts."""

    plan: Plan
    deadline_s: float
    states: Callable[[], Mapping[str, Heartbeat]]
    stacks: Callable[[Collection[str]], Mapping[str, str]]
    used: dict[str, int] = field(default_factory=dict)  # occupied slots by channel, as last reported by the writer
    held: dict[tuple[str, str], int] = field(default_factory=dict)  # slots not yet released, by reading worker and channel
    _seconds: dict[Work, deque[tuple[int, float]]] = field(default_factory=dict)  # by step
    _warned: set[tuple[Work, int]] = field(default_factory=set)
    _stopped: dict[str, float] = field(default_factory=dict)  # when each process was first seen stopped

    def __post_init__(self) -> None:
        self._work: dict[str, Work] = {event.name: (event.kind, event.node, event.edge) for event in self.plan.schedule.events}

    def note(self, report: Report) -> None:
        """Record the durations of a worker's nodes, and how full its channels are."""
        for slots in report.slots:
            if slots.end.side == "put":
                self.used[slots.end.name] = slots.used
            else:
                self.held[report.worker, slots.end.name] = slots.used
        for span in report.spans:
            if span.kind in WORK - {"receive"} and span.name in self._work:
                self._note_span(self._work[span.name], span)

    def _note_span(self, work: Work, span: Span) -> None:
        """Record the longest firing of a step: the first chunk of a rollout lasts longest."""
        found = self._seconds.setdefault(work, deque(maxlen=REMEMBERED))
        before = found.pop()[1] if found and found[-1][0] == span.step else 0.0
        found.append((span.step, max(before, span.seconds)))

    def look(self, missing: Collection[str], since_s: float, deadline_s: float) -> None:
        """Warn about slow nodes; the driver has waited for the workers `missing` since `since_s`.

        Raises ChannelTimeout if one activity of a worker, or a stop of its process, lasts longer than the deadline.
        """
        waited_s = time.monotonic() - since_s
        states = self.states()
        self._check_stopped_workers(states)
        for worker in missing:
            state = states.get(worker)
            if state is None:
                if waited_s > deadline_s:
                    raise ChannelTimeout(f"worker '{worker}' has started nothing within {waited_s:.1f} s{self.account([worker])}")
                continue
            self._warn_if_slow(worker, state)
            for_s = min(state.for_s, waited_s) if state.activity.idle else state.for_s
            if for_s > deadline_s + (LATE_S if state.activity.waits else 0):
                raise self.timeout(worker, states)

    def _check_stopped_workers(self, states: Mapping[str, Heartbeat]) -> None:
        now = time.monotonic()
        for worker, state in states.items():
            if not state.stopped:
                self._stopped.pop(worker, None)
            elif worker not in self._stopped:
                self._stopped[worker] = now
                log.warning("worker '%s' is stopped; resume it with `kill -CONT`, or the job ends after %g s", worker, self.deadline_s)
            elif now - self._stopped[worker] > self.deadline_s:
                raise self.timeout(worker, states)

    def _warn_if_slow(self, worker: str, state: Heartbeat) -> None:
        activity = state.activity
        work = activity.kind, activity.node, activity.edge
        if not activity.works or (work, state.step) in self._warned:
            return
        usual = median(seconds for _, seconds in self._seconds[work]) if self._seconds.get(work) else None
        limit_s = self.deadline_s / 4 if usual is None else min(max(SLOW * usual, SLOW_LEAST_S), self.deadline_s / 2)
        if state.for_s > limit_s:
            self._warned.add((work, state.step))
            pace = "and has not finished a step before" if usual is None else f"its median is {usual:.2f} s"
            log.warning(
                "'%s' in worker '%s' has been at step %d for %.1f s, %s; at %g s the job ends with an error",
                event_name(activity, self.plan),
                worker,
                state.step,
                state.for_s,
                pace,
                self.deadline_s,
            )

    def timeout(self, worker: str, states: Mapping[str, Heartbeat], told: str = "") -> ChannelTimeout:
        """Make the error for a worker that waits or works for too long; it first names the worker that causes the wait.

        `told` is the waiting worker's message.
        """
        found = culprit(self.plan, states, worker, self.held) or Culprit(worker)
        guilty = states[found.worker]
        readers = [w for w, s in states.items() if w != found.worker and s.activity.waits]
        waits = worker if worker in readers else max(readers, key=lambda w: states[w].for_s, default=None)
        then = f"\n  worker '{waits}' has been {states[waits].describe(self.plan)}" if waits else ""
        concerned = [found.worker, *([waits] if waits and not told else [])]
        return ChannelTimeout(f"{self._accusation(found, guilty)}{then}{told}{self.account(concerned)}")

    def _accusation(self, found: Culprit, guilty: Heartbeat) -> str:
        activity, step = describe_activity(guilty.activity, self.plan), max(guilty.step, 0)
        doing = f"{activity}, step {step}, for {guilty.for_s:.1f} s; deadline_s is {self.deadline_s:g}"
        if found.keeps is not None:
            return f"worker '{found.worker}' has not given back the slots of channel '{found.keeps}', and has been {doing}"
        if guilty.stopped:
            return f"worker '{found.worker}' is stopped: its process gets no time (kill -STOP, Ctrl-Z, a debugger); it has been {doing}"
        return f"worker '{found.worker}' has been {doing}{': its next tick did not reach it' if guilty.activity.idle else ''}"

    def account(self, concerned: Collection[str]) -> str:
        """Describe what every worker does, how full the channels are, and the stacks of these workers; also write it to a file."""
        table = self.table()
        everyone = self.stacks([worker.name for worker in self.plan.workers])
        parts = [f"\n  worker '{name}', Python stacks:\n{_indent(of_interest(everyone[name]))}" for name in concerned if name in everyone]
        full = "\n\n".join(f"worker '{name}'\n{text}" for name, text in everyone.items())
        path = _write_private_file(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, graph '{self.plan.graph}'\n{table}\n\n{full}\n")
        return f"\n{table}{''.join(parts)}\n  the stacks of all workers are in {path}"

    def table(self) -> str:
        """Build a line per worker, with the oldest activity first, and a line per channel."""
        states = sorted(self.states().items(), key=lambda item: -item[1].for_s)
        lines = [f"  worker '{name}' has been {state.describe(self.plan)}" for name, state in states]
        ends = {channel.name: (channel.slots, channel.writer, channel.readers) for channel in self.plan.channels}
        ends |= {loop.name: (loop.slots, loop.writer, loop.readers) for loop in self.plan.loops}
        for name, (slots, writer, readers) in ends.items():
            used = self.used.get(name)
            fill = f"{used} of {slots} slots in use after the last report" if used is not None else f"{slots} slots, nothing reported yet"
            lines.append(f"  channel '{name}' ({writer} -> {', '.join(readers)}): {fill}")
        return "\n".join(lines)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _write_private_file(text: str) -> str:
    """Write a file that only this user can read; return its path, or why it could not be written."""
    try:
        handle, path = tempfile.mkstemp(prefix="rlgraph-stall-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return f"no file: {error}"
    return path


# Find the host that was lost, or the hosts between which the network is cut, from the driver's observations and the workers' reports.


def host_error(plan: Plan, hosts: Hosts, lost: Collection[int], why: str = "") -> WorkerDied:
    """Make the error for hosts that do not answer; `why` is the reason, if it is known."""
    names = " and ".join(hosts.name(host) for host in sorted(lost))
    workers = [worker for host in sorted(lost) for worker in hosts.on(host)]
    told = f"{names} {'was' if len(lost) == 1 else 'were'} lost, with worker{'s' * (len(workers) > 1)} {_quote_names(workers)}"
    silent_s = max(hosts.silent_s(host) for host in lost)
    asked = f"no answer for {silent_s:.1f} s" if silent_s else "connections to it ended without a word"
    advice = "it is down, frozen, or cut off from the network; start it again, with Ray on it"
    if len(hosts.addresses) - 1 == len(lost) > 1:
        advice = f"no other host answers, so look first at the network of the driver's own, {hosts.name(hosts.driver)}"
    nodes = [f"'{node}'" for worker in plan.workers if worker.name in workers for node in worker.nodes]
    return WorkerDied(f"{told}: {asked}; {advice}\n  nodes there: {', '.join(nodes)}{why}")


def connection_error(hosts: Hosts, failures: Sequence[Failure]) -> ChannelBroken | None:
    """Make the error for a connection between two hosts that ended although both answer; None if no worker reports one."""
    cuts: Counter[tuple[int, int]] = Counter()
    channels: dict[tuple[int, int], list[str]] = {}
    for failure in failures:
        if hosts.addresses.count(failure.host) == 1:  # in tests several hosts may share an address
            here, there = hosts.of[failure.worker], hosts.addresses.index(failure.host)
            ends = min(here, there), max(here, there)
            cuts[ends] += 1
            channels.setdefault(ends, []).append(failure.channel)
    if not cuts:
        return None
    (one, other), _ = cuts.most_common(1)[0]
    own = [list(hosts.on(host)) for host in (one, other)]
    names = sorted(set(channels[one, other]))
    return ChannelBroken(
        f"the network between {hosts.name(one)}, with {_quote_names(own[0])}, and {hosts.name(other)}, with {_quote_names(own[1])}, "
        "is cut: "
        f"the connection of channel{'s' * (len(names) > 1)} {_quote_names(names)} ended, and both hosts answer the driver\n"
        f"  worker '{failures[0].worker}': {failures[0].message}"
    )


def _quote_names(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names) or "none"
