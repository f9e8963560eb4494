"""Look whether another plan would be faster for a run under way: responses grow during RL, so the best split of the devices moves."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rlgraph.errors import PlanError
from rlgraph.graph.graph import Graph
from rlgraph.plan.calibrate import Trace, costs_of
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import best_plan, build_plan
from rlgraph.plan.costs import Costs
from rlgraph.plan.model_shapes import Shapes
from rlgraph.plan.plan import LEAST_STEPS, Plan, Replan
from rlgraph.plan.roofline import priced_for


@dataclass(frozen=True)
class Change:
    """A change from a plan to another: what a step took before it, and what it was predicted to take under each plan."""

    before: Plan
    after: Plan
    measured_s: float
    is_return: bool = False  # to the plan before a change that did not pay

    def __str__(self) -> str:
        was, now = (plan.prediction.step_s for plan in (self.before, self.after))
        if self.is_return:
            return f"{self.before.split_text} did not pay, so the run returns to {self.after.split_text}"
        return (
            f"{self.before.split_text} -> {self.after.split_text}: predicted {now:.3g} s per step in place of {was:.3g} s "
            f"(measured {self.measured_s:.3g} s)"
        )


@dataclass
class Replanner:
    """Looks at a run every few steps; remembers the last change, to take it back once if it did not pay."""

    wanted: Replan
    shapes_of: Callable[[Graph], Shapes]
    last: Change | None = None
    refused: list[tuple[int, Mapping[str, int]]] = field(default_factory=list)  # graph and devices of changes that did not pay
    seconds: deque[float] = field(default_factory=deque)  # of the steps since the last look
    costs: Costs | None = None  # of the last look

    def note(self, seconds: float) -> bool:
        """Record the seconds of a step; return whether a look is due."""
        self.seconds.append(seconds)
        return len(self.seconds) == self.wanted.every

    def fit(self, trace: Trace, plan: Plan, cluster: Cluster) -> Plan:
        """Make the best plan for a cluster that has lost hosts, by the last steps. Raises PlanError if no plan fits."""
        recent = self._recent(trace)
        if len({span.step for span in recent.spans}) >= LEAST_STEPS:
            self.costs = costs_of([recent])
        self.seconds.clear()
        self.last = None
        found = self._candidates(plan, self.costs, cluster)
        return min(found, key=lambda made: made.prediction.step_s) if found else self._best_plan(plan.source, self.costs, cluster)

    def look(self, trace: Trace, plan: Plan, cluster: Cluster, *, steps_left: int, change_s: float) -> Change | None:
        """Look at the steps since the last look, and at the `cluster` as it is now.

        Returns a change that is predicted to pay for itself in the steps that are left.
        """
        assert isinstance(plan.source, Graph)
        seconds = list(self.seconds)[min(plan.window, len(self.seconds) // 2) :]  # the first steps after a change fill the pipeline
        measured_s, last = statistics.median(seconds), self.last
        self.seconds.clear()
        self.last = None
        costs = self.costs = costs_of([self._recent(trace)])
        if last is not None and key(last.after) != key(plan):  # its workers could not start
            self.refused.append(key(last.after))
        elif last is not None and not last.is_return:
            earlier = self._price(last.before, costs)
            if measured_s > last.measured_s * earlier.prediction.step_s / last.before.prediction.step_s:
                self.refused.append(key(plan))
                return self._remember(Change(plan, earlier, measured_s, is_return=True))
        present = self._price(plan, costs)
        best = min(self._candidates(plan, costs, cluster), key=lambda found: found.prediction.step_s, default=present)
        saved_s = present.prediction.step_s - best.prediction.step_s
        if saved_s < self.wanted.gain * present.prediction.step_s or saved_s * steps_left <= change_s or key(best) == key(plan):
            return None
        return self._remember(Change(present, best, measured_s))

    def _recent(self, trace: Trace) -> Trace:
        """Cut a trace down to the steps between two looks."""
        first = min(sorted({span.step for span in trace.spans})[-self.wanted.every :], default=0)
        spans = [span for span in trace.spans if span.step >= first]
        return replace(trace, spans=spans, sampled=[sampled for sampled in trace.sampled if sampled.step >= first])

    def _remember(self, change: Change) -> Change:
        self.last = change
        return change

    def _price(self, plan: Plan, costs: Costs) -> Plan:
        """Predict a plan with other costs."""
        graph = plan.source
        assert isinstance(graph, Graph)
        shapes = self.shapes_of(graph)
        return build_plan(graph, plan.cluster, priced_for(graph, plan.cluster, costs, shapes), plan.counts, shapes)

    def _best_plan(self, graph: object, costs: Costs | None, cluster: Cluster) -> Plan:
        assert isinstance(graph, Graph)
        shapes = self.shapes_of(graph)
        return best_plan(graph, cluster, priced_for(graph, cluster, costs, shapes), shapes)

    def _candidates(self, plan: Plan, costs: Costs | None, cluster: Cluster) -> list[Plan]:
        """Make the best plan of each graph, without plans that do not fit or did not pay."""
        found = []
        for graph in dict.fromkeys((plan.source, *self.wanted.graphs)):
            try:
                made = self._best_plan(graph, costs, cluster)
            except PlanError:
                continue
            if key(made) not in self.refused:
                found.append(made)
        return found


def key(plan: Plan) -> tuple[int, Mapping[str, int]]:
    """Tell plans apart: the graph, and the devices of each pool."""
    return id(plan.source), plan.counts
