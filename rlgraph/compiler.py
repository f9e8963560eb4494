"""`rlgraph.compile` and the plan it returns: the planning layer's values, with pictures and a way to run them."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlgraph.errors import DataError, PlanError, PlanWarning
from rlgraph.graph import Graph
from rlgraph.planning import plan as values
from rlgraph.planning.cluster import Cluster
from rlgraph.planning.compile import compile_plan
from rlgraph.planning.costs import Costs
from rlgraph.planning.fit import costs_of
from rlgraph.planning.period import simulate
from rlgraph.planning.schedule import Event
from rlgraph.planning.shapes import ModelShape
from rlgraph.settings import Count, Natural, Seconds, checked
from rlgraph.silent import teaches_nothing
from rlgraph.views import draw, timeline
from rlgraph.views.mermaid import mermaid
from rlgraph.views.text import text

if TYPE_CHECKING:
    from rlgraph.runtime.checkpoint import Recovery
    from rlgraph.runtime.job import Job
    from rlgraph.runtime.local import LocalJob

DEADLINE_S = 600.0


@dataclass(frozen=True)
class Plan(values.Plan):
    """What a graph becomes on a cluster. It prints, draws, compares, serialises, and runs.

    A plan read back with `from_json` has no graph, so it cannot be launched; all else works.
    """

    source: Graph | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return text(self)

    @checked(PlanError)
    def draw(self, path: str | Path) -> None:
        """Write a picture: SVG, or Mermaid text if the name ends in `.mmd`. Raises PlanError for any other ending."""
        writers: dict[str, Callable[[values.Plan], str]] = {".svg": draw.svg, ".mmd": mermaid}
        if Path(path).suffix not in writers:
            raise PlanError(f"draw('{path}'): a plan is drawn as .svg or .mmd; choose one of these endings")
        Path(path).write_text(writers[Path(path).suffix](self), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return draw.svg(self)

    @checked(PlanError)
    def timeline(self, path: str | Path, steps: Count = 6) -> None:
        """Write the predicted timeline of the first `steps` steps, as Chrome-trace JSON for ui.perfetto.dev."""
        nodes = {worker.name: worker.nodes for worker in self.workers}
        due = self.due_events()

        def seconds(event: Event, step: int) -> float:  # an event's own are those of a step on average
            happens = due.get(event.name)
            return event.seconds if happens is None else event.seconds * happens.every * happens(step)

        spans = [span for span in simulate(self.schedule, steps, seconds) if span.name not in due or due[span.name](span.step)]
        ranks = [replace(span, worker=name) for span in spans for name, fired in nodes.items() if fired == nodes[span.worker]]
        timeline.write(path, ranks, self)

    def to_json(self) -> str:
        """Return the plan as JSON, without its graph; `Plan.from_json` gives an equal plan back."""
        return values.bare(self).to_json()

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read the plan written by `to_json`. Raises PlanError for text that is none, or holds a key that means nothing."""
        return dressed(values.Plan.from_json(text), None)

    @checked(PlanError)
    def launch(
        self,
        *,
        dispatch: Literal["compiled_graph", "calls"] | None = None,
        deadline_s: Seconds = DEADLINE_S,
        checkpoint: str | Path | None = None,
        every: Count = 10,
        keep: Count = 2,
        restarts: Natural = 0,
        fresh: bool = False,
    ) -> "Job":
        """Return the job, for a `with` block: it starts the workers on Ray and ends them when the block is left.

        `deadline_s` bounds every wait of one worker for another; `dispatch` chooses how steps are sent to the workers:
        by a Ray Compiled Graph, or by actor calls, which several hosts need (None: whichever fits the plan).

        `checkpoint` is a folder: a checkpoint is written into it every `every` steps and at the end, the newest `keep` are kept, and a
        folder that holds one is gone on from (`fresh=True` moves them aside and starts anew). `restarts` is how often in a row, without
        a further checkpoint, the job starts again by itself when a worker dies or a node fails.

        Raises PlanError where this machine lacks what the plan was compiled for, DataError for models and prompts that
        cannot be used: before anything starts. Entering the job raises CheckpointError for a folder that cannot be used.
        """
        from rlgraph.runtime.job import Job
        from rlgraph.runtime.machine import local_cluster
        from rlgraph.runtime.sendable import check_sendable

        graph = self._checked_source()
        check_sendable(graph)
        here = local_cluster()
        if self.cluster.gpus > here.gpus and self.cluster.hosts == 1:
            raise PlanError(
                f"the plan is for {self.cluster.gpus} GPUs, but this machine has {here.gpus}; compile for rlgraph.local_cluster() instead"
            )
        chosen = dispatch or ("calls" if self.cluster.hosts > 1 else "compiled_graph")
        if chosen == "compiled_graph" and self.cluster.hosts > 1:
            raise PlanError(
                f"dispatch='compiled_graph' and {self.cluster.hosts} hosts: Compiled Graphs can hang between hosts; "
                "launch with dispatch='calls'"
            )
        recovery = _recovery(checkpoint, every, keep, restarts, fresh)
        return Job(graph, self, dispatch_name=chosen, deadline_s=deadline_s, recovery=recovery)

    def run_here(self) -> "LocalJob":
        """Return a job that runs the same plan in this one process, without Ray: the oracle for tests, and for debuggers."""
        from rlgraph.runtime.local import LocalJob

        return LocalJob(self._checked_source(), self)

    def _checked_source(self) -> Graph:
        if self.source is None:
            raise PlanError("this plan was read from JSON and has no graph to run; compile the graph instead")
        for node in self.source.nodes:
            if hasattr(node.operation, "check"):
                node.operation.check(node)
        return self.source


def _recovery(checkpoint: str | Path | None, every: int, keep: int, restarts: int, fresh: bool) -> "Recovery | None":
    from rlgraph.runtime.checkpoint import Recovery

    if checkpoint is None:
        if (every, keep, restarts, fresh) != (10, 2, 0, False):
            raise PlanError("launch(every=, keep=, restarts=, fresh=) are about checkpoints; say where: launch(checkpoint='folder', ...)")
        return None
    return Recovery(Path(checkpoint), every, keep, restarts, fresh)


@checked(PlanError)
def compile(graph: Graph, cluster: Cluster, costs: Costs | None = None) -> Plan:
    """Return the plan of a graph on a cluster: placement, channels, schedule, staleness bound, predicted step time.

    Pure: no Ray, no GPU, no clock, milliseconds. Without `costs` they are estimated from the models' config.json and the
    cluster's kind of GPU, or nominal ones are used, and said so beside every number. Where the split of the devices is chosen by a
    plain number of seconds, which counts the same on any of them, a PlanWarning says so, and the plan's text. Another one says where
    groups of one, or greedy ones, are compared, which teaches nothing.
    Raises PlanError where the graph does not fit the cluster or its memory, or the costs do not fit the graph.
    """
    plan = compile_plan(graph, cluster, costs, shapes_of(graph))
    for warning in (*plan.prediction.warnings, *teaches_nothing(graph)):
        warnings.warn(f"compile('{graph.name}'): {warning}", PlanWarning, stacklevel=3)
    return dressed(plan, graph)


def shapes_of(graph: Graph) -> Mapping[str, ModelShape]:
    """Return the shapes of the graph's models whose config.json is at hand; no other file of a model is read."""
    paths = {node.model.path for node in graph.nodes if node.model is not None}
    found = {path: _shape(path) for path in paths}
    return {path: shape for path, shape in found.items() if shape is not None}


@lru_cache(maxsize=64)
def _shape(path: str) -> ModelShape | None:
    file = Path(path) / "config.json"
    try:
        return ModelShape.from_config(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
    except (ValueError, OSError) as broken:
        raise DataError(f"'{file}' is not JSON ({broken!s:.80}); write the model folder again") from None


@checked(PlanError)
def profile(graph: Graph | Sequence[Graph], cluster: Cluster, steps: Count = 3) -> Costs:
    """Run a few steps of a graph on Ray and return what its nodes cost, for `compile` and `tune`.

    One step more is run than counted, since the first one warms up. A long tail of lengths needs more steps: what has not
    been seen is not foreseen. Several graphs, as one more with half the prompts, run one after another, and the costs explain all
    of them: what a node takes whatever its batch is told from what grows with it. Lengths and devices are those of the first. One
    on other devices, as in turns, tells what engines and ranks take there, and what waking and sleeping take.

    Raises PlanError for fewer than 1 step, no graph, or graphs whose nodes differ; and whatever `launch` and the steps raise.
    """
    graphs = [graph] if isinstance(graph, Graph) else list(graph)
    plans = [compile(each, cluster) for each in graphs]
    if not plans or any([node.name for node in plan.nodes] != [node.name for node in plans[0].nodes] for plan in plans):
        raise PlanError(
            f"profile({[plan.graph for plan in plans]}): graphs profiled together are at least one, with the same nodes; they may "
            "differ in prompts, groups, lengths, depth and devices"
        )
    records = []
    for plan in plans:
        with plan.launch() as job:
            for _ in job.steps(steps + 1):
                pass
            records.append(job.record())
    return costs_of(records)


def dressed(plan: values.Plan, graph: Graph | None) -> Plan:
    """Return the plan of a graph as one that prints, draws and launches."""
    return Plan(**{f.name: getattr(plan, f.name) for f in fields(values.Plan)}, source=graph)
