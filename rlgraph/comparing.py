"""`rlgraph.runs.compare`: recorded runs side by side, with the settings in which they differ. Nothing starts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

from rlgraph.analysis.run import Run
from rlgraph.errors import PlanError, choices, show_value
from rlgraph.render.text import align_rows
from rlgraph.settings import check_arguments

REWARD, STALENESS, TOKENS, STEP_S = "critic/rewards/mean", "staleness/mean", "perf/total_num_tokens", "timing_s/step"
LAST = 4  # steps whose mean reward is that of the end
FEW = 2  # steps; fewer say nothing about a rate
VALIDATION = "val/"


@dataclass(frozen=True)
class Measure:
    """A number of each run, None where a run lacks it."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Difference:
    """A setting whose values differ between runs, None where a run has no such setting."""

    where: str  # the model, the node or the feedback edge
    setting: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side; prints as two tables."""

    runs: tuple[str, ...]
    measures: tuple[Measure, ...]
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        measured = [[row.name, *("" if value is None else f"{value:.4g}" for value in row.values)] for row in self.measures]
        differing = [[f"{row.where}: {row.setting}", *("-" if v is None else v for v in row.values)] for row in self.differences]
        lines = align_rows(["", *(f">{run}" for run in self.runs)], measured)
        lines += ["", *align_rows(["setting that differs", *self.runs], differing)] if differing else ["", "no setting differs"]
        return "\n".join(line.rstrip() for line in lines)


@check_arguments(PlanError)
def compare(*folders: str | Path, metrics: Sequence[str] = ()) -> RunComparison:
    """Compare recorded runs: step time, reward, staleness, tokens per second, validation, and the settings that differ.

        print(rg.runs.compare("runs/sync", "runs/one_step_off", metrics=["actor/entropy"]))

    Each folder is one that `rlgraph.record` wrote. Times leave out the first steps, which compile and allocate. `metrics` adds the mean of
    each named metric over the last steps.

    Raises PlanError for fewer than two runs or a metric that no run has, DataError for a folder without a run.

    >>> import rlgraph as rg
    >>> rg.runs.compare("runs/one")
    Traceback (most recent call last):
    rlgraph.errors.PlanError: compare('runs/one'): it requires at least two folders of runs
    """
    names = tuple(str(folder) for folder in folders)
    if len(names) < 2:
        raise PlanError(f"compare({', '.join(map(repr, names))}): it requires at least two folders of runs")
    runs = [Run.load(folder) for folder in folders]
    known = {name for run in runs for step in run.steps for name in step}
    for name in metrics:
        if name not in known:
            raise PlanError(
                f"compare(metrics={show_value(list(metrics))}): no run has the metric '{name}'; {choices(name, sorted(known), 'they have')}"
            )
    return RunComparison(names, tuple(_measures(runs, known, metrics)), tuple(_differences(runs)))


def _measures(runs: Sequence[Run], known: set[str], metrics: Sequence[str]) -> list[Measure]:
    rows: dict[str, Callable[[Run], float | None]] = {
        "steps": lambda run: float(len(run.steps)),
        "step, median s": lambda run: median(run.values(STEP_S)) if run.values(STEP_S) else None,
        "step, predicted s": lambda run: run.plan.prediction.step_s,
        "tokens/s": _tokens_per_s,
        f"reward, first {LAST} steps": lambda run: _mean(run, REWARD, first=True),
        f"reward, last {LAST} steps": lambda run: _mean(run, REWARD),
        "staleness, mean": lambda run: fmean(run.values(STALENESS)) if run.values(STALENESS) else None,
        "staleness, bound": lambda run: float(run.plan.certificate.staleness_bound),
        "devices": lambda run: float(run.plan.cluster.gpus or run.plan.cluster.cpus),
    }
    for name in sorted(name for name in known if name.startswith(VALIDATION)):
        rows[f"{name}, last"] = partial(_last, metric=name)
    for name in metrics:
        rows[f"{name}, last {LAST} steps"] = partial(_mean, metric=name)
    found = [Measure(name, tuple(value(run) for run in runs)) for name, value in rows.items()]
    return [row for row in found if any(value is not None for value in row.values)]


def _last(run: Run, metric: str) -> float | None:
    return next((step[metric] for step in reversed(run.steps) if metric in step), None)


def _mean(run: Run, metric: str, first: bool = False) -> float | None:
    values = [step[metric] for step in run.steps if math.isfinite(step.get(metric, math.nan))]
    return fmean(values[:LAST] if first else values[-LAST:]) if values else None


def _tokens_per_s(run: Run) -> float | None:
    steps = [step for step in run.steady if TOKENS in step and STEP_S in step]
    return sum(step[TOKENS] for step in steps) / sum(step[STEP_S] for step in steps) if len(steps) >= FEW else None


def _differences(runs: Sequence[Run]) -> list[Difference]:
    """List the settings that differ, those of the first run first. A part that one run lacks is one line."""
    found = []
    for where in dict.fromkeys(where for run in runs for where in run.settings):
        parts = [run.settings.get(where) for run in runs]
        if any(part is None for part in parts):
            found.append(Difference(where, "is there", tuple("no" if part is None else "yes" for part in parts)))
            continue
        for setting in dict.fromkeys(setting for part in parts for setting in part or {}):
            values = tuple((part or {}).get(setting) for part in parts)
            if len(set(values)) > 1:
                found.append(Difference(where, setting, values))
    return found
