"""Run graphs one after the other: each from the weights that an earlier one left, with one report of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph.analysis.run import Run
from rlgraph.api import export, launch, profile, record
from rlgraph.curriculum.progress import StageFolder, digest, lines_of
from rlgraph.curriculum.stages import Stage, planned_stages
from rlgraph.errors import DataError, PlanError
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.costs import Costs
from rlgraph.render import joint_report
from rlgraph.render.report import FILE
from rlgraph.runtime.driver.machine import local_cluster
from rlgraph.settings import Count, Natural, checked

PROFILED = "profile.yaml"


@dataclass(frozen=True)
class Finished:
    """A graph of a curriculum that is done: its name, its folder of records, and the folder of its final weights.

    `metrics` are those of its last step. `model` is None for the last graph of a curriculum, whose weights `rg.export` takes home.
    """

    name: str
    folder: Path
    model: Path | None
    metrics: Mapping[str, float]


@checked(PlanError)
def run(
    graphs: Sequence[Any],
    out: str | Path,
    *,
    steps: Sequence[Count],
    cluster: Cluster | None = None,
    profiled: Natural = 0,
    every: Count = 10,
    restarts: Natural = 0,
    quiet: bool = False,
) -> tuple[Finished, ...]:
    """Run graphs one after the other, each from the weights that an earlier one trained, and write one report of all.

        def rl(sft):  # called with the folder of the weights that the graph 'sft' left
            policy = rg.Policy(sft, pool=rg.Pool("train"))
            ...
            return rg.Graph("rl", step.metrics)

        rg.run([sft, rl], "runs/school", steps=[20, 100])

    A graph that starts from others' weights is a function that makes it: its parameters name earlier graphs, and get the folders of
    their final weights, in float32 as they were trained. So a policy starts there, a reference stays there, or a reward model scores.

    All graphs are made, compiled and checked before the first one starts; the folders that a trained model came from stand in for
    those that are still to come. `profiled` measures each graph's costs in so many steps before it starts, and predicts from them.

    Each graph has a folder of its name in `out`, with its records, its checkpoints every so many steps, and its weights as `model`.
    `out/run.html` reports on all. After a kill the same call goes on: it skips graphs that are done, and resumes the one that was at
    work from its newest checkpoint.

    >>> import tempfile, rlgraph as rg
    >>> rg.run([rg.Graph("sums", rg.prompts([{"prompt": "1 + 1 ="}], count=4))], tempfile.mkdtemp(), steps=[1, 2])
    Traceback (most recent call last):
    rlgraph.errors.PlanError: run(steps=[1, 2]) of 1 graphs: give at least one graph, and its steps for each

    Raises PlanError for graphs that cannot follow each other, CheckpointError for a folder of another curriculum, and the errors of
    `compile`, `launch` and of the steps.
    """
    where, devices = Path(out), cluster or local_cluster()
    if where.exists() and not where.is_dir():
        raise PlanError(f"run(out='{out}'): it is a file; give a folder, which is made if it is not there")
    stages = planned_stages(graphs, steps, devices)
    folders = {stage.name: StageFolder(where / stage.name) for stage in stages}
    done = [folders[stage.name].finished(stage) for stage in stages]
    if done != sorted(done, reverse=True):
        raise PlanError(f"run(out='{out}'): a later graph is done and an earlier one is not; give another folder")
    where.mkdir(parents=True, exist_ok=True)
    for stage, over in zip(stages, done, strict=True):
        if not over:
            try:
                _run(stage, folders, devices, profiled, every, restarts, quiet)
            finally:
                report(where, stages, folders)
    if all(done):
        report(where, stages, folders)
    return tuple(_finished(stage, folders[stage.name]) for stage in stages)


def _run(stage: Stage, folders: Mapping[str, StageFolder], cluster: Cluster, profiled: int, every: int, restarts: int, quiet: bool) -> None:
    """Run one graph from where it is to its end, and leave its weights for later ones."""
    own, models = folders[stage.name], {name: folders[name].model for name in stage.takes}
    own.begin({name: digest(folder) for name, folder in models.items()})
    paths = {name: str(folder) for name, folder in models.items()}
    plan = stage.planned(paths, cluster, _costs(stage, own, paths, cluster, profiled))
    with launch(plan, checkpoint=own.checkpoints, every=every, restarts=restarts) as job:
        for _ in record(job, stage.steps, own.path, quiet=quiet):
            pass
    if stage.stand_in is not None:
        export(own.checkpoints, own.model, "float32")
    own.say_done(stage, plan)


def _costs(stage: Stage, own: StageFolder, paths: Mapping[str, str], cluster: Cluster, profiled: int) -> Costs | None:
    """Measure the costs of a graph, once, by a short profile."""
    file = own.path / PROFILED
    if profiled and not file.exists():
        profile(stage.make(**paths), cluster, profiled).to_file(file)
    return Costs.from_file(file) if profiled else None


def _finished(stage: Stage, folder: StageFolder) -> Finished:
    last = list(lines_of(folder.path))[-1:]
    return Finished(stage.name, folder.path, folder.model if stage.stand_in is not None else None, last[0] if last else {})


def report(where: Path, stages: Sequence[Stage], folders: Mapping[str, StageFolder]) -> None:
    """Write the report of all graphs so far."""
    found = []
    for stage in stages:
        own, lines = folders[stage.name], list(lines_of(folders[stage.name].path))
        state = "done" if own.finished(stage) else "under way" if lines else "to come"
        weights = " and ".join(f"the weights of '{name}'" for name in stage.takes) or "its own folders"
        found.append(joint_report.GraphReport(stage.name, state, stage.steps, weights, stage.name, lines, _run_of(own.path)))
    joint_report.write(where / FILE, where.absolute().name, found)


def _run_of(folder: Path) -> Run | None:
    try:
        return Run.load(folder)
    except DataError:
        return None
