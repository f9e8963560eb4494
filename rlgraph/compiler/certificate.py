"""What a plan guarantees before it runs, of the whole graph and of each of its loops."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoopBound:
    """What the schedule guarantees of one feedback edge: the most versions behind, and the most batches open at once."""

    name: str
    staleness: int
    open_batches: int


@dataclass(frozen=True)
class Certificate:
    """What the schedule guarantees for any timing, derived from its credits. Edges to evaluations alone have no bound in `loops`.

    `exact` says that trainers compute the engines' log-probs to the bit. It rests on one kernel for both sides, on one core or on GPUs, and
    on a check of some tokens of each step.
    """

    staleness_bound: int
    deadlock_free: bool
    open_batches: int
    buffered_bytes: int | None
    period_s: float
    loops: tuple[LoopBound, ...] = ()
    exact: bool = False
