"""Held-out accuracy against seconds on two GPUs of one host: time-shared, one step off, and continuous two steps off.

    python benchmarks/learning/wall_clock.py --minutes 9                        # call again until nothing is left
    python benchmarks/learning/wall_clock.py --only mode=continuous,seed=0
    python benchmarks/learning/wall_clock.py --smoke                            # a tiny model on the CPU, two steps a run

All runs of `recipes/reasoning.py` start from one model, which the recipe's fine-tuning trains until it answers `--begin` of the held-out
questions. Before the first run of a mode a few other steps measure costs, and from these its step is predicted. Steps are predicted
and compared without evaluations; the seconds of the curves include them, and begin when the first step, which warms up, has ended.

The file gets an entry of a run at each of its evaluations, so a run that is killed keeps what it has. The next call runs it again.
`table.py` writes table and picture of docs/benchmarks.md from `results/wall_clock_h200.json`.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import reasoning

import rlgraph as rg
from benchmarks.lib.learning_runs import Key, Results, Run, chosen, named, parser
from benchmarks.lib.machine import machine
from rlgraph.plan.calibrate import Trace, costs_of

Settings: TypeAlias = reasoning.Config
Lines: TypeAlias = Sequence[Mapping[str, float]]
MODES: Mapping[str, Mapping[str, Any]] = {
    "time-shared": {"depth": 0, "shared": True, "loss": "clipped", "rl_steps": 32},
    "one step off": {"depth": 1, "rl_steps": 40},
    "continuous": {"depth": 2, "continuous": True, "rl_steps": 48},
}
TOGETHER = (("time-shared",), ("one step off", "continuous"))  # modes whose runs share engines; the first of each calibrates
SETTINGS: Mapping[str, Any] = {"max_tokens": 640, "micro_batch_tokens": 65536, "sft_steps": 240}
SMOKE: Mapping[str, Any] = {
    "model": "tiny",
    "engine": "transformers",
    "longest": 4,
    "max_tokens": 6,
    "examples": 2,
    "sft_steps": 2,
    "prompts": 2,
    "group_size": 2,
    "mini_batches": 2,
    "held_out": 2,
    "every": 1,
}
VARIED = ("depth", "shared", "continuous", "loss", "rl_steps", "seed", "out", "model")
WARM_UP, CALIBRATED = 2, 6  # steps
CALIBRATION_SEED = 1000
SFT_EVERY = 15  # steps between two evaluations while fine-tuning
LAST = 2  # evaluations, whose mean is the final accuracy
PARTS = ("gen", "update_actor", "reward", "sleep", "wake", "publish", "update_weights", "wait_prev_gen")


def fine_tuned(cfg: Settings, folder: Path, begin: float) -> dict[str, Any]:
    """Fine-tune until the model answers `begin` of the held-out questions, and export it into `folder`."""
    own = replace(cfg, every=min(SFT_EVERY, cfg.sft_steps))
    found: list[tuple[int, float]] = []
    with rg.compile(reasoning.fine_tuning(own), rg.local_cluster()).launch() as job:
        for step in job.steps(own.sft_steps):
            if (accuracy := accuracy_of(step.metrics)) is not None:
                found.append((int(step.metrics["val/version"]), accuracy))
                print(f"  fine-tuning, {found[-1][0]} updates: {accuracy:.3f}, nll {step.metrics['actor/nll']:.3f}", flush=True)
                if accuracy >= begin:
                    break
        job.export(folder, dtype="float32")
    return {"updates": job.finished_steps, "accuracy": found, "machine": machine()}


def accuracy_of(metrics: Mapping[str, float]) -> float | None:
    """The accuracy of a step's evaluation, if it had one."""
    return next((value for name, value in metrics.items() if name.startswith("val/acc/mean@")), None)


def calibrated(cfg: Settings, model: str, file: Path, steps: int) -> dict[str, Any]:
    """Run some steps without an evaluation, and leave their trace in `file`."""
    with rg.compile(reasoning.reinforcement(cfg, model, evaluated=False), rg.local_cluster()).launch() as job:
        lines = [{**step.metrics, "timing_s/step": step.seconds} for step in job.steps(WARM_UP + steps)][WARM_UP:]
        job.trace().to_file(file)
    found = {"step_s": statistics.fmean(seconds_of(lines)), **summary(lines)}
    print(f"  calibrated: {found['step_s']:.2f} s a step, {found['parts_s']}, {found['length']}", flush=True)
    return found


def predicted_s(cfg: Settings, model: str, files: Sequence[Path]) -> float:
    """Predict a step without an evaluation from the traces of the runs that calibrated."""
    costs = costs_of([Trace.from_file(file) for file in files])
    plan = rg.compile(reasoning.reinforcement(cfg, model, evaluated=False), rg.local_cluster(), costs)
    print(f"  predicted: {plan.prediction.step_s:.2f} s a step", flush=True)
    return plan.prediction.step_s


def seconds_of(lines: Lines) -> list[float]:
    return [round(line["timing_s/step"], 4) for line in lines]


def summary(lines: Lines) -> dict[str, Any]:
    """The seconds of steps, the means of their parts, and the responses' lengths."""
    parts = {part: statistics.fmean(line.get(f"timing_s/{part}", 0.0) for line in lines) for part in PARTS}
    length = {end: statistics.fmean(line[f"response_length/{end}"] for line in lines) for end in ("mean", "max")}
    return {"steps_s": seconds_of(lines), "parts_s": parts, "length": length}


def run(cfg: Settings, model: str, until_s: float, keep: Callable[[Run], None]) -> None:
    """Run to the last step, or until the time is over; `keep` gets the entry of what has been done at each evaluation, and at the end."""
    with rg.compile(reasoning.reinforcement(cfg, model), rg.local_cluster()).launch() as job:
        began_s, ended_s, lines = time.monotonic(), [], []
        for step in job.steps(cfg.rl_steps):
            ended_s.append(round(time.monotonic() - began_s, 3))
            lines.append({**step.metrics, "timing_s/step": step.seconds})
            if (accuracy := accuracy_of(step.metrics)) is not None:
                reward = step.metrics["critic/rewards/mean"]
                print(f"  step {step.index + 1}, {ended_s[-1]:.1f} s: accuracy {accuracy:.3f}, reward {reward:.3f}", flush=True)
                keep(entry(lines, ended_s, cfg, "cut"))
            if time.monotonic() > until_s:
                break
    keep(entry(lines, ended_s, cfg, "steps" if len(lines) == cfg.rl_steps else "time"))


def entry(lines: Lines, ended_s: Sequence[float], cfg: Settings, stopped: str) -> Run:
    """The entry of a run. An evaluation stands at the steps of its weights, and at the seconds from the end of the first step, which warms
    up, to theirs."""
    accuracy = []
    for line in lines:
        if (found := accuracy_of(line)) is not None:
            version = int(line["val/version"])
            seconds = ended_s[max(version, 1) - 1] - ended_s[0]
            accuracy.append([version, round(seconds, 3), found, line.get("val/acc/stderr", math.nan)])
    quiet = [line for place, line in enumerate(lines) if place >= WARM_UP and not evaluated_near(lines, place, cfg.depth)] or lines[-1:]
    return {
        "stopped": stopped,
        "steps": len(lines),
        "seconds": ended_s[-1],
        "accuracy": accuracy,
        "final_accuracy": statistics.fmean(each[2] for each in accuracy[-LAST:]),
        "step_s": statistics.fmean(seconds_of(quiet)),  # of steps that no evaluation delays
        **summary(quiet),
        "ended_s": list(ended_s),
        "reward": [round(line["critic/rewards/mean"], 4) for line in lines],
        "truncated": [round(line.get("response/truncated", 0.0), 4) for line in lines],
        "staleness_mean": statistics.fmean(line["staleness/mean"] for line in lines),
        "staleness_worst": max(line["staleness/max"] for line in lines),
        "settings": {name: getattr(cfg, name) for name in VARIED if name not in ("out", "model")},
        "machine": machine(),
    }


def evaluated_near(lines: Lines, place: int, depth: int) -> bool:
    """Whether an evaluation may have delayed a step: that of the step, of one that it waited for, or of one already at work behind it."""
    return any(accuracy_of(line) is not None for line in lines[max(0, place - depth - 1) : place + depth + 1])


def main() -> None:
    arguments = parser(__doc__ or "", "wall_clock_gpu.json")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--begin", type=float, default=0.3, help="held-out accuracy at which fine-tuning ends")
    given = arguments.parse_intermixed_args()
    until_s = time.monotonic() + 60 * given.minutes
    usual = {**SETTINGS, **(SMOKE if given.smoke else {})}
    cfg = rg.config(Settings, [*(f"{name}={value}" for name, value in usual.items()), *given.settings])
    modes = {name: {**own, "rl_steps": 3} if given.smoke else own for name, own in MODES.items()}
    keys: list[Key] = [{"mode": mode, "seed": seed} for same in TOGETHER for seed in given.seeds for mode in same]
    results = Results(given.json, {name: value for name, value in vars(cfg).items() if name not in VARIED} | {"begin": given.begin})
    model = given.work / "model"
    with rg.runs.warm(engines=not given.smoke):
        if not model.is_dir():
            results.keep("fine_tuning", fine_tuned(cfg, model, given.begin), "before")
        for key in chosen(keys, given.only):
            mode, name = str(key["mode"]), named(key)
            same = [run for run in results.runs.values() if run["key"]["mode"] == mode and run["stopped"] != "cut"]
            if any(run["key"] == key for run in same):
                continue
            expected_s = max((run["seconds"] + 10 for run in same), default=60.0)
            if time.monotonic() + expected_s > until_s:
                print(f"{name}: no time for about {expected_s:.0f} s; call again", flush=True)
                continue
            print(f"{name}:", flush=True)
            own = replace(cfg, **modes[mode], seed=int(key["seed"]))
            first = next(together[0] for together in TOGETHER if mode in together)
            traces = [given.work / f"{each.replace(' ', '_')}.json" for each in dict.fromkeys((first, TOGETHER[0][0]))]
            if not traces[0].exists():
                found = calibrated(
                    replace(cfg, **modes[first], seed=CALIBRATION_SEED), str(model), traces[0], 2 if given.smoke else CALIBRATED
                )
                results.keep(first, found, "calibration")
            about = {"key": key, "predicted_s": predicted_s(own, str(model), [trace for trace in traces if trace.exists()])}

            def keep(found: Run, name: str = name, about: Run = about) -> None:
                results.keep(name, found | about)

            run(own, str(model), until_s, keep)


if __name__ == "__main__":
    main()
