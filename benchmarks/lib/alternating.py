"""Settings of one job that are run in turn, several times each, on Ray with simulated engines: predicted and measured step times.

A slow machine is slow for all settings of a round. The first steps of each run warm up and are left out.
"""

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from rlgraph.runtime.driver.ray_cluster import start_ray

STEPS, WARM_UP, ROUNDS = 10, 3, 2


@dataclass
class Setting:
    """One plan to run, and the seconds of its measured steps. `predicted_s` is what the plan says of a step, `compared` the seconds that
    the measured median is divided by, under its name in the results."""

    name: str
    plan: Callable[[], rg.Plan]
    predicted_s: float
    compared: tuple[str, float]
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        with self.plan().launch() as job:
            self.seconds += [step.seconds for step in job.steps(WARM_UP + STEPS)][WARM_UP:]

    def figures(self) -> dict[str, float]:
        cuts, median = statistics.quantiles(self.seconds, n=10), statistics.median(self.seconds)
        name, against = self.compared
        return {"predicted_s": self.predicted_s, "median_s": median, "p10_s": cuts[0], "p90_s": cuts[-1], name: median / against}


def alternate(doc: str, settings: Sequence[Setting], seconds: Mapping[str, float]) -> None:
    """Run all settings in turn, `--rounds` times; print their figures and write them to `--json`. `seconds` is what each stage waits."""
    parser = command_line(doc)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each setting is run")
    given = parser.parse_args()
    machine = {"cores": rg.local_cluster().cpus, "load_before": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    ours = start_ray()
    for _ in range(given.rounds):
        for setting in settings:
            setting.run()
    if ours:
        ray.shutdown()
    machine["load_after"] = round(os.getloadavg()[0], 1)
    figures: dict[str, Any] = {
        "machine": machine,
        "versions": {"ray": ray.__version__},
        "seconds": dict(seconds),
        "rounds": given.rounds,
        "steps_a_round": STEPS,
    }
    compared = settings[0].compared[0]
    print(f"{'':20} {'predicted':>10} {'median':>9} {'p10':>9} {'p90':>9}  {compared}")
    for setting in settings:
        found = figures[setting.name] = setting.figures()
        predicted, median, p10, p90, ratio = found.values()
        print(f"{setting.name:20} {predicted:8.3f} s {median:7.3f} s {p10:7.3f} s {p90:7.3f} s  {ratio:.3f}")
    write(given.json, figures)
