"""`rlgraph.tune` and `rlgraph.replay`: other ways to run a graph, by prediction and from a record; nothing is started."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgraph.compiler.cluster import Cluster
from rlgraph.compiler.plan import Plan
from rlgraph.costs.costs import Costs
from rlgraph.costs.model_configs import shapes_of
from rlgraph.costs.trace import Trace
from rlgraph.errors import PlanError, PlanWarning, shown
from rlgraph.graph.nodes import Graph
from rlgraph.render.tuning_table import TuningRow, table
from rlgraph.settings import Natural, Positive, checked
from rlgraph.simulate.replay import Replayed, replayed
from rlgraph.simulate.search import Objective, search

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

SHOWN = 12


@dataclass(frozen=True)
class Tuned(TuningRow):
    """One plan of a tuning, with the settings that gave its graph and what it is predicted to give."""

    plan: Plan
    staleness: int


@dataclass(frozen=True)
class Tuning:
    """Plans, the best first; prints as a table. `verdict` says whether stale batches pay, and why."""

    ranked: tuple[Tuned, ...]
    looked_at: int
    left_out: Mapping[str, int]
    verdict: str
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> Tuned:
        return self.ranked[0]

    def __iter__(self) -> Iterator[Tuned]:
        return iter(self.ranked)

    def __len__(self) -> int:
        return len(self.ranked)

    def __getitem__(self, index: int) -> Tuned:
        return self.ranked[index]

    def __str__(self) -> str:
        return table(self.ranked[:SHOWN], self.looked_at, self.left_out, self.verdict, self.warnings)


@checked(PlanError)
def replay(trace: "Job | str | Path", *, shares: Mapping[str, Positive] | None = None, depth: Natural | None = None) -> Replayed:
    """Play a recorded run again: what it would have taken with other shares of the devices or another depth; prints as a line.

    `trace` is a job, the folder that `rlgraph.record` left, or a trace file. The recorded firings are played again, one by
    one; on other numbers of devices each is scaled by the laws that the run showed. `shares` divide the devices of the pools
    named, as `shares={"rollout": 3, "train": 1}`.

    Raises PlanError for a record that is missing or too short, and for a change that the plan does not allow.
    """
    if isinstance(trace, str | Path):
        path = Path(trace)
        recorded = Trace.from_file(path / "trace.json" if path.is_dir() else path)
    else:
        recorded = trace.trace()
    return replayed(recorded, shares, depth)


@checked(PlanError)
def tune(
    build: Callable[..., Graph],
    cluster: Cluster,
    costs: Costs | None = None,
    *,
    by: Objective = "tokens_per_s",
    max_staleness: Natural | None = None,
    **choices: Iterable[Any],
) -> Tuning:
    """Plan the graphs that `build` gives and rank them by predicted tokens a second, or device-seconds a response.

    Each further keyword is a setting of `build` with the values to try, as `depth=range(4), buffers=(1, 2)`; pools with
    `share=None` are split in every way. What `build` or the cluster refuses, memory included, is left out and counted.
    `costs` may name more nodes than a graph has; without any, nominal ones only rank. A plain number of seconds counts the same on
    any devices: where plans with other counts are compared by it, a PlanWarning says so, before the verdict too.

    Raises PlanError for a setting without values, an unknown objective, or if no plan is left.
    """
    tried = {
        name: list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None for name, values in choices.items()
    }
    for name, values in tried.items():
        if not values:
            raise PlanError(f"tune({name}={shown(choices[name])}): give the values to try, as {name}=(1, 2)")
    found = search(build, cluster, costs, {name: values or [] for name, values in tried.items()}, by, max_staleness, shapes_of)
    ranked = tuple(
        Tuned(c.settings, c.plan, c.step_s, c.samples_per_s, c.tokens_per_s, c.gpu_s_per_sample, c.staleness) for c in found.ranked
    )
    for warning in found.warnings:
        warnings.warn(f"tune: {warning}", PlanWarning, stacklevel=3)
    return Tuning(ranked, found.looked_at, found.left_out, found.verdict, found.warnings)
