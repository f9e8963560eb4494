"""The forward graph of a plan as a Compiled Graph of Ray, for Ray's own tools: an edge for each channel.

A job does not run it: its workers fire in the plan's order over rlgraph's channels, and Ray carries the ticks alone.
"""

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlgraph.errors import PlanError
from rlgraph.plan.plan import Plan
from rlgraph.plan.routes import writers_of

BY_GRAPHVIZ = (".svg", ".png", ".pdf")


def ray_dag(plan: Plan, actors: Mapping[str, Any]) -> Any:
    """Bind each node of one step to the actors of its workers. Raises PlanError where a worker has no actor, or no method `fire`."""
    from ray.dag import InputNode, MultiOutputNode

    missing = [worker.name for worker in plan.workers if worker.name not in actors]
    if missing:
        raise PlanError(f"ray_dag(actors): workers {missing} have no actor; give one for each of {[w.name for w in plan.workers]}")
    unfit = [name for name, actor in actors.items() if not hasattr(actor, "fire")]
    if unfit:
        raise PlanError(f"ray_dag(actors): the actors of {unfit} have no method fire(node, step, *batches), which each node is bound to")
    fired: dict[tuple[str, str], Any] = {}  # by node and worker
    read: set[tuple[str, str]] = set()
    with InputNode() as step:
        for name in (node.name for node in plan.nodes):
            sources = [
                (channel.writer, worker)
                for channel in plan.channels
                if channel.kind == "batch" and name in channel.readers
                for worker in writers_of(plan, channel.writer)
            ]
            for worker in plan.node(name).workers:
                fired[name, worker] = actors[worker].fire.bind(name, step, *(fired[source] for source in sources))
            read.update(sources)
    return MultiOutputNode([node for firing, node in fired.items() if firing not in read])


def draw(compiled: Any, path: Path) -> None:
    """Draw a compiled graph of Ray: as Mermaid text, or by Ray's own `visualize`. Raises PlanError without graphviz, or for another ending.

    Ray's "ascii" is never taken: it places a task under a reader of the stage before, and fails where an edge skips a stage.
    """
    if path.suffix == ".mmd":
        path.write_text(mermaid(compiled), encoding="utf-8")
        return
    if path.suffix not in BY_GRAPHVIZ:
        raise PlanError(f"draw_ray('{path}'): a graph of Ray is drawn as .mmd, {', '.join(BY_GRAPHVIZ)}; choose one of these endings")
    lacking = [
        what
        for what, there in (
            ("the package `graphviz` (pip install graphviz)", importlib.util.find_spec("graphviz")),
            ("the program `dot` (apt install graphviz)", shutil.which("dot")),
        )
        if not there
    ]
    if lacking:
        raise PlanError(f"draw_ray('{path}'): {path.suffix} needs {' and '.join(lacking)}; install it, or end the name in .mmd")
    compiled.visualize(str(path.with_suffix("")), format=path.suffix[1:])


def mermaid(compiled: Any) -> str:
    """Write a compiled graph of Ray as a Mermaid flowchart: its tasks, and an edge for each value that one reads of another."""
    lines = ["flowchart LR"]
    for index, task in compiled.idx_to_task.items():
        lines.append(f'  t{index}["{_label(task.dag_node)}"]')
        sources = [compiled.dag_node_to_idx[read] for read in task.dag_node.get_args() if read in compiled.dag_node_to_idx]
        lines += [f"  t{source} --> t{index}" for source in sources]
    return "\n".join(lines) + "\n"


def _label(task: Any) -> str:
    """Name a task: the node that it fires, or Ray's own kind of task where it is the input or the output."""
    fired = [given for given in task.get_args()[:1] if isinstance(given, str)]
    return "".join(char if char.isalnum() or char in " _-." else "_" for char in (fired or [type(task).__name__])[0])
