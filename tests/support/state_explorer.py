"""Walk the whole state space of a schedule, over every order of firing, and check the promises in each state.

A firing starts (takes its credits) and ends (gives them on) as two moves, so that work in service counts. All its puts happen
as it ends, once there is room for each. What is checked is
counted apart from the credits: how often each event has started and ended, as differences. A state is one integer with a
field of four bits for each count, so that a move is an addition and a test for zeros is one mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlgraph.plan.events import load_event, publish_event
from rlgraph.plan.schedule import Dependency, Event, Schedule

FIELD, TOP, MOST = 4, 8, 7


@dataclass(frozen=True)
class Promise:
    """A count of starts and ends of events that must stay within 0 and `most` in every state."""

    what: str
    most: int
    up: tuple[str, ...]  # moves that add one, as "start rollout"
    down: tuple[str, ...]


@dataclass(frozen=True)
class Walk:
    """What a walk found: how many states, and what went wrong, or "" if nothing did."""

    states: int
    fault: str


@dataclass(frozen=True)
class Gives:
    """A dependency as the moves see it: `at` is the move that gives its credit on, `times` how many it gives."""

    dependency: Dependency
    at: str
    times: int = 1


def promises(schedule: Schedule, depth: int, rollout: str, slots: Callable[[str], int]) -> list[Promise]:
    """List what must hold: open batches, messages of each channel in order and within its slots, one event of a pool at a time."""
    first = load_event("weights", rollout)
    last = publish_event("weights")
    found = [Promise(f"at most {depth + 1} batches open", depth + 1, (f"start {first}",), (f"end {last}",))]
    for d in schedule.dependencies:
        if d.reason == "data":
            what = f"'{d.after}' reads what '{d.before}' wrote"
            found.append(Promise(what, slots(d.before), (f"end {d.before}",), (f"start {d.after}",)))
            found.append(
                Promise(f"a slot of '{d.before}' for each unread batch", slots(d.before), (f"end {d.before}",), (f"end {d.after}",))
            )
    for pool in {event.pool for event in schedule.events if event.pool}:
        names = [event.name for event in schedule.events if event.pool == pool and event.kind != "publish"]  # a copy, beside others' work
        starts, ends = tuple(f"start {name}" for name in names), tuple(f"end {name}" for name in names)
        found.append(Promise(f"one event of pool '{pool}' at a time", 1, starts, ends))
    return found


def is_admission(d: Dependency) -> bool:
    """Tell whether a dependency is the one that admits a batch: a published version frees a slot of the loop."""
    return d.reason == "loop" and d.before == publish_event("weights")


def is_order_safe(schedule: Schedule, promised: Sequence[Promise]) -> bool:
    """Tell whether the order within the pools keeps every promise even if the loop admits batches without end."""
    kept = replace(schedule, dependencies=tuple(d for d in schedule.dependencies if not is_admission(d)))
    return not walk(kept, scheduled_gives(kept), promised).fault


def scheduled_gives(schedule: Schedule) -> list[Gives]:
    return [Gives(d, f"end {d.before}") for d in schedule.dependencies]


def walk(schedule: Schedule, dependencies: Sequence[Gives], promised: Sequence[Promise]) -> Walk:
    """Visit every state that any order of moves reaches; stop at the first in which a promise is broken or nothing can move."""
    state, moves, checked = _encoded(schedule.events, dependencies, promised)
    fields = len(dependencies) + len(promised) + len(schedule.events)
    ones = sum(1 << (FIELD * i) for i in range(fields))
    sevens, tops = MOST * ones, TOP * ones
    sevens -= sum(owed << (FIELD * i) for i, owed in enumerate(map(_owed, dependencies)))  # so much more makes its field full
    low = sum(TOP << shift for shift, _ in checked)
    room = sum((MOST - most - 1) << shift for shift, most in checked)  # a count is kept one higher, so that -1 is 0
    seen, open_states = {state}, [state]
    while open_states:
        state = open_states.pop()
        full = (state + sevens) & tops
        stuck = True
        for need, delta in moves:
            if full & need == need:
                stuck = False
                reached = state + delta
                if reached in seen:
                    continue
                if (reached + sevens) & low != low or (reached + room) & low:
                    return Walk(len(seen), _broken(reached, checked, promised))
                if len(seen) > 2_000_000:
                    return Walk(len(seen), "without end")
                seen.add(reached)
                open_states.append(reached)
        if stuck:
            return Walk(len(seen), "deadlock")
    return Walk(len(seen), "")


def _encoded(
    events: Sequence[Event], dependencies: Sequence[Gives], promised: Sequence[Promise]
) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    """Encode the first state, the moves as (fields that must not be zero, change), and the fields that are checked."""
    credit_at = [FIELD * i for i in range(len(dependencies))]
    running_at = {event.name: FIELD * (len(dependencies) + i) for i, event in enumerate(events)}
    promise_at = [FIELD * (len(dependencies) + len(events) + i) for i in range(len(promised))]
    state = sum(1 << at for at in promise_at)
    state += sum((g.dependency.credits + _owed(g)) << at for g, at in zip(dependencies, credit_at, strict=True))
    moves = []
    for event in events:
        for kind in ("start", "end"):
            move, need, delta = f"{kind} {event.name}", 0, 0
            for gives, at in zip(dependencies, credit_at, strict=True):
                if kind == ("end" if gives.dependency.holds else "start") and gives.dependency.after == event.name:
                    need |= TOP << at
                    delta -= 1 << at
                if gives.at == move:
                    delta += gives.times << at
            if kind == "end":
                need |= TOP << running_at[event.name]
            delta += (1 if kind == "start" else -1) << running_at[event.name]
            delta += sum(((move in p.up) - (move in p.down)) << at for p, at in zip(promised, promise_at, strict=True))
            moves.append((need, delta))
    return state, moves, [(at, p.most) for at, p in zip(promise_at, promised, strict=True)]


def _owed(gives: Gives) -> int:
    """Count the credits that a dependency lacks at first; its field is kept so much higher."""
    return max(-gives.dependency.credits, 0)


def _broken(state: int, checked: Sequence[tuple[int, int]], promised: Sequence[Promise]) -> str:
    counts = [((state >> at) & 15) - 1 for at, _ in checked]
    return next(p.what for p, count in zip(promised, counts, strict=True) if not 0 <= count <= p.most)


def faults(schedule: Schedule, update: str) -> dict[str, tuple[Schedule, list[Gives]]]:
    """Seed each fault, a defect that an implementation could have, in the schedule."""
    sound = scheduled_gives(schedule)

    def changed(which: Callable[[Dependency], bool], change: Callable[[Gives], Gives]) -> tuple[Schedule, list[Gives]]:
        index = next(i for i, gives in enumerate(sound) if which(gives.dependency))
        return schedule, [change(gives) if i == index else gives for i, gives in enumerate(sound)]

    def doubled(gives: Gives) -> Gives:
        return replace(gives, dependency=replace(gives.dependency, credits=gives.dependency.credits + 1))

    return {
        "slot freed early": changed(is_admission, lambda gives: replace(gives, at=f"start {update}")),
        "credit lost": changed(lambda d: d.reason == "data" and d.after == update, lambda gives: replace(gives, times=0)),
        "credit doubled": changed(is_admission, doubled),
        "order swapped": _swapped(schedule, update),
    }


def _swapped(schedule: Schedule, update: str) -> tuple[Schedule, list[Gives]]:
    """Let the publish of a version come before the update that makes it."""
    last = publish_event("weights")
    kept = [d for d in schedule.dependencies if d.reason != "order" or {d.before, d.after} != {update, last}]
    turned = replace(schedule, dependencies=(*kept, Dependency(last, update, 0, "order"), Dependency(update, last, 1, "order")))
    return turned, scheduled_gives(turned)
