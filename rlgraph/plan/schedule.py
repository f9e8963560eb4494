"""The schedule of a plan: a marked graph of events. An event's firing k starts when all its dependencies have finished.

A dependency with t credits lets `after` fire t times before `before` has fired at all; so firing k of `after` waits for firing k - t of
`before`. The number of credits on a cycle never changes (Commoner, 1971), which is what bounds staleness. Between nodes of one pool t may
be below 0: update k waits for rollout k + 1 if an update comes a round later (see `rlgraph.graph.rules`).

A firing starts, works, and then puts its outputs into its channels, one after another. A channel without a free slot delays that put, later
puts and the end of the firing, but neither its start nor its work.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

EventKind: TypeAlias = Literal["fire", "publish", "receive", "load", "wake", "sleep"]
SpanKind: TypeAlias = EventKind | Literal["carry", "tools", "wait", "room", "idle", "start"]
MOVING: frozenset[SpanKind] = frozenset(("publish", "receive", "load"))
WORK: frozenset[SpanKind] = MOVING | {"fire", "wake", "sleep"}
Reason: TypeAlias = Literal["data", "slots", "order", "loop", "self"]


@dataclass(frozen=True)
class Event:
    """Something that lasts once per step: a node fires; weights are published, received or loaded; an engine that time-shares its devices
    wakes (allocates its memory) or sleeps (frees it). `edge` is the feedback edge whose weights move."""

    name: str
    kind: EventKind
    node: str
    worker: str
    pool: str | None
    seconds: float
    chunk: int = 0  # of the batch, if the node fires once for each
    edge: str = ""
    lag: int = 0  # in round r of its pool it happens for step r - lag


@dataclass(frozen=True)
class Dependency:
    """Firing k of `after` waits for firing k - `credits` of `before`: its start waits for the other's end, unless a `put` is named.

    `put` counts the channels of a writer in the order of its puts, from 1. If the reason is "slots", that put of `after` waits until
    `before` has ended and released its slot. For any other reason `after` starts once that put of `before` is done.
    """

    before: str
    after: str
    credits: int
    reason: Reason
    via: str = ""
    put: int = 0

    @property
    def left_at(self) -> int:
        """The put of `before` that it waits for; 0 is its end."""
        return 0 if self.reason == "slots" else self.put

    @property
    def holds(self) -> int:
        """The put of `after` that waits; 0 is its start."""
        return self.put if self.reason == "slots" else 0


@dataclass(frozen=True)
class Schedule:
    """All events of one step and what they wait for, as data."""

    events: tuple[Event, ...]
    dependencies: tuple[Dependency, ...]

    def seconds(self) -> Mapping[str, float]:
        """Map each event's name to its seconds."""
        return {event.name: event.seconds for event in self.events}

    @property
    def most_lag(self) -> int:
        """Count the rounds between the first and the last event of one step."""
        return max((event.lag for event in self.events), default=0)

    def within_rounds(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs (before, after) in which an event waits for another event of its own round."""
        lag = {event.name: event.lag for event in self.events}
        yield from ((d.before, d.after) for d in self.dependencies if d.credits + lag[d.after] - lag[d.before] == 0)


@dataclass(frozen=True)
class Span:
    """The activity of a worker from one moment to another, in seconds from the start; predicted or measured.

    Kinds of an event (`WORK`) have its name. A run also has `wait` (for a message, with the name of its channel or feedback edge), `room`
    (for a free slot of it), `carry` (rlgraph's own work around the node of that name: checks, copies), `idle` (between two steps) and
    `start` (before the first). `bytes` were moved between a device and host memory, if known.
    """

    name: str
    kind: SpanKind
    step: int
    worker: str
    start_s: float
    end_s: float
    version: int | None = None
    bytes: int | None = None

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Sampled:
    """The tokens of one worker in one firing of a sampling node: the prompts' total, and the tokens of each response."""

    node: str
    step: int
    worker: str
    prompt_tokens: int
    response_tokens: tuple[int, ...]
