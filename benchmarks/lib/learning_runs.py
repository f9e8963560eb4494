"""Runs of `recipes/mathematics.py` until held-out accuracy is flat, kept as JSON with one entry a run: `staleness.py` and `learning.py`."""

import argparse
import fcntl
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests")]

import mathematics  # noqa: E402 (of recipes/)

import rlgraph as rg  # noqa: E402

SAVED_AT_ITS_END = 1_000_000  # steps between two checkpoints: a run is saved where its time is over, and nowhere else
START_S = 90.0  # a run is not begun with less time than a start takes
MISMATCH = ("guards/mismatch", "rollout_corr/k3_kl", "actor/ppo_kl")
STUDENT_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # by the number of values
ON_GPU: dict[str, Any] = {
    "prompts": 16,
    "max_tokens": 16,
    "lr": 5e-6,
    "terms": 3,
    "digits": 2,
    "questions": 128,
    "steps": 300,
    "micro_batch_tokens": 16384,
    "export_float32": False,  # the engine computes in bfloat16
}
Settings: TypeAlias = mathematics.Config
USUAL = {field.name: field.default for field in fields(Settings)}
Run = dict[str, Any]
Key = Mapping[str, int | str]


@dataclass(frozen=True)
class Flat:
    """When accuracy is flat: the last `window` evaluations are on average less than `gain` above the `window` before them."""

    least: int = 100  # steps before a run may end
    window: int = 4
    gain: float = 0.01

    def __call__(self, steps: int, accuracies: Sequence[float]) -> bool:
        if steps < self.least or len(accuracies) < 2 * self.window:
            return False
        last, before = accuracies[-self.window :], accuracies[-2 * self.window : -self.window]
        return statistics.fmean(last) - statistics.fmean(before) < self.gain


class Results:
    """The file of a benchmark: its settings, and an entry for each run that has ended. Runs of other settings are refused.

    Several processes may add runs to one file.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.held = self._read()

    def read(self) -> None:
        """Read what other processes added."""
        self.held = self._read()

    def _read(self) -> dict[str, Any]:
        held: dict[str, Any] = {"settings": self.settings, "runs": {}}
        if self.path.exists():
            held = json.loads(self.path.read_text(encoding="utf-8"))
        there = {name: USUAL[name] for name in self.settings if name in USUAL} | held["settings"]  # the recipe may have more by now
        differ = {name: (there.get(name), self.settings.get(name)) for name in there | self.settings}
        differ = {name: (one, other) for name, (one, other) in differ.items() if one != other}
        if differ:
            raise SystemExit(f"{self.path} holds runs of other settings (there, here): {differ}; give another --json, or the same settings")
        return held

    @property
    def runs(self) -> dict[str, Run]:
        found: dict[str, Run] = self.held["runs"]
        return found

    @property
    def alone(self) -> dict[str, float]:
        """The seconds of a step, by setting, where nothing else used the machine."""
        found: dict[str, float] = self.held.get("alone", {})
        return found

    def keep(self, key: str, run: Run | float, kind: str = "runs") -> None:
        """Add a run to what the file holds by now, or the seconds of a step `alone`, and write it whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)
            self.read()
            self.held.setdefault(kind, {})[key] = run
            beside = self.path.with_suffix(".partial")
            beside.write_text(json.dumps(self.held, indent=1) + "\n", encoding="utf-8")
            beside.replace(self.path)


def named(key: Key) -> str:
    """Write the key of a run as `depth=1,correction=disabled,seed=0`."""
    return ",".join(f"{name}={value}" for name, value in key.items())


def chosen(keys: Iterable[Key], only: str) -> list[Key]:
    """Choose the runs that `--only depth=1,seed=0` names. Raises SystemExit where it names none."""
    keys = list(keys)
    wanted = dict(part.split("=", 1) for part in only.split(",")) if only and all("=" in part for part in only.split(",")) else {}
    found = [key for key in keys if all(str(key.get(name)) == value for name, value in wanted.items())]
    if (only and not wanted) or not found:
        values = {name: sorted({key[name] for key in keys}, key=str) for name in keys[0]}
        raise SystemExit(f"--only {only}: there is no such run; the runs are those of {values}")
    return found


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Read the metrics of a run's steps so far."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def accuracy_of(lines: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """List the evaluations: updates of the weights, seconds until these were there, accuracy, its standard error over the questions.

    Seconds count from the end of the first step, which warms up.
    """
    seconds = ended_s(lines)
    found = []
    for line in lines:
        name = next((name for name in line if name.startswith("val/acc/mean@")), None)
        if name is not None:
            version = int(line["val/version"])
            found.append([version, seconds[version - 1] if version else 0.0, line[name], line.get("val/acc/stderr", math.nan)])
    return found


def ended_s(lines: Sequence[Mapping[str, float]]) -> list[float]:
    """When each step ended, in seconds from the end of the first."""
    found = [0.0]
    for line in lines[1:]:
        found.append(round(found[-1] + line["timing_s/step"], 3))
    return found


def entry(lines: Sequence[Mapping[str, float]], stopped: str, flat: Flat) -> Run:
    """Make the entry of a run that has ended: `stopped` says by what."""
    accuracy = accuracy_of(lines)
    last = accuracy[-flat.window :]
    mismatch = {name: [line[name] for line in lines if name in line] for name in MISMATCH}
    return {
        "stopped": stopped,
        "steps": len(lines),
        "step_s": statistics.median([line["timing_s/step"] for line in lines[1:]] or [math.nan]),
        "accuracy": accuracy,
        "final_accuracy": statistics.fmean(each[2] for each in last),
        "final_stderr": statistics.fmean(each[3] for each in last),
        "first_reward": statistics.fmean(line["critic/rewards/mean"] for line in lines[:4]),
        "last_reward": statistics.fmean(line["critic/rewards/mean"] for line in lines[-4:]),
        "reward": [round(line["critic/rewards/mean"], 5) for line in lines],
        "ended_s": ended_s(lines),
        "staleness_mean": statistics.fmean(line["staleness/mean"] for line in lines),
        "staleness_worst": max(line["staleness/max"] for line in lines),
        "mismatch": {name: statistics.fmean(values) for name, values in mismatch.items() if values},
    }


def run_until_flat(cfg: Settings, folder: Path, flat: Flat, until_s: float, export: Path | None = None) -> Run | None:
    """Run the recipe until its accuracy is flat or its steps are done; None where the time is over, and the run is saved.

    `until_s` is by `time.monotonic()`. A run that is stopped still does the steps in flight, for which time is left. The same call goes on
    with it. `export` gets the trained model.
    """
    plan = rg.compile(mathematics.graph(cfg), rg.local_cluster())
    over, stopped = False, "steps"
    seconds: list[float] = []
    try:
        with plan.launch(checkpoint=folder / "checkpoints", every=SAVED_AT_ITS_END, keep=1) as job:
            first = job.finished_steps
            for step in rg.record(job, cfg.steps, folder, samples=0.0, quiet=True):
                if "val/version" in step.metrics:
                    found = accuracy_of(metrics_of(folder))
                    print(f"  step {step.index + 1}: {progress(step.metrics, found[-1])}", flush=True)
                    if not over and flat(step.index + 1, [each[2] for each in found]):
                        stopped = "flat"
                        break
                seconds += [step.seconds] if step.index > first else []
                in_flight_s = plan.window * statistics.median(seconds or [0.0])
                if not over and time.monotonic() + in_flight_s > until_s:
                    over = True
                    signal.raise_signal(signal.SIGINT)  # finishes the steps in flight, saves the run and raises KeyboardInterrupt
            if export is not None:
                shutil.rmtree(export, ignore_errors=True)
                job.export(export, dtype="float32" if cfg.export_float32 else "bfloat16")
    except KeyboardInterrupt:
        if not over:
            raise
        return None
    return entry(metrics_of(folder), stopped, flat)


def held_out(cfg: Settings) -> list[dict[str, Any]]:
    """List the questions of the evaluations as messages, with their answers."""
    _, rows = mathematics.data(cfg)
    return [{"messages": row["prompt"], "answer": row["answer"]} for row in rows]


def progress(metrics: Mapping[str, float], evaluated: Sequence[float]) -> str:
    """Say how far a run is."""
    return (
        f"accuracy {evaluated[2]:.3f} ± {evaluated[3]:.3f} after {evaluated[0]:.0f} updates, {evaluated[1]:.0f} s; reward "
        f"{metrics['critic/rewards/mean']:.3f}, staleness {metrics['staleness/max']:.0f}, {metrics['timing_s/step']:.2f} s a step"
    )


def runs_left(results: Results, keys: Sequence[Key], minutes: float) -> Iterator[tuple[Key, float]]:
    """Give each run that the file lacks and when its time is over, while there is time to begin one."""
    until_s = time.monotonic() + 60 * minutes
    for key in keys:
        if named(key) in results.runs:
            print(f"{named(key)}: is there", flush=True)
        elif until_s - time.monotonic() < START_S:
            print(f"{named(key)}: no time to begin; call again", flush=True)
            return
        else:
            print(f"{named(key)}:", flush=True)
            yield key, until_s


def runs_to_do(results: Results, keys: Iterable[Key], given: argparse.Namespace) -> Iterator[tuple[Key, float]]:
    """Give each run that is asked for and left, as `runs_left`; with `--at-once` none, since each was done in a process of its own."""
    wanted = chosen(keys, given.only)
    if given.at_once > 1:
        each_apart([key for key in wanted if named(key) not in results.runs], given.at_once, given.minutes, given.work)
        results.read()
    else:
        yield from runs_left(results, wanted, given.minutes)


def each_apart(keys: Sequence[Key], at_once: int, minutes: float, work: Path) -> None:
    """Do each run in a process of its own, so many at once, by this program's arguments and `--only`; what each prints is in `work`.

    Raises SystemExit that names the logs of those that failed.
    """
    work.mkdir(parents=True, exist_ok=True)
    over_s = time.monotonic() + 60 * minutes

    def run(key: Key) -> int:
        left = (over_s - time.monotonic()) / 60
        command = [sys.executable, *sys.argv, "--only", named(key), "--at-once", "1", "--minutes", str(left)]
        with (work / f"{named(key)}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        print(f"{named(key)}: {f'failed with {code}' if code else 'ended'}", flush=True)
        return code

    with ThreadPoolExecutor(at_once) as runs:
        codes = list(runs.map(run, keys))
    if failed := [str(work / f"{named(key)}.log") for key, code in zip(keys, codes, strict=True) if code]:
        raise SystemExit(f"failed, see {', '.join(failed)}")


def parser(about: str, results: str) -> argparse.ArgumentParser:
    """The arguments of a benchmark whose runs learn."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--json", type=Path, default=Path(__file__).parents[1] / "results" / results, help="an entry a run; those there are skipped"
    )
    made.add_argument("--work", type=Path, default=Path("runs") / Path(results).stem, help="folder of runs and of what is saved of one")
    made.add_argument("--only", default="", help="some of the runs, as depth=1,seed=0")
    made.add_argument("--at-once", type=int, default=1, help="runs that share the machine, each in a process of its own")
    made.add_argument("--minutes", type=float, default=math.inf, help="stop cleanly then; the next call goes on on the same machine")
    made.add_argument("--smoke", action="store_true", help="two steps of a tiny model on the CPU, two runs, into a folder of their own")
    made.add_argument("--plot", action="store_true", help="run nothing: print the table and draw the curves into --work")
    made.add_argument("settings", nargs="*", help="settings of the recipe, as steps=200")
    return made


def given_settings(given: argparse.Namespace, **usual: Any) -> Settings:
    """The settings of the recipe for all runs of a benchmark, and in a smoke test those of a tiny model, with files of their own."""
    if not given.smoke:
        return rg.config(mathematics.Config, [f"{name}={value}" for name, value in usual.items()] + given.settings)
    from support.templates import model_with

    given.work = Path(tempfile.mkdtemp())
    given.json = given.work / given.json.name
    small = {
        "engine": "transformers",
        "prompts": 2,
        "group_size": 2,
        "questions": 4,
        "samples": 2,
        "max_tokens": 4,
        "max_context": 900,
        "shots": 1,
    }
    few = small | {"steps": 2, "every": 1, "model": model_with(given.work / "model", "smollm2")}
    return rg.config(mathematics.Config, [f"{name}={value}" for name, value in few.items()] + given.settings)


def recorded_settings(cfg: Settings, flat: Flat, *varied: str) -> dict[str, Any]:
    """The settings that all runs of a file share."""
    own = {field.name: getattr(cfg, field.name) for field in fields(cfg) if field.name not in (*varied, "seed", "out", "export")}
    return own | {"flat": vars(flat)}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute the mean and the half-width of its 95 % interval by Student's t; NaN for one value."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), STUDENT_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
