"""Find the worker that keeps others waiting: follow the waits from a worker that waited too long to one that does not wait.

Worker `score` waits for channel 'rollout', its writer `generator` waits for channel 'prompts', and `prompts` runs its node:
`prompts` is to blame, whichever of the others is the first to lose patience.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.runtime.messages import Failure
from rlgraph.runtime.worker.activity import edge_of
from rlgraph.runtime.worker.heartbeat import Heartbeat


@dataclass(frozen=True)
class Wait:
    """The wait of a worker: for a message of a channel or a version of weights from the workers `of`, or room that they must make."""

    end: PlannedChannel | PlannedLoop
    of: tuple[str, ...]
    room: bool
    version: int = 0  # of weights


def wait_of(plan: Plan, state: Heartbeat) -> Wait | None:
    """Find what a worker waits for; None if it works. A worker that publishes may do either."""
    activity = state.activity
    end = edge_of(plan, activity) if activity.waits or activity.kind == "publish" else None
    if end is None:
        return None
    room = activity.kind in ("put", "publish")
    nodes = end.readers if room else (end.writer,)
    of = tuple(dict.fromkeys(worker for node in nodes for worker in plan.node(node).workers))
    return Wait(end, of, room, activity.version)


def keeps_slots(wait: Wait, writer: Heartbeat, reader: Heartbeat) -> bool:
    """Tell whether a reader has finished with a message and still holds its slot, for which the writer waits."""
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
    """The worker that keeps another waiting, and the channel whose slots it holds, if that is the reason."""

    worker: str
    keeps: str | None = None


def culprit(plan: Plan, states: Mapping[str, Heartbeat], waiting: str, held: Mapping[tuple[str, str], int]) -> Culprit | None:
    """Find the worker at the end of a chain of waits; None if all known workers wait for one another.

    `held` says how many slots of a channel a worker held between its last two steps.
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
    """Connections between living processes that ended: `workers` are those that each of them has."""

    workers: tuple[str, ...]
    channels: tuple[str, ...]


def cut(failures: Sequence[Failure], pids: Mapping[str, int]) -> Cut | None:
    """Find the worker that lost its channels, from its own and its peers' reports; two workers if only one connection ended."""
    names = {pid: name for name, pid in pids.items()}
    lost = [(failure.worker, names.get(failure.peer), failure.channel) for failure in failures if failure.peer]
    ends: list[Collection[str]] = [{worker, peer} for worker, peer, _ in lost if peer is not None]
    if not ends:
        return None
    common = [name for name in pids if all(name in end for end in ends)]
    return Cut(tuple(common), tuple(dict.fromkeys(channel for _, _, channel in lost))) if common else None
