"""Who keeps whom waiting: from a worker that waited too long to the one that it waited for, over as many as there are between them.

Worker `score` waits for channel 'rollout', its writer `generator` waits for channel 'prompts', and `prompts` runs its node:
`prompts` is to blame, whichever of the others is the first to lose patience.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlgraph.planning.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.runtime.messages import Failure
from rlgraph.runtime.status import Doing

MESSAGE = re.compile(r"waiting for channel '(.*)' \(written by")
VERSION = re.compile(r"waiting for version (\d+) of '(.*)' \(published by")
ROOM = re.compile(r"waiting for room in channel '(.*)' \(read by")
PUBLISHING = re.compile(r"publishing version (\d+) of '(.*)' \(read by")
PEER = re.compile(r"channel '(.*?)', .* \(process (\d+)\)")


@dataclass(frozen=True)
class Wait:
    """What a worker waits for: a message of a channel or a version of weights from `of`, or room that `of` are to make."""

    end: PlannedChannel | PlannedLoop
    of: tuple[str, ...]
    room: bool
    version: int = 0  # of weights


def wait_of(plan: Plan, doing: Doing) -> Wait | None:
    """What a worker waits for, None where it works. One that publishes may do either."""
    ends: dict[str, PlannedChannel | PlannedLoop] = {channel.name: channel for channel in plan.channels}
    ends |= {loop.name: loop for loop in plan.loops}
    for pattern, room in ((MESSAGE, False), (VERSION, False), (ROOM, True), (PUBLISHING, True)):
        found = pattern.match(doing.what)
        if found and (end := ends.get(found.groups()[-1])):
            nodes = end.readers if room else (end.writer,)
            of = tuple(dict.fromkeys(worker for node in nodes for worker in plan.node(node).workers))
            return Wait(end, of, room, int(found[1]) if len(found.groups()) > 1 else 0)
    return None


def keeps_slots(wait: Wait, writer: Doing, reader: Doing) -> bool:
    """Whether a reader has done with the message whose slot the writer waits for, and did not give the slot back."""
    if isinstance(wait.end, PlannedChannel):
        wanted = (writer.step + 1) * wait.end.parts - 1 - wait.end.slots  # or an earlier one, where a batch has parts
        return (reader.step + reader.idle) * wait.end.parts - wait.end.tokens > wanted
    if wait.end.due is not None or wait.end.freshest:
        return False
    waits = VERSION.match(reader.what)
    loaded = int(waits[1]) - 1 if waits and waits[2] == wait.end.name else reader.step - 1 - wait.end.depth
    return loaded >= max(wait.version - wait.end.slots, 1)


@dataclass(frozen=True)
class Culprit:
    """The worker that keeps another waiting, and the channel whose slots it does not give back, if that is how."""

    worker: str
    keeps: str | None = None


def culprit(plan: Plan, states: Mapping[str, Doing], waiting: str, held: Mapping[tuple[str, str], int]) -> Culprit | None:
    """Find whom a waiting worker waits for in the end; None where all that are known wait for one another.

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
        doing = states[name]
        wait = None if doing.stopped else wait_of(plan, doing)
        if wait is None:
            at_work.append(name)
            continue
        others = [other for other in wait.of if other != name]
        for other in others if wait.room else ():
            known = other in states and not states[other].stopped
            if known and held.get((other, wait.end.name), 1) and keeps_slots(wait, doing, states[other]):
                return Culprit(other, wait.end.name)
        if wait.room and PUBLISHING.match(doing.what) and name != waiting:
            at_work.append(name)
            continue
        todo += others
    found = max(at_work, key=lambda name: (states[name].stopped, not states[name].idle, states[name].for_s), default=None)
    return Culprit(found) if found is not None else None


@dataclass(frozen=True)
class Cut:
    """Connections between living processes that ended: `workers` are those that each of them has."""

    workers: tuple[str, ...]
    channels: tuple[str, ...]


def cut(failures: Sequence[Failure], pids: Mapping[str, int]) -> Cut | None:
    """Find the worker that has lost its channels, from what it and its peers say of them; two where one connection is all that ended."""
    names = {pid: name for name, pid in pids.items()}
    lost = [(failure.worker, names.get(int(found[2])), found[1]) for failure in failures if (found := PEER.match(failure.message))]
    ends: list[Collection[str]] = [{worker, peer} for worker, peer, _ in lost if peer is not None]
    if not ends:
        return None
    common = [name for name in pids if all(name in end for end in ends)]
    return Cut(tuple(common), tuple(dict.fromkeys(channel for _, _, channel in lost))) if common else None
