"""Run graphs one after the other: each from the weights that an earlier one left, with one report of all."""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlgraph.analysis.run import Run
from rlgraph.api import checked_source, compile, export, launch, profile, record
from rlgraph.errors import CheckpointError, DataError, PlanError, RlgraphError, show_value
from rlgraph.graph.graph import Graph
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.costs import Costs
from rlgraph.plan.plan import Plan
from rlgraph.render.report import FILE, GraphReport, write_joint
from rlgraph.runtime.checkpoint.store import choose_model, difference, fingerprint, trained_models
from rlgraph.runtime.driver import discovery
from rlgraph.runtime.driver.sendable import check_sendable
from rlgraph.settings import Count, Natural, check_arguments

# The stages of a curriculum, planned before the first one starts, so that bad input is refused then.

HOW = "it is a graph, or a function that makes one from the folders of earlier graphs, e.g. `def rl(sft): return rg.Graph('rl', …)`"
FOLDER = re.compile(r"\w[\w. -]{0,59}")  # what a graph's folder may be called


@dataclass(frozen=True)
class Stage:
    """A graph of a curriculum: how it is made, and its plan with stand-ins for the folders that earlier graphs will leave.

    `takes` are the earlier graphs whose weights it starts from. `stand_in` is the folder that its trained model starts from, or None
    where no later graph takes its weights.
    """

    make: Callable[..., Graph]
    takes: tuple[str, ...]
    steps: int
    plan: Plan
    stand_in: str | None

    @property
    def name(self) -> str:
        """The graph's name."""
        return self.plan.graph

    def compile(self, folders: Mapping[str, str], cluster: Cluster, costs: Costs | None = None) -> Plan:
        """Plan the graph on the weights in these folders."""
        return compile(self.make(**{name: folders[name] for name in self.takes}), cluster, costs)


def planned_stages(graphs: Sequence[Any], steps: Sequence[int], cluster: Cluster) -> tuple[Stage, ...]:
    """Plan all graphs of a curriculum, each on stand-ins for the weights of earlier ones, and check all that a launch checks.

    Raises PlanError, or the error of a graph, where one cannot be made, planned or launched.
    """
    if not graphs or len(steps) != len(graphs):
        raise PlanError(f"run(steps={show_value(list(steps))}) of {len(graphs)} graphs: pass at least one graph, and its steps for each")
    found: list[Stage] = []
    folders: dict[str, str] = {}
    for place, (given, count) in enumerate(zip(graphs, steps, strict=True)):
        where = f"graph {place + 1} of {len(graphs)}"
        make, takes = _maker(given, where, list(folders))
        graph = _build_graph(make, takes, folders, where)
        _check_name(graph.name, [stage.name for stage in found], where)
        plan = compile(graph, cluster)
        graph = checked_source(plan, to_come=[folders[name] for name in takes])
        check_sendable(graph)
        plan = replace(plan, source=graph)  # with the folders of models that this downloaded
        stand_in = None
        if place + 1 < len(graphs):
            stand_in = folders[graph.name] = _handed_on(graph, plan, where)
        found.append(Stage(make, takes, count, plan, stand_in))
    taken = {name for stage in found for name in stage.takes}
    for stage in found[:-1]:
        if stage.name not in taken:
            raise PlanError(
                f"run(): no later graph starts from the weights of '{stage.name}'; make a later one of a function with the parameter "
                f"{stage.name}, e.g. `def rl({stage.name}): …`, or leave '{stage.name}' out"
            )
    return tuple(found)


def _maker(given: Any, where: str, earlier: Sequence[str]) -> tuple[Callable[..., Graph], tuple[str, ...]]:
    """Find how a graph is made, and the earlier graphs that the parameters of its function name."""
    if isinstance(given, Graph):
        return lambda: given, ()
    if not callable(given):
        raise PlanError(f"run(), {where}, is {show_value(given)}; {HOW}")
    takes = []
    for parameter in inspect.signature(given).parameters.values():
        if parameter.name in earlier:
            takes.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise PlanError(
                f"run(), {where}, is made by a function with the parameter '{parameter}', which is not the name of an earlier graph; "
                f"these are {list(earlier)}: name one of them, or set a default"
            )
    return given, tuple(takes)


def _build_graph(make: Callable[..., Graph], takes: Sequence[str], folders: Mapping[str, str], where: str) -> Graph:
    try:
        graph = make(**{name: folders[name] for name in takes})
    except RlgraphError:
        raise
    except Exception as error:
        raise PlanError(f"run(), {where}: its function failed, {type(error).__name__}: {error}; {HOW}") from error
    if not isinstance(graph, Graph):
        raise PlanError(f"run(), {where}: its function returned {show_value(graph)}; {HOW}")
    return graph


def _handed_on(graph: Graph, plan: Plan, where: str) -> str:
    """Find the folder that the model came from whose weights a later graph may take."""
    trained = trained_models(graph, plan)
    policies = [model.name for model in trained if model.scores == "log_probs"]
    if len(policies) > 1 or (not policies and len(trained) > 1):
        raise PlanError(
            f"run(), {where}, '{graph.name}' trains {[model.name for model in trained]}, but later graphs receive the weights of only one "
            "model: put it last, or run it separately and export each model, e.g. rg.runs.export(checkpoint, folder, policy=…)"
        )
    return choose_model(trained, None, f"run(), {where}, '{graph.name}', hands on its weights").path


def _check_name(name: str, earlier: Sequence[str], where: str) -> None:
    if name in earlier:
        raise PlanError(
            f"run(), {where}, has the name {show_value(name)} of an earlier graph; names of graphs are folders and must differ: rename one"
        )
    if not FOLDER.fullmatch(name):
        raise PlanError(
            f"run(), {where}, is called {show_value(name)}; the name becomes a folder: use letters, digits, - and _, at most 60"
        )


# What a curriculum's folder says of its graphs: which are done, and from which weights each began.

DONE, BEGAN, MODEL, CHECKPOINTS = "done.json", "began.json", "model", "checkpoints"


@dataclass(frozen=True)
class StageFolder:
    """The folder of one graph: its records, its checkpoints, and once it is done its final weights."""

    path: Path

    @property
    def model(self) -> Path:
        """The folder of its final weights."""
        return self.path / MODEL

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / CHECKPOINTS

    def has_run(self, stage: Stage) -> bool:
        """Tell whether the graph is done. Raises CheckpointError if another graph is done here, or its weights are gone."""
        if not (self.path / DONE).exists():
            return False
        found = difference(json.loads((self.path / DONE).read_text()), stage_identity(stage, stage.plan))
        if found:
            raise CheckpointError(f"'{self.path}' holds another, finished graph: {found}; pass another folder")
        if stage.stand_in is not None and not self.model.is_dir():
            raise CheckpointError(f"'{self.path}' records a finished graph, but '{self.model}' is missing; pass another folder")
        return True

    def mark_done(self, stage: Stage, plan: Plan) -> None:
        """Note that the graph is done."""
        _write(self.path / DONE, stage_identity(stage, plan))

    def begin(self, weights: Mapping[str, str]) -> None:
        """Note the weights that the graph begins from: digests by earlier graph.

        Raises CheckpointError if it began from others, which its checkpoints do not go with.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self.checkpoints.exists() and (self.path / BEGAN).exists():
            found = difference(json.loads((self.path / BEGAN).read_text()), dict(weights))
            if found:
                raise CheckpointError(f"'{self.checkpoints}' belong to a run from other weights: {found}; pass another folder")
        _write(self.path / BEGAN, dict(weights))


def stage_identity(stage: Stage, plan: Plan) -> dict[str, Any]:
    """Collect, as plain values, what a graph that is done and the one that is asked for must have in common."""
    assert isinstance(plan.source, Graph)
    found = fingerprint(plan.source, plan)
    found.pop("revisions", None)  # of stand-ins, while the graph is planned
    return {"steps": stage.steps, "hands on": stage.stand_in is not None, **found}


def digest(folder: Path) -> str:
    """Hash the weights in a folder."""
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            whole.update(hashlib.file_digest(data, "sha256").digest())
    return whole.hexdigest()


def lines_of(folder: Path) -> Iterator[Mapping[str, float]]:
    """Yield the metrics of each step so far."""
    file = folder / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        yield json.loads(line)


def _write(path: Path, value: Any) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value, indent=1))
    unfinished.replace(path)


PROFILED = "profile.yaml"


@dataclass(frozen=True)
class Finished:
    """A graph of a curriculum that is done: its name, its folder of records, and the folder of its final weights.

    `metrics` are those of its last step. `model` is None for the last graph of a curriculum, whose weights `rg.runs.export` takes home.
    """

    name: str
    folder: Path
    model: Path | None
    metrics: Mapping[str, float]


@check_arguments(PlanError)
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

    A graph that starts from the weights of other graphs is a function that returns it. Its parameters name earlier graphs, and receive
    the folders of their final weights, in float32. A policy can start there, a reference use them, or a reward model score with them.

    All graphs are built, compiled and checked before the first one starts; the initial folders of trained models stand in for
    folders that do not exist yet. `profiled` is the number of steps that measure each graph's costs before it starts.

    Each graph has a folder of its name in `out`, with its records, its checkpoints, and its weights as `model`.
    `out/run.html` reports on all graphs. After a kill, run the same call again: it skips finished graphs, and resumes the interrupted
    graph from its newest checkpoint.

    >>> import tempfile, rlgraph as rg
    >>> rg.run([rg.Graph("sums", rg.prompts([{"prompt": "1 + 1 ="}], count=4))], tempfile.mkdtemp(), steps=[1, 2])
    Traceback (most recent call last):
    rlgraph.errors.PlanError: run(steps=[1, 2]) of 1 graphs: pass at least one graph, and its steps for each

    Raises PlanError for graphs that cannot follow each other, CheckpointError for a folder of another curriculum, and the errors of
    `compile`, `launch` and of the steps.
    """
    where, devices = Path(out), cluster or discovery.cluster()
    if where.exists() and not where.is_dir():
        raise PlanError(f"run(out='{out}'): it is a file; pass a folder, which is created if missing")
    stages = planned_stages(graphs, steps, devices)
    folders = {stage.name: StageFolder(where / stage.name) for stage in stages}
    done = [folders[stage.name].has_run(stage) for stage in stages]
    if done != sorted(done, reverse=True):
        raise PlanError(
            f"run(out='{out}'): a later graph is finished but an earlier one is not, so the folder is inconsistent; use another folder"
        )
    where.mkdir(parents=True, exist_ok=True)
    for stage, over in zip(stages, done, strict=True):
        if not over:
            try:
                _run(stage, folders, devices, profiled, every, restarts, quiet)
            finally:
                report(where, stages, folders)
    if all(done):
        report(where, stages, folders)
    return tuple(_finish_stage(stage, folders[stage.name]) for stage in stages)


def _run(stage: Stage, folders: Mapping[str, StageFolder], cluster: Cluster, profiled: int, every: int, restarts: int, quiet: bool) -> None:
    """Run one graph from where it is to its end, and leave its weights for later ones."""
    own, models = folders[stage.name], {name: folders[name].model for name in stage.takes}
    own.begin({name: digest(folder) for name, folder in models.items()})
    paths = {name: str(folder) for name, folder in models.items()}
    plan = stage.compile(paths, cluster, _costs(stage, own, paths, cluster, profiled))
    with launch(plan, checkpoint=own.checkpoints, every=every, restarts=restarts) as job:
        for _ in record(job, stage.steps, own.path, quiet=quiet):
            pass
    if stage.stand_in is not None:
        export(own.checkpoints, own.model, "float32")
    own.mark_done(stage, plan)


def _costs(stage: Stage, own: StageFolder, paths: Mapping[str, str], cluster: Cluster, profiled: int) -> Costs | None:
    """Measure the costs of a graph, once, by a short profile."""
    file = own.path / PROFILED
    if profiled and not file.exists():
        profile(stage.make(**paths), cluster, profiled).to_file(file)
    return Costs.from_file(file) if profiled else None


def _finish_stage(stage: Stage, folder: StageFolder) -> Finished:
    last = list(lines_of(folder.path))[-1:]
    return Finished(stage.name, folder.path, folder.model if stage.stand_in is not None else None, last[0] if last else {})


def report(where: Path, stages: Sequence[Stage], folders: Mapping[str, StageFolder]) -> None:
    """Write the report of all graphs so far."""
    found = []
    for stage in stages:
        own, lines = folders[stage.name], list(lines_of(folders[stage.name].path))
        state = "done" if own.has_run(stage) else "under way" if lines else "to come"
        weights = " and ".join(f"the weights of '{name}'" for name in stage.takes) or "its own folders"
        found.append(GraphReport(stage.name, state, stage.steps, weights, stage.name, lines, _run_of(own.path)))
    write_joint(where / FILE, where.absolute().name, found)


def _run_of(folder: Path) -> Run | None:
    try:
        return Run.load(folder)
    except DataError:
        return None
