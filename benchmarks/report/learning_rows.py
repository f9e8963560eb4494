"""The rows of runs that learn: the recipes and `agents_learning.py`, `demo.py` and `start.py`."""

from benchmarks.lib.figures import count, seconds, share
from benchmarks.report.mathematics_rows import MATHEMATICS
from benchmarks.report.table import Row


def learned(what: str, file: str, script: str) -> list[Row]:
    """The rows of a run that learns: its reward, its seconds."""
    steps = {"steps": count(file, "step", reduce="count")}
    reward = "critic/rewards/mean"
    return [
        Row(f"{what}: mean reward of the last 4 of {{steps}} steps", share(file, reward, reduce="last 4"), script,
            "the first 4", share(file, reward, reduce="first 4"), steps),
        Row(f"{what}: all {{steps}} steps", seconds(file, "timing_s/step", form="{:.0f} s", reduce="sum"), script,
            "median step", seconds(file, "timing_s/step", reduce="median"), steps),
    ]  # fmt: skip


def conversed(what: str, run: str) -> list[Row]:
    """The rows of a recipe with agents: its reward, its seconds."""
    at = ("agents_learning_cpu.json", "runs", run)
    steps = {"steps": count(*at, "steps")}
    return [
        Row(f"{what}: mean reward of the last 4 of {{steps}} steps", share(*at, "last"), "benchmarks/learning/agents_learning.py",
            "the first 4", share(*at, "first"), steps),
        Row(f"{what}: all {{steps}} steps", seconds(*at, "steps_s", form="{:.0f} s"), "benchmarks/learning/agents_learning.py",
            "median step", seconds(*at, "step_s"), steps),
    ]  # fmt: skip


def until_learned(instructions: str) -> Row:
    """The row of the demo's seconds until it has learned, with some of the processor's instructions."""
    file, at = "demo_cpu.json", ("runs", instructions)
    shown = "AVX2 only" if instructions == "AVX2 alone" else instructions
    return Row(f"`make demo`, {shown}: seconds of training until a step has a mean reward of 0.90",
               seconds(file, *at, "seconds_until_0.90", form="{:.0f} s"), "benchmarks/learning/demo.py",
               "median step", seconds(file, *at, "median_step_s", form="{:.1f} s"))  # fmt: skip


def stale(what: str, file: str, script: str) -> list[Row]:
    return [Row(f"{what}: age of the oldest token, in versions", count(file, "staleness/max", reduce="max"), script, "bound 2")]


def again(what: str, field: str, form: str) -> list[Row]:
    """The rows of a plan that a program launches: as processes, and again inside of `rg.runs.warm()`, each beside a launch on Ray."""
    ways = (("launched with `dispatch=\"processes\"`", "processes, first", "on Ray, first"),
            ("launched again by a program inside of `rg.runs.warm()`", "warm, later", "on Ray, later"))  # fmt: skip
    return [
        Row(f"SmolLM2, {way}: {what}", seconds("launches_cpu.json", "medians", kind, field, form=form), "benchmarks/speed/launches.py",
            "on Ray", seconds("launches_cpu.json", "medians", ray, field, form=form))
        for way, kind, ray in ways
    ]  # fmt: skip


LEARNING = [
    *learned("`make demo`: SmolLM2 learns to add, one step off", "one_step_off_cpu.jsonl", "recipes/one_step_off.py"),
    *map(until_learned, ("all instructions", "AVX2 alone")),
    Row("SmolLM2, one step off: from the command to the end of the first step", seconds("start_cpu.json", "median_s", form="{:.0f} s"),
        "benchmarks/speed/start.py"),
    *again("until all workers are ready", "ready_s", form="{:.1f} s"),
    *again("CPU seconds to the end of the first step", "cpu_s", form="{:.0f}"),
    *learned("PPO with a critic", "ppo_cpu.jsonl", "recipes/ppo.py"),
    *learned("calls of a calculator, on a busy machine", "tools_cpu.jsonl", "recipes/tools.py"),
    Row("the same: failed calls per step, of 32, last 4 steps", count("tools_cpu.jsonl", "tools/failures", form="{:.1f}", reduce="last 4"),
        "recipes/tools.py", "first 4 steps", count("tools_cpu.jsonl", "tools/failures", form="{:.1f}", reduce="first 4")),
    *conversed("an agent program with the `openai` client, on a busy machine", "agent, seed 0"),
    *conversed("a guessing game of an environment, seed 0", "environment, seed 0"),
    *learned("depth 2", "k_step_off_cpu.jsonl", "recipes/k_step_off.py"),
    *stale("depth 2", "k_step_off_cpu.jsonl", "recipes/k_step_off.py"),
    *learned("interrupted for new weights, depth 2", "interrupt_cpu.jsonl", "recipes/interrupt.py"),
    *stale("interrupted for new weights, depth 2", "interrupt_cpu.jsonl", "recipes/interrupt.py"),
    *learned("continuous batching over steps, depth 2", "continuous_cpu.jsonl", "recipes/continuous.py"),
    *stale("continuous batching over steps, depth 2", "continuous_cpu.jsonl", "recipes/continuous.py"),
    *MATHEMATICS,
]  # fmt: skip
