"""The one facade: compile a graph; draw, launch, record, profile and tune its plan. `Plan` calls it too."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rlgraph import notices
from rlgraph.analysis.run import Run
from rlgraph.engines.hf import model_files
from rlgraph.engines.hf.export import AdapterForm, ExportDtype, Exported
from rlgraph.errors import DataError, PlanError, PlanWarning, show_value
from rlgraph.graph.graph import Graph, no_signal_warnings, unreached_warnings, with_models
from rlgraph.nodes.rewards.reward_model import RewardModel
from rlgraph.nodes.rollout.rollout import Generator
from rlgraph.nodes.training.learned_reward import check_heads
from rlgraph.nodes.training.trained_model import TrainedModel
from rlgraph.nodes.trial import try_functions
from rlgraph.plan.calibrate import costs_of
from rlgraph.plan.channels import check_encrypted, with_transport
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.costs import Costs
from rlgraph.plan.model_shapes import shapes_of
from rlgraph.plan.placement import splits
from rlgraph.plan.plan import DEADLINE_S, Plan, Replan
from rlgraph.plan.play import simulate
from rlgraph.plan.rehearse import ClusterSite, Rehearsal, rehearse_graph
from rlgraph.plan.replan import Replanner
from rlgraph.plan.schedule import Event
from rlgraph.record import record
from rlgraph.render import report as report_page
from rlgraph.render.plan_picture import svg
from rlgraph.render.report import model_card
from rlgraph.render.text import mermaid, text
from rlgraph.render.timeline import write_trace
from rlgraph.settings import Count, Natural, Range, Seconds, check_arguments
from rlgraph.tuning import replay, tune

if TYPE_CHECKING:
    from rlgraph.recording.watch import Watch
    from rlgraph.runtime.checkpoint.store import Recovery
    from rlgraph.runtime.driver.job import Job
    from rlgraph.runtime.local import LocalJob

# Put the folder of a model in the place of its hub id, before a graph is planned or run.


def with_folders(graph: Graph, find: Callable[[str], str | None]) -> Graph:
    """Copy a graph with folders in the places of the hub ids of its models, so that its nodes and workers all read the same revision.

    Where `find` has no folder the id stays; a graph without hub ids is returned as it is.
    """
    models = [node.model for node in graph.nodes if isinstance(node.model, Generator | TrainedModel | RewardModel)]
    found = {model: find(model.path) for model in dict.fromkeys(models) if model_files.is_hub_id(model.path)}
    return with_models(graph, {model: replace(model, path=folder) for model, folder in found.items() if folder is not None})


__all__ = [
    "compile",
    "draw",
    "draw_ray",
    "export",
    "launch",
    "model_card",
    "profile",
    "ray_dag",
    "record",
    "rehearse",
    "replay",
    "report",
    "run_here",
    "svg",
    "text",
    "timeline",
    "tune",
    "watch",
]


@check_arguments(PlanError)
def compile(graph: Graph, cluster: Cluster, costs: Costs | None = None) -> Plan:
    """Plan a graph on a cluster: placement, channels, schedule, staleness bound, predicted step time.

    >>> import torch, rlgraph as rg
    >>> @rg.node(reads="prompt_texts", writes="rewards")
    ... def brevity(batch):
    ...     return {"rewards": torch.tensor([-float(len(text)) for text in batch["prompt_texts"]])}
    >>> graph = rg.Graph("lengths", brevity(rg.prompts([{"prompt": "1 + 1 ="}], count=8)))
    >>> rg.compile(graph, rg.Cluster(cpus=2), rg.planning.Costs({"prompts": 0.25, "brevity": 0.5})).prediction.step_s
    0.75

    Compiling is a pure function: it starts nothing and needs no GPU. It lasts milliseconds for a few devices, and seconds for 128 GPUs.

    * `graph`: the graph. Pools with `share=None` get the split of the devices with the shortest predicted step.
    * `cluster`: `rg.cluster()`, `rg.local_cluster()`, or an `rg.Cluster` that this machine need not have.
    * `costs`: the seconds of each node, from `rg.planning.profile`, `Job.costs` or a file. None estimates them from the models' config.json
      and the cluster's kind of GPU; if that is impossible, the costs are placeholders, and the plan says so.

    It issues a PlanWarning if a plain number of seconds, which counts the same on any number of devices, decides the split of the devices.
    Other warnings name comparisons without a learning signal (groups of one response, or greedy responses), and nodes that never run.

    Raises PlanError if the graph does not fit the cluster or its memory, or the costs do not fit the graph.
    """
    graph = with_folders(graph, model_files.find_cached_folder)
    plan = compile_plan(graph, cluster, costs, shapes_of(graph))
    for warning in (*plan.prediction.warnings, *no_signal_warnings(graph), *unreached_warnings(graph)):
        warnings.warn(f"compile('{graph.name}'): {warning}", PlanWarning, stacklevel=3)
    return plan


@check_arguments(PlanError)
def rehearse(
    graph: Graph,
    cluster: Cluster,
    costs: Costs | None = None,
    *,
    site: ClusterSite | None = None,
    steps: Count = 1000,
    every: Count | None = None,
    seed: Natural = 0,
) -> Rehearsal:
    """Simulate a whole run of a graph at a site: its wall time, and the shares lost to failures, checkpoints, links and stragglers.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"))
    >>> batch = rg.examples([{"prompt": "1 + 1 =", "completion": " 2"}], 4, policy)
    >>> graph = rg.Graph("sft", policy.update(batch, loss=rg.SFTLoss()).metrics)
    >>> site = rg.planning.ClusterSite(host_mtbf_s=20_000, restart_s=60, checkpoint_s=10)
    >>> costs = rg.planning.Costs({"examples": 0.0, "update": 5.0})
    >>> found = rg.planning.rehearse(graph, rg.Cluster(cpus=2), costs, site=site, steps=10_000, every=100)
    >>> print(found.failures, round(found.lost_to["checkpoints"], 3))
    1 0.019

    Nothing starts. It simulates the plan's schedule step by step: lengths drawn as for predictions, links, stragglers, checkpoints, and
    failures that set the run back to the last checkpoint. A few of many equal engines represent all.

    * `graph`, `cluster`, `costs`: as for `rg.compile`.
    * `site`: links, slow hosts and failures. None: nothing fails, no host is slow, and the seconds of links come from the costs.
    * `steps`: the steps of the run.
    * `every`: the steps from one checkpoint to the next. None: no checkpoints.
    * `seed`: of lengths and failures. The same seed yields the same run.

    Raises PlanError as `compile` does, and for settings without effect, e.g. free checkpoints if nothing fails.
    """
    graph = with_folders(graph, model_files.find_cached_folder)
    return rehearse_graph(graph, cluster, costs, shapes_of(graph), site or ClusterSite(), steps, every, seed)


@check_arguments(PlanError)
def draw(plan: Plan, path: str | Path) -> None:
    """Write the picture of a plan: SVG, or Mermaid text if the name ends in `.mmd`. Raises PlanError for any other ending."""
    writers: dict[str, Callable[[Plan], str]] = {".svg": svg, ".mmd": mermaid}
    if Path(path).suffix not in writers:
        raise PlanError(f"draw('{path}'): a plan is drawn as .svg or .mmd; choose one of these endings")
    Path(path).write_text(writers[Path(path).suffix](plan), encoding="utf-8")


@check_arguments(PlanError)
def timeline(plan: Plan, path: str | Path, steps: Count = 6) -> None:
    """Write the predicted timeline of the first `steps` steps, as Chrome-trace JSON for ui.perfetto.dev."""
    nodes = {worker.name: worker.nodes for worker in plan.workers}
    due = plan.due_events()

    def seconds(event: Event, step: int) -> float:  # an event's own are those of a step on average
        happens = due.get(event.name)
        return event.seconds if happens is None else event.seconds * happens.every * happens(step)

    spans = [span for span in simulate(plan.schedule, steps, seconds) if span.name not in due or due[span.name](span.step)]
    ranks = [replace(span, worker=name) for span in spans for name, fired in nodes.items() if fired == nodes[span.worker]]
    write_trace(path, ranks, plan)


@check_arguments(PlanError)
def report(run: Run | str | Path, path: str | Path | None = None) -> Path:
    """Write the report of a run, or of the folder of one: one HTML file that needs no server and no network. Returns its path.

        rg.report("runs/math")  # writes runs/math/run.html, also if the run is still in progress, or was killed

    >>> import rlgraph as rg
    >>> rg.report("no/such/run")
    Traceback (most recent call last):
    rlgraph.errors.DataError: 'no/such/run/run.json': there is no recorded run; rg.record(job, steps, folder) writes one

    Without `path` the file is `run.html` in the folder. Raises DataError for a folder without a run that can be read.
    """
    if isinstance(run, Run):
        target = Path(path or report_page.FILE)
        report_page.write(target, run)
        return target
    target = Path(path or Path(run) / report_page.FILE)
    report_page.write(target, Run.load(run), run)
    return target


@check_arguments(PlanError)
def watch(folder: str | Path, port: Annotated[int, Range(least=0, most=65535, rule="a port, or 0 for any that is free")] = 0) -> "Watch":
    """Serve the report of a run's folder on 127.0.0.1 only; the page updates itself during the run.

        with rg.runs.watch("runs/math") as view:
            print(view.url)
            view.wait()  # until Ctrl-C

    >>> import tempfile, rlgraph as rg
    >>> with rg.runs.watch(tempfile.mkdtemp()) as view:
    ...     print(view.state()["said"])
    not known to run

    * `folder`: the folder of `rg.record`. The run may not have started yet, or may be over.
    * `port`: 0 for any that is free.

    Raises DataError for a folder that does not exist, and for a port in use.
    """
    from rlgraph.recording.watch import Watch

    if not Path(folder).is_dir():
        raise DataError(f"watch({show_value(str(folder))}): no such folder; pass the one that rlgraph.record(job, steps, folder) writes")
    return Watch(Path(folder), port)


@check_arguments(PlanError)
def launch(
    plan: Plan,
    *,
    dispatch: Literal["compiled_graph", "calls", "processes"] | None = None,
    deadline_s: Seconds = DEADLINE_S,
    checkpoint: str | Path | None = None,
    every: Count = 10,
    keep: Count = 2,
    restarts: Natural = 0,
    fresh: bool = False,
    export_every: Count | None = None,
    replan: Replan | None = None,
    transport: str | None = None,
    wait_for_hosts_s: Seconds | None = None,
    encrypt: bool = False,
) -> "Job":
    """Make the job of a plan; `Plan.launch` documents the arguments and the errors."""
    from rlgraph.runtime.checkpoint.store import choose_model, trained_models
    from rlgraph.runtime.driver.discovery import say_idle_hosts
    from rlgraph.runtime.driver.dispatch import chosen_dispatch
    from rlgraph.runtime.driver.hosts import local_cluster
    from rlgraph.runtime.driver.job import Job
    from rlgraph.runtime.driver.sendable import check_sendable
    from rlgraph.runtime.driver.session import Links

    graph = checked_source(plan)
    plan = replace(plan, source=graph)
    check_sendable(graph)
    here = local_cluster()
    if plan.cluster.gpus > here.gpus and plan.cluster.hosts == 1:
        raise PlanError(
            f"the plan is for {plan.cluster.gpus} GPUs, but this machine has {here.gpus}; compile for rlgraph.cluster() instead"
        )
    plan = plan if transport is None else with_transport(plan, transport)
    dispatch_name = chosen_dispatch(plan, dispatch)
    if wait_for_hosts_s is not None and plan.cluster.hosts == 1:
        raise PlanError(
            f"launch(wait_for_hosts_s={wait_for_hosts_s:g}): the plan runs only on this host and waits for no other; leave it out, or "
            "compile for a cluster of several hosts"
        )
    recovery = _recovery(checkpoint, every, keep, restarts, fresh, export_every)
    if export_every is not None:
        choose_model(trained_models(graph, plan), None, "launch(export_every=)")
    if encrypt:
        check_encrypted(plan)
    say_idle_hosts(plan)
    links = Links(wait_for_hosts_s or 0.0, encrypt)
    if replan is not None and transport is not None:
        raise PlanError("launch(replan=, transport=): the next plan would use the default transport; leave one of the two out")
    replanner = None if replan is None else _replanner(replan, graph, plan, recovery)
    return Job(graph, plan, dispatch_name=dispatch_name, deadline_s=deadline_s, recovery=recovery, links=links, replanner=replanner)


@check_arguments(PlanError)
def export(
    checkpoint: str | Path, folder: str | Path, dtype: ExportDtype = "bfloat16", policy: str | None = None, adapter: AdapterForm = "merged"
) -> Exported:
    """Write a model of a checkpoint as a Hugging Face folder, like `Job.export` for a running job.

    >>> import rlgraph as rg
    >>> rg.runs.export("runs/grpo/checkpoints", "model")  # doctest: +SKIP
    Exported(folder=PosixPath('model'), step=740, dtype='bfloat16', parameters=134515008, bytes=269060344)
    >>> rg.runs.export("no/checkpoints", "model", dtype="float32")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rlgraph.errors.CheckpointError: 'no/checkpoints' does not exist; pass a folder such as `step-00000100`, or ...

    It reads checkpoints of any number of ranks, one shard of one parameter at a time, and needs neither Ray nor a GPU.

    * `checkpoint`: a checkpoint such as `step-00000740`, or a folder of them, whose newest is exported.
    * `folder`: the new folder.
    * `dtype`: of the weights that are written.
    * `policy`: one of several trained models, e.g. "critic". None: the only policy.
    * `adapter`: as for `Job.export`. An adapter that is not merged is bit-identical with dtype="float32".

    Raises CheckpointError for an incomplete checkpoint, and ExportError for a folder that exists or cannot be written, a disk without
    room, and a model whose own folder is gone. No folder is left then.
    """
    from rlgraph.runtime.checkpoint.offline_export import export_checkpoint

    return export_checkpoint(checkpoint, folder, dtype, policy, adapter, model_card)


def run_here(plan: Plan) -> "LocalJob":
    """Make a job that runs the plan in this process, without Ray, for tests and debuggers."""
    from rlgraph.runtime.local import LocalJob

    return LocalJob(checked_source(plan), plan)


def ray_dag(plan: Plan, actors: Mapping[str, Any]) -> Any:
    """Bind the forward graph to an actor for each worker, as a Ray graph with an edge for each channel.

    Each node calls `fire(node, step, *batches)` of its worker's actor. The graph is for Ray's own tools; a job does not run it:

        compiled = plan.ray_dag(actors).experimental_compile()
        rlgraph.api.draw_ray(compiled, "graph.mmd")

    Raises PlanError if a worker has no actor, or an actor has no method `fire`.
    """
    from rlgraph.runtime.driver import ray_dispatch

    return ray_dispatch.ray_dag(plan, actors)


@check_arguments(PlanError)
def draw_ray(compiled: Any, path: str | Path) -> None:
    """Draw a compiled graph of Ray: as Mermaid text if the name ends in `.mmd`, by Ray and graphviz for `.svg`, `.png` and `.pdf`.

    Raises PlanError where graphviz is not installed, with the commands that install it, and for any other ending.
    """
    from rlgraph.runtime.driver import ray_dispatch

    ray_dispatch.draw(compiled, Path(path))


def checked_source(plan: Plan, to_come: Collection[str] = ()) -> Graph:
    """Find the graph that a plan runs: the one it was compiled from, with a folder for each model, operations checked and functions tried.

    The folders `to_come` stand in for those of models to be trained.

    Raises PlanError if the plan was read from JSON.
    """
    if not isinstance(plan.source, Graph):
        raise PlanError("this plan was read from JSON and has no graph to run; compile the graph instead")
    graph = with_folders(plan.source, model_files.download_folder)
    for node in graph.nodes:
        node.operation.check(node)
    check_heads(graph, to_come)
    try_functions(graph)
    return graph


def _recovery(
    checkpoint: str | Path | None, every: int, keep: int, restarts: int, fresh: bool, export_every: int | None
) -> "Recovery | None":
    """Make the checkpoint settings of a launch; None without a folder. Raises PlanError for settings without a folder."""
    from rlgraph.runtime.checkpoint.store import Recovery

    if checkpoint is None:
        if (every, keep, restarts, fresh, export_every) != (10, 2, 0, False, None):
            raise PlanError("launch(every=, keep=, restarts=, fresh=, export_every=) configure checkpoints; pass checkpoint='folder' too")
        return None
    return Recovery(Path(checkpoint), every, keep, restarts, fresh, export_every)


def _replanner(replan: Replan, source: Graph, plan: Plan, recovery: "Recovery | None") -> Replanner:
    """Prepare the looks for faster plans. Raises PlanError without checkpoints, without a choice, or for a graph of other nodes."""
    from rlgraph.runtime.checkpoint.store import difference, fingerprint

    if recovery is None:
        raise PlanError("launch(replan=): a change of plan continues from a checkpoint; pass checkpoint='folder' too")
    if plan.cluster.hosts > 1 and not recovery.restarts:
        notices.here.say("launch(replan=, restarts=0): a lost host ends the run; pass restarts=2 to continue on the hosts that are left")
    if not replan.graphs and plan.cluster.hosts == 1 and len(splits(source, plan.cluster)) == 1:
        raise PlanError(
            f"launch(replan=): there is one way to divide the devices among the pools of graph '{plan.graph}'; give them `share=None`, "
            "pass Replan(graphs=[…]) with other pools, or leave replan out"
        )
    graphs, mine = list[Graph](), fingerprint(source, plan)
    for number, graph in enumerate(replan.graphs):
        other = compile(graph, plan.cluster)
        graphs.append(checked_source(other))
        if found := difference(mine, fingerprint(graphs[-1], other)):
            raise PlanError(f"Replan(graphs=[…]): graph {number} has other nodes: {found}; only pools and their devices may differ")
    return Replanner(replace(replan, graphs=tuple(graphs)), shapes_of)


@check_arguments(PlanError)
def profile(graph: Graph | Sequence[Graph], cluster: Cluster, steps: Count = 3) -> Costs:
    """Run a few steps of a graph on Ray and measure the costs of its nodes, for `compile` and `tune`.

        costs = rg.planning.profile(graph, rg.cluster(), steps=3)
        print(rg.tune(build, rg.Cluster(gpus=8, cpus=64), costs, depth=range(3)))

    * `graph`: one graph, or several that run one after another, for example one with half the prompts. The costs of several separate a
      fixed time from the time that grows with the batch; lengths and devices come from the first. A graph on other devices, for example
      with time-shared engines, adds the seconds of engines and ranks there, and of waking and sleeping.
    * `cluster`: the hosts and devices to run on.
    * `steps`: the steps to measure, after one that warms up. A long tail of response lengths needs more steps: costs only know lengths
      that occurred while profiling.

    Raises PlanError for fewer than 1 step, no graph, or graphs whose nodes differ; and the errors of `launch` and of the steps.

    >>> import rlgraph as rg
    >>> rg.planning.profile([], rg.Cluster(cpus=2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rlgraph.errors.PlanError: profile([]): pass at least one graph, all with the same nodes; they ...
    """
    graphs = [graph] if isinstance(graph, Graph) else list(graph)
    plans = [compile(each, cluster) for each in graphs]
    if not plans or any([node.name for node in plan.nodes] != [node.name for node in plans[0].nodes] for plan in plans):
        raise PlanError(
            f"profile({[plan.graph for plan in plans]}): pass at least one graph, all with the same nodes; they may "
            "differ in prompts, groups, lengths, depth and devices"
        )
    traces = []
    for plan in plans:
        with plan.launch() as job:
            for _ in job.steps(steps + 1):
                pass
            traces.append(job.trace())
    return costs_of(traces)
