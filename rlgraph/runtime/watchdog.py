"""Watches the workers while nothing is heard: warns about a slow node, finds the one that is stuck, writes down what all do."""

import logging
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from rlgraph.errors import ChannelTimeout
from rlgraph.planning.plan import Plan
from rlgraph.planning.schedule import WORK
from rlgraph.runtime.blame import Culprit, culprit
from rlgraph.runtime.messages import Report
from rlgraph.runtime.stacks import of_interest
from rlgraph.runtime.status import Doing

log = logging.getLogger("rlgraph.watchdog")

TAKEN = re.compile(r"take (.*?)(\[\d+\])?")
LOOK_S = 0.25  # of silence between two looks; a look reads one small file a worker
SLOW = 5.0  # a firing of so many medians is slow
SLOW_LEAST_S = 2.0
REMEMBERED = 50  # firings that a median is taken of
FIRST_S = 0.75  # a wait of a worker ends by itself so much after the deadline: by then the node that it waits for has been named
LATE_S = 2.0  # where it does not, it is the driver that ends it


@dataclass
class Watchdog:
    """What a job's driver knows of its workers' pace. `states` and `stacks` ask the hosts."""

    plan: Plan
    deadline_s: float
    states: Callable[[], Mapping[str, Doing]]
    stacks: Callable[[Collection[str]], Mapping[str, str]]
    used: dict[str, int] = field(default_factory=dict)  # slots by channel end, as last reported
    held: dict[tuple[str, str], int] = field(default_factory=dict)  # slots that a reading worker had not given back then, by channel
    _seconds: dict[str, deque[float]] = field(default_factory=dict)
    _warned: set[tuple[str, int]] = field(default_factory=set)
    _stopped: dict[str, float] = field(default_factory=dict)  # since when a process was seen to be

    def note(self, report: Report) -> None:
        """Take in how long the nodes of a worker took, and how full its channels are."""
        self.used.update(report.used)
        for end, count in report.used.items():
            if taken := TAKEN.fullmatch(end):
                self.held[report.worker, taken[1]] = count
        for span in report.spans:
            if span.kind in WORK - {"receive"}:
                self._seconds.setdefault(span.name, deque(maxlen=REMEMBERED)).append(span.end_s - span.start_s)

    def look(self, missing: Collection[str], since_s: float, deadline_s: float) -> None:
        """Warn about slow nodes; `missing` are the workers that the driver has waited for since `since_s`.

        Raises ChannelTimeout for a worker that does one thing for longer than the deadline, or is stopped for as long.
        """
        waited_s = time.monotonic() - since_s
        states = self.states()
        self._look_for_stopped(states)
        for worker in missing:
            doing = states.get(worker)
            if doing is None:
                if waited_s > deadline_s:
                    raise ChannelTimeout(f"worker '{worker}' has begun nothing within {waited_s:.1f} s{self.account([worker])}")
                continue
            self._warn_if_slow(worker, doing)
            for_s = min(doing.for_s, waited_s) if doing.idle else doing.for_s
            if for_s > deadline_s + (LATE_S if doing.waiting else 0):
                raise self.timeout(worker, states)

    def _look_for_stopped(self, states: Mapping[str, Doing]) -> None:
        now = time.monotonic()
        for worker, doing in states.items():
            if not doing.stopped:
                self._stopped.pop(worker, None)
            elif worker not in self._stopped:
                self._stopped[worker] = now
                log.warning("worker '%s' is stopped; let it go on with `kill -CONT`, or the job ends after %g s", worker, self.deadline_s)
            elif now - self._stopped[worker] > self.deadline_s:
                raise self.timeout(worker, states)

    def _warn_if_slow(self, worker: str, doing: Doing) -> None:
        node = doing.works
        if node is None or (node, doing.step) in self._warned:
            return
        usual = median(self._seconds[node]) if self._seconds.get(node) else None
        limit_s = self.deadline_s / 4 if usual is None else min(max(SLOW * usual, SLOW_LEAST_S), self.deadline_s / 2)
        if doing.for_s > limit_s:
            self._warned.add((node, doing.step))
            pace = "and has not finished a step before" if usual is None else f"its median is {usual:.2f} s"
            log.warning(
                "'%s' in worker '%s' has been at step %d for %.1f s, %s; at %g s the job ends with an error",
                node,
                worker,
                doing.step,
                doing.for_s,
                pace,
                self.deadline_s,
            )

    def timeout(self, worker: str, states: Mapping[str, Doing], told: str = "") -> ChannelTimeout:
        """Make the error for a worker that waits or works for too long; it begins with whoever keeps it waiting.

        `told` is what a worker has said of it.
        """
        found = culprit(self.plan, states, worker, self.held) or Culprit(worker)
        guilty = states[found.worker]
        readers = [w for w, d in states.items() if w != found.worker and d.waiting]
        waits = worker if worker in readers else max(readers, key=lambda w: states[w].for_s, default=None)
        then = f"\n  worker '{waits}' has been {states[waits]}" if waits else ""
        concerned = [found.worker, *([waits] if waits and not told else [])]
        return ChannelTimeout(f"{self._accusation(found, guilty)}{then}{told}{self.account(concerned)}")

    def _accusation(self, found: Culprit, guilty: Doing) -> str:
        doing = f"{guilty.what}, step {max(guilty.step, 0)}, for {guilty.for_s:.1f} s; deadline_s is {self.deadline_s:g}"
        if found.keeps is not None:
            return f"worker '{found.worker}' has not given back the slots of channel '{found.keeps}', and has been {doing}"
        if guilty.stopped:
            return f"worker '{found.worker}' is stopped: its process gets no time (kill -STOP, Ctrl-Z, a debugger); it has been {doing}"
        return f"worker '{found.worker}' has been {doing}{': its next tick did not reach it' if guilty.idle else ''}"

    def account(self, concerned: Collection[str]) -> str:
        """Return what every worker does, how full the channels are and the stacks of those concerned; all of it is in a file too."""
        table = self.table()
        everyone = self.stacks([worker.name for worker in self.plan.workers])
        parts = [f"\n  worker '{name}', Python stacks:\n{_indented(of_interest(everyone[name]))}" for name in concerned if name in everyone]
        full = "\n\n".join(f"worker '{name}'\n{text}" for name, text in everyone.items())
        path = _written(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, graph '{self.plan.graph}'\n{table}\n\n{full}\n")
        return f"\n{table}{''.join(parts)}\n  the stacks of all workers are in {path}"

    def table(self) -> str:
        """Return a line for each worker, that which does one thing for the longest first, and one for each channel."""
        states = sorted(self.states().items(), key=lambda item: -item[1].for_s)
        lines = [f"  worker '{name}' has been {doing}" for name, doing in states]
        ends = {channel.name: (channel.slots, channel.writer, channel.readers) for channel in self.plan.channels}
        ends |= {loop.name: (loop.slots, loop.writer, loop.readers) for loop in self.plan.loops}
        for name, (slots, writer, readers) in ends.items():
            used = self.used.get(f"put {name}")
            fill = f"{used} of {slots} slots in use after the last report" if used is not None else f"{slots} slots, nothing reported yet"
            lines.append(f"  channel '{name}' ({writer} -> {', '.join(readers)}): {fill}")
        return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _written(text: str) -> str:
    """Write a file that only this user can read, and return its path, or why there is none."""
    try:
        handle, path = tempfile.mkstemp(prefix="rlgraph-stall-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return f"no file: {error}"
    return path
