"""Seconds from the command to the end of the first step, and what they go into.

    python benchmarks/speed/start.py [--model FOLDER] [--shape 0.6B] [--repeats 2] [--json PATH]
    python benchmarks/speed/start.py --smoke                    # a tiny model

Each run is a process of its own, as a user's: one step of the graph of `recipes/one_step_off.py` (on one GPU, with its models in turns).
It is timed from the process's start by the kernel's clock. The driver's stages follow one another and add up to the whole. Each
worker's, which overlap, are what its status file says, looked at every 20 ms; the time until it opens its channels is its process's
start and its imports. CPU seconds up to the end of the first step hardly depend on what else the machine does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write
from benchmarks.lib.machine import machine

SAMPLE_S = 0.02
RECIPES = Path(__file__).parents[2] / "recipes"
TIMEOUT_S = 900.0


def begun_s() -> float:
    """When this process began, on the clock of `time.monotonic`."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    now_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.monotonic() - (now_s - ticks / os.sysconf("SC_CLK_TCK"))


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds so far of the driver, of each worker and of all other processes below the driver, which are Ray's."""
    used, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        used[int(folder.name)] = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")  # its ended children's too
        parents[int(folder.name)] = int(fields[1])
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    found = {"driver": used.pop(os.getpid()), **{worker: used.pop(pid, 0.0) for worker, pid in pids.items()}}
    return {**found, "Ray's own processes": sum(seconds for pid, seconds in used.items() if pid in below)}


class Marks:
    """The moments at which stages of the driver end."""

    def __init__(self) -> None:
        self.last_s = begun_s()
        self.stages: dict[str, float] = {}

    def end(self, stage: str) -> None:
        now = time.monotonic()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self.last_s
        self.last_s = now

    def before(self, owner: Any, method: str, stage: str) -> None:
        """End a stage whenever a method is called."""
        inner = getattr(owner, method)

        def called(*given: Any, **named: Any) -> Any:
            self.end(stage)
            return inner(*given, **named)

        setattr(owner, method, called)


class ActivitySampler:
    """Sample the activity of the workers: seconds of each activity before the first step, by worker."""

    def __init__(self, states: Callable[[], Any]) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(states,), daemon=True)
        self._thread.start()

    def _run(self, states: Callable[[], Any]) -> None:
        while not self._ended.wait(SAMPLE_S):
            for worker, state in states().items():
                if state.step <= 0:
                    own, what = self.found.setdefault(worker, {}), str(state.activity)
                    own[what] = max(own.get(what, 0.0), state.for_s)

    def stop(self) -> dict[str, dict[str, float]]:
        self._ended.set()
        self._thread.join()
        return {worker: {what: round(s, 2) for what, s in own.items() if s >= 0.1} for worker, own in sorted(self.found.items())}


def graph(model: str, tokens: int, *, in_turns: bool) -> Any:
    """The graph of `recipes/one_step_off.py`; on one GPU its two models time-share it."""
    import rlgraph as rg

    sys.path.insert(0, str(RECIPES))
    from tasks.addition import right_number, sums

    rollout_pool = rg.Pool("rollout")
    train_pool = rollout_pool if in_turns else rg.Pool("train")
    generator = rg.Generator(model, pool=rollout_pool, sampling=rg.Sampling(max_tokens=tokens), max_context=64)
    policy = rg.Policy(model, pool=train_pool, optimizer=rg.AdamW(lr=5e-6))
    weights = rg.feedback("weights", depth=0 if in_turns else 1)
    prompts = rg.prompts(sums(0), count=16)
    rollout = generator.rollout(prompts, weights, group_size=8)
    rewards = rg.reward(right_number, prompts, rollout)
    step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss(clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("start", step.metrics)


def child(model: str, tokens: int) -> None:
    """Run one step, and print what its time went into."""
    marks = Marks()
    import rlgraph as rg

    marks.end("Python, rlgraph and PyTorch")
    folder = rg.model_folder(model)
    marks.end("the model's folder")
    cluster = rg.local_cluster()
    plan = rg.compile(graph(folder, tokens, in_turns=cluster.gpus == 1), cluster)
    marks.end("graph and plan")
    job = plan.launch()
    marks.end("checks of models and data")
    session: Any = job.session
    group = session.group
    marks.before(session.dispatch, "create", "Ray")
    marks.before(group, "await_engines", "workers start, import and open their channels")
    marks.before(session.dispatch, "start", "workers load their engines")
    sampler = ActivitySampler(lambda: group.states() if session.folder and not session.ended else {})
    with job:
        marks.end("the compiled graph")
        step = next(iter(job.steps(1)))
        marks.end("the first step")
        seen = sampler.stop()
        cpu = {who: round(seconds, 2) for who, seconds in cpu_seconds(job.pids).items()}
        computes = {m.name: m.dtype for m in plan.models}
        timings = {name.removeprefix("timing_s/"): value for name, value in step.metrics.items() if name.startswith("timing_s/")}
        whole = time.monotonic() - begun_s()
    print(
        json.dumps(
            {
                "seconds": whole,
                "stages": marks.stages,
                "workers": seen,
                "cpu_seconds": cpu,
                "load": os.getloadavg()[0],
                "first_step": timings,
                "dtypes": computes,
            }
        )
    )


def one(model: str, tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", model, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def with_earlier(result: dict[str, Any], file: Path) -> dict[str, Any]:
    """Put runs behind those that the file has of the same model on such a machine: starts differ between hosts of one kind."""
    earlier = json.loads(file.read_text()) if file.exists() else {}
    if any(earlier.get(name) != result[name] for name in ("model", "machine")):
        return result
    runs = earlier["runs"] + result["runs"]
    return result | {"runs": runs, "median_s": statistics.median(run["seconds"] for run in runs)}


def main() -> None:
    parser = command_line(__doc__, smoke="one run with a tiny model")
    parser.add_argument("--model", default="smollm2", help="a folder, or a name that rg.model_folder knows")
    parser.add_argument("--shape", help="a model of this shape with random weights instead: 0.6B, 1.7B, 4B, 8B")
    parser.add_argument("--tokens", type=int, default=5, help="of a response, at most")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], int(given.child[1]))
        return
    model, repeats = ("tiny", 1) if given.smoke else (given.model, given.repeats)
    if given.shape:
        from benchmarks.lib.shapes import random_model

        model = random_model(given.shape, Path(tempfile.gettempdir()) / "rlgraph-shapes")
    runs = []
    for _ in range(repeats):
        runs.append(one(model, given.tokens))
        print(f"{runs[-1]['seconds']:6.1f} s")
        for stage, seconds in runs[-1]["stages"].items():
            print(f"{seconds:6.1f}   {stage}")
        for worker, doing in runs[-1]["workers"].items():
            print(f"         {worker}: " + ", ".join(f"{what} {seconds:.1f}" for what, seconds in doing.items()))
        print("         CPU seconds: " + ", ".join(f"{who} {seconds:.1f}" for who, seconds in runs[-1]["cpu_seconds"].items()), flush=True)
    result = {
        "script": "benchmarks/speed/start.py",
        "model": given.shape or ("tiny" if given.smoke else given.model),
        "median_s": statistics.median(run["seconds"] for run in runs),
        "machine": machine(),
        "runs": runs,
    }
    write(given.json, with_earlier(result, given.json))


if __name__ == "__main__":
    main()
