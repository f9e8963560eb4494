"""`rlgraph.tune` and `rlgraph.planning.replay`: predict a graph, or a recorded run, under other settings. Nothing starts."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgraph.analysis import words
from rlgraph.errors import PlanError, PlanWarning, show_value
from rlgraph.graph.graph import Graph
from rlgraph.plan.calibrate import Trace
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.costs import Costs
from rlgraph.plan.model_shapes import shapes_of
from rlgraph.plan.plan import Plan
from rlgraph.plan.search import Objective, Replayed, replay_trace, search
from rlgraph.render.text import align_rows, wrap_line
from rlgraph.settings import Natural, Positive, check_arguments

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

# The plans of a tuning as a table for the terminal: settings, devices of each pool, and predicted rates.


@dataclass(frozen=True)
class TuningRow:
    """A row of the table: a plan with its settings and predicted rates."""

    settings: Mapping[str, Any]
    plan: Plan
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None  # prompts and responses; None where the costs hold no lengths
    gpu_s_per_sample: float


def table(rows: Sequence[TuningRow], looked_at: int, left_out: Mapping[str, int], verdict: str, warnings: Sequence[str] = ()) -> str:
    """Write the table, the reasons why plans were left out, the verdict on stale batches, and the warnings not in the verdict."""
    first = rows[0]
    names = list(first.settings)
    device = "GPU" if first.plan.cluster.gpus else "core"
    rate = "tokens/s" if first.tokens_per_s is not None else "samples/s"
    head = [*names, "devices", ">step", f">{rate}", f">{device}-s a sample", "busy"]
    cells = [
        [
            *(str(row.settings[name]) for name in names),
            ", ".join(f"{p.name} {len(p.gpus) or p.cpus}" for p in row.plan.pools),
            words.seconds(row.step_s, row.plan.prediction.cost),
            _rate(row.tokens_per_s if row.tokens_per_s is not None else row.samples_per_s),
            f"{row.gpu_s_per_sample:.4g}",
            ", ".join(f"{p.busy:.0%}" for p in row.plan.pools),
        ]
        for row in rows
    ]
    lines = [f"{words.with_count(looked_at, 'plan')} compared on {words.cluster(first.plan.cluster)}, the best first"]
    lines += align_rows(head, cells)
    lines += [part for reason, count in left_out.items() for part in wrap_line(f"left out {count}: {words.clean(reason)}", indent=2)]
    lines += [part for warning in warnings if warning not in verdict for part in wrap_line(f"warning: {warning}", indent=2)]
    lines += [*wrap_line(verdict, indent=2)] if verdict else []
    return "\n".join(line.rstrip() for line in lines)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


SHOWN = 12


@dataclass(frozen=True)
class Tuned(TuningRow):
    """A plan that `tune` compared, with the settings that gave its graph and its predicted rates."""

    plan: Plan
    staleness: int


@dataclass(frozen=True)
class Tuning:
    """Plans, best first; prints as a table. `verdict` says whether stale batches pay, and why."""

    ranked: tuple[Tuned, ...]
    looked_at: int
    left_out: Mapping[str, int]
    verdict: str
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> Tuned:
        """The first plan of the ranking."""
        return self.ranked[0]

    def __iter__(self) -> Iterator[Tuned]:
        return iter(self.ranked)

    def __len__(self) -> int:
        return len(self.ranked)

    def __getitem__(self, index: int) -> Tuned:
        return self.ranked[index]

    def __str__(self) -> str:
        return table(self.ranked[:SHOWN], self.looked_at, self.left_out, self.verdict, self.warnings)


@check_arguments(PlanError)
def replay(trace: "Job | str | Path", *, shares: Mapping[str, Positive] | None = None, depth: Natural | None = None) -> Replayed:
    """Play a recorded run again with other shares of the devices or another depth, and predict its step time; prints as a line.

        print(rg.planning.replay("runs/grpo", shares={"rollout": 3, "train": 1}))

    `trace` is a job, the folder that `rlgraph.record` wrote, or a trace file. `shares` divide the devices of the named pools. Each
    recorded firing is played again; on another number of devices its seconds are scaled by the cost functions fitted to the run.

    Raises PlanError if the record is missing or too short, or the plan does not allow the change.

    >>> import rlgraph as rg
    >>> rg.planning.replay("no/such/run", depth=1)
    Traceback (most recent call last):
    rlgraph.errors.PlanError: replay('no/such/run'): there is no such trace; rg.record writes trace.json into its folder
    """
    if isinstance(trace, str | Path):
        path = Path(trace)
        recorded = Trace.from_file(path / "trace.json" if path.is_dir() else path)
    else:
        recorded = trace.trace()
    return replay_trace(recorded, shares, depth)


@check_arguments(PlanError)
def tune(
    build: Callable[..., Graph],
    cluster: Cluster,
    costs: Costs | None = None,
    *,
    by: Objective = "tokens_per_s",
    max_staleness: Natural | None = None,
    **choices: Iterable[Any],
) -> Tuning:
    """Compile the graphs that `build` returns for each combination of settings and rank the plans by prediction.

    >>> import torch, rlgraph as rg
    >>> @rg.node(reads="prompt_texts", writes="rewards")
    ... def brevity(batch):
    ...     return {"rewards": torch.tensor([-float(len(text)) for text in batch["prompt_texts"]])}
    >>> def build(count):
    ...     return rg.Graph("lengths", brevity(rg.prompts([{"prompt": "1 + 1 ="}], count=count)))
    >>> rg.tune(build, rg.Cluster(cpus=2), count=(4, 8)).best.settings
    {'count': 8}

    * `build`: a function that returns the graph for a combination of settings.
    * `cluster`: the hosts and devices to plan for.
    * `costs`: seconds of nodes, which may name more nodes than a graph has. None: placeholders, which rank plans but do not mean seconds.
      A plain number counts the same on any number of devices; a PlanWarning says if such a number decides between plans.
    * `by`: "tokens_per_s" ranks by tokens per second, "gpu_s_per_sample" by device-seconds per response.
    * `max_staleness`: leaves out plans whose batches lag behind by more versions. None: any.
    * `choices`: each further keyword is a setting of `build` with the values to try, e.g. `depth=range(4), buffers=(1, 2)`.

    Pools with `share=None` are split in every possible way. Plans that `build`, the cluster or its memory refuses are left out and counted.

    Raises PlanError for a setting without values, an unknown objective, or if no plan is left.
    """
    tried = {
        name: list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None for name, values in choices.items()
    }
    for name, values in tried.items():
        if not values:
            raise PlanError(f"tune({name}={show_value(choices[name])}): pass the values to try, e.g. {name}=(1, 2)")
    found = search(build, cluster, costs, {name: values or [] for name, values in tried.items()}, by, max_staleness, shapes_of)
    ranked = tuple(
        Tuned(c.settings, c.plan, c.step_s, c.samples_per_s, c.tokens_per_s, c.gpu_s_per_sample, c.staleness) for c in found.ranked
    )
    for warning in found.warnings:
        warnings.warn(f"tune: {warning}", PlanWarning, stacklevel=3)
    return Tuning(ranked, found.looked_at, found.left_out, found.verdict, found.warnings)
