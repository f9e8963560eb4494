"""Record a run: a progress bar while it goes, and the files that it leaves."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rlgraph.compiler import Plan, compile
from rlgraph.runtime.measure import Step
from rlgraph.views import curve, timeline

if TYPE_CHECKING:
    from rlgraph.runtime.job import Job

REWARD = "critic/rewards/mean"
TIMELINE_STEPS = 6


def record(job: "Job", steps: int, out: str | Path) -> Iterator[Step]:
    """Run `steps` steps of a job and give each, as `job.steps` does, with a progress bar and a folder of records.

    The folder gets `metrics.jsonl` (a line a step, as it finishes), `plan.json`, the graph as `graph.svg`, the timelines
    `predicted.json` and `measured.json` for ui.perfetto.dev, and `reward.svg`. Once there are steps to learn from, picture
    and prediction use the measured seconds of each node. Files of an earlier run in the folder are replaced; a job that went on from
    a checkpoint goes on with `metrics.jsonl`, with one line for each step.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    plan = job.plan
    assert isinstance(plan, Plan)
    plan.draw(folder / "graph.svg")
    (folder / "plan.json").write_text(plan.to_json())
    done: list[Step] = []
    console = Console()
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[last]}"), TimeElapsedColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    try:
        with progress, open_metrics(folder / "metrics.jsonl", job.finished) as lines:
            task = progress.add_task("steps", total=steps, completed=job.finished, last="starting the first step")
            for step in job.steps(steps):
                done.append(step)
                lines.write(json.dumps({"step": step.index, "staleness": step.staleness, **step.metrics}) + "\n")
                lines.flush()
                progress.update(task, advance=1, last=_summary(step))
                if not console.is_terminal:
                    console.print(f"step {step.index + 1}/{steps}  {_summary(step)}", highlight=False)
                yield step
    finally:
        if done:
            _conclude(job, plan, done, folder, console)


def open_metrics(path: Path, finished: int) -> TextIO:
    """Return the file of metrics open at its end, with the lines of the first `finished` steps and no others."""
    file = path.open("a+" if finished else "w+")
    file.seek(0)
    end = 0
    while (line := file.readline()).endswith("\n") and json.loads(line)["step"] < finished:
        end = file.tell()
    file.seek(end)
    file.truncate()
    return file


def _summary(step: Step) -> str:
    reward = f"reward {step.metrics[REWARD]:.3f}  " if REWARD in step.metrics else ""
    return f"{reward}staleness {step.staleness}  {step.seconds:.2f} s"


def _conclude(job: "Job", plan: Plan, done: list[Step], folder: Path, console: Console) -> None:
    """Write what needs the whole run, and say where everything is."""
    spans = job.spans()
    last = max(done[-1].index + 1 - TIMELINE_STEPS, 0)
    timeline.write(folder / "measured.json", [s for s in spans if s.step >= last], plan)
    rewards = [step.metrics.get(REWARD, float("nan")) for step in done]
    (folder / "reward.svg").write_text(curve.svg("mean reward", [s.index for s in done], {"reward": rewards}, "reward"))
    files = {"metrics.jsonl": "metrics, a line a step", "reward.svg": "mean reward by step", "graph.svg": "the graph, placed"}
    files |= {"plan.json": "the plan as data", "measured.json": "timeline as it was (ui.perfetto.dev)"}
    if len(done) > 1 and plan.source is not None:
        priced = compile(plan.source, plan.cluster, job.costs())
        priced.draw(folder / "graph.svg")
        priced.timeline(folder / "predicted.json", steps=TIMELINE_STEPS)
        files["predicted.json"] = "timeline as predicted from the measured seconds of each node"
        took = median(step.seconds for step in done[1:])
        console.print(f"a step took {took:.2f} s (median), {priced.prediction.step_s:.2f} s predicted from its nodes", highlight=False)
    job.costs().to_file(folder / "costs.yaml")
    files["costs.yaml"] = "what each node costs, for compile and tune"
    job.trace().to_file(folder / "trace.json")
    files["trace.json"] = "every firing, for replay"
    for name, what in files.items():
        console.print(f"  {folder / name}: {what}", highlight=False)
