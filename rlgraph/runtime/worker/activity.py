"""What a worker does at a moment, as a value. Words are made where a person reads them; nothing parses them back."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rlgraph.plan.events import load_event, publish_event, sleep_event, wake_event
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop

ActivityKind: TypeAlias = Literal[
    "idle", "open", "connect", "load_engine", "fire", "probe", "take", "put", "receive", "publish", "load", "wake", "sleep", "export"
]
KINDS: tuple[ActivityKind, ...] = get_args(ActivityKind)
WAITS: frozenset[ActivityKind] = frozenset(("take", "put", "receive"))
WORKS: frozenset[ActivityKind] = frozenset(("fire", "publish", "load", "wake", "sleep"))  # each has an event in the plan


@dataclass(frozen=True)
class Activity:
    """The activity that a worker began last: its `node`, its `edge` (a channel or a feedback edge), and its `version` of the weights.

    `idle` lies between two steps; `open`, `connect` and `load_engine` before the first. `take` waits for a message, `put` for room,
    `receive` for a version. `export` lies between two steps. `probe` fires a node for one prompt alone, whose number in the batch is
    `prompt`. The others are events of the plan.

    >>> str(Activity("take", "update", "rollout")), str(Activity("load", "rollout", "weights", 3))
    ("waiting for channel 'rollout'", "loading version 3 of 'weights' before node 'rollout'")
    """

    kind: ActivityKind
    node: str = ""
    edge: str = ""
    version: int = 0
    prompt: int = 0

    @property
    def idle(self) -> bool:
        return self.kind == "idle"

    @property
    def waits(self) -> bool:
        """Whether the worker waits for another one and does nothing else."""
        return self.kind in WAITS

    @property
    def works(self) -> bool:
        """Whether it is an event of the plan: a node fires, weights move, an engine wakes or sleeps."""
        return self.kind in WORKS

    def __str__(self) -> str:
        return described(self)


IDLE = Activity("idle")


def described(activity: Activity, plan: Plan | None = None) -> str:
    """Describe an activity in words; with a plan they name who is at the other end of its edge, too."""
    node, edge, version = activity.node, activity.edge, activity.version
    end = edge_of(plan, activity) if plan is not None else None
    readers = f" (read by {list(end.readers)})" if end is not None else ""
    match activity.kind:
        case "idle":
            return "idle between two steps"
        case "open":
            return "opening its channels"
        case "connect":
            return "connecting to its channels"
        case "load_engine":
            return "loading its engine"
        case "fire":
            return f"running node '{node}'"
        case "probe":
            return f"trying prompt {activity.prompt} alone in node '{node}'"
        case "take":
            return f"waiting for channel '{edge}'" + (f" (written by node '{end.writer}')" if end is not None else "")
        case "put":
            return f"waiting for room in channel '{edge}'{readers}"
        case "receive":
            return f"waiting for version {version} of '{edge}'" + (f" (published by node '{end.writer}')" if end is not None else "")
        case "publish":
            return f"publishing version {version} of '{edge}'{readers}"
        case "load":
            return f"loading version {version} of '{edge}' before node '{node}'"
        case "wake":
            return f"giving its engine the devices ('{wake_event(node)}')"
        case "export":
            return "writing its shards of an export"
        case "sleep":
            return f"taking the devices from its engine ('{sleep_event(node)}')"


def event_name(activity: Activity, plan: Plan) -> str:
    """Name work for counts and warnings: by its node, whichever chunk of a batch it fires for, else by its event."""
    match activity.kind:
        case "publish":
            return publish_event(activity.edge)
        case "load":
            end = edge_of(plan, activity)
            return load_event(activity.edge, activity.node, apart=isinstance(end, PlannedLoop) and end.due is not None)
        case "wake":
            return wake_event(activity.node)
        case "sleep":
            return sleep_event(activity.node)
        case _:
            return activity.node


def edge_of(plan: Plan, activity: Activity) -> PlannedChannel | PlannedLoop | None:
    """Find the channel or the feedback edge of an activity; None if it has none, or the plan does not know it."""
    ends = plan.channels if activity.kind in ("take", "put") else plan.loops
    return next((end for end in ends if end.name == activity.edge), None)
