"""Check a running job against its plan's certificate: no observed maximum exceeds the derived bound."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlgraph.errors import CertificateError
from rlgraph.plan.events import publish_event
from rlgraph.plan.plan import ChannelEnd, Plan, PlannedLoop
from rlgraph.plan.schedule import Span


@dataclass(frozen=True)
class Observed:
    """The maxima that a run has shown so far, to compare with the bounds of its certificate."""

    staleness: int = 0
    open_batches: int = 0
    channel_slots: Mapping[str, int] | None = None  # in use at once, by channel


class InvariantMonitor:
    """Check the spans and slot counts of each step and raise at the first that the certificate rules out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        kept = plan.certificate.open_batches + 1  # as many as can matter
        self._published: dict[str, deque[float]] = {loop.name: deque(maxlen=kept) for loop in plan.loops}
        self._bounds = {loop.name: loop for loop in plan.certificate.loops}
        self._slots = {channel.name: channel.slots for channel in plan.channels}
        self.observed = Observed()

    def check(
        self,
        step: int,
        spans: Sequence[Span],
        staleness: int,
        peaks: Mapping[ChannelEnd, int],
        slack_s: float = 0.0,
        behind: Mapping[str, int] | None = None,
    ) -> None:
        """Check one finished step: its spans, its staleness, and the largest number of slots in use at each channel end.

        `slack_s` says by how much moments of two workers may be in the wrong order, because their hosts' clocks differ.
        `behind` is the staleness of each loop, where it is known.

        Raises CertificateError with the bound that was exceeded.
        """
        proof, so_far = self.plan.certificate, self.observed
        if staleness > proof.staleness_bound:
            raise self._broken(step, f"its oldest token is {staleness} versions behind", f"staleness at most {proof.staleness_bound}")
        for name, versions in (behind or {}).items():
            if name in self._bounds and versions > self._bounds[name].staleness:
                limit = f"staleness at most {self._bounds[name].staleness} in '{name}'"
                raise self._broken(step, f"its oldest token there is {versions} versions behind", limit)
        opened = max((self._checked_open(step, loop, spans, slack_s) for loop in self.plan.loops), default=0)
        used = dict(so_far.channel_slots or {})
        for end, peak in peaks.items():
            if end.name in self._slots and peak > self._slots[end.name]:
                raise self._broken(step, f"channel '{end.name}' held {peak} messages", f"{self._slots[end.name]} slots")
            used[end.name] = max(peak, used.get(end.name, 0))
        self.observed = Observed(max(staleness, so_far.staleness), max(opened, so_far.open_batches), used)

    def _checked_open(self, step: int, loop: PlannedLoop, spans: Sequence[Span], slack_s: float) -> int:
        """Count the open batches of a loop. Raises CertificateError for more than it may have."""
        bound, opened = self._bounds.get(loop.name), self._open(loop, spans, slack_s)
        most = self.plan.certificate.open_batches if bound is None else bound.open_batches
        if opened > most:
            where = f" in '{loop.name}'" if len(self._bounds) > 1 else ""
            raise self._broken(step, f"{opened} batches were open when it was admitted", f"at most {most} open{where}")
        return opened

    def _open(self, loop: PlannedLoop, spans: Sequence[Span], slack_s: float) -> int:
        """Count the batches of a loop, this step's included, that were open when this step's was admitted. A run may begin at any step.

        A version counts as published from the start of its publish: the reader can have it before the writer reads its clock.
        """
        names = {event.name for event in self.plan.schedule.events if event.node in loop.readers and event.kind in ("fire", "load")}
        began = [span.start_s for span in spans if span.name in names and span.kind in ("fire", "load")]  # a wait has its channel's name
        published = self._published[loop.name]
        opened = 1 + sum(at > min(began) + slack_s for at in published) if began else 0
        published.append(min((s.start_s for s in spans if s.name == publish_event(loop.name)), default=float("-inf")))
        return opened

    def _broken(self, step: int, what: str, limit: str) -> CertificateError:
        return CertificateError(
            f"step {step} of '{self.plan.graph}' broke the plan's certificate ({limit}): {what}; this is a defect of rlgraph: "
            "please report it with plan.to_json()"
        )
