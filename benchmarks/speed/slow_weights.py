"""Publishing that takes 0.9 of a step, hidden by depth and a second weight buffer, with stages that wait instead of compute.

    python benchmarks/speed/slow_weights.py [--json PATH]

Rollout and update take 0.3 s each, so a step takes at least that; the way of a version from trainer to generator takes 0.27 s.
Everything else is real: workers, channels, weights, dispatch. Step time over whole rounds, the median of 3 runs.
"""

import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import ray
import torch
from support import fakes

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from rlgraph.channels.host.channel import HostReader
from rlgraph.channels.weights.endpoints import Staging
from rlgraph.columns import Column
from rlgraph.runtime.driver.ray_cluster import start_ray

STAGE_S, TRANSFER_S = 0.3, 0.27
WARM_UP, STEPS, RUNS = 6, 12, 3  # 12 steps are whole rounds of 2 and of 3 open batches


@dataclass(frozen=True, eq=False, kw_only=True)
class FarGenerator(fakes.VectorGenerator):
    """A generator to which weights take TRANSFER_S to come, in whichever thread receives them."""

    def load(self, context: Any) -> Any:
        take, fill = HostReader.take, Staging.fill

        def slow_take(reader: HostReader, step: int, timeout_s: float) -> dict[str, Column]:
            found = take(reader, step, timeout_s)
            time.sleep(TRANSFER_S if reader.end.channel.startswith("weights") else 0.0)
            return found

        def slow_fill(staging: Staging, *given: Any) -> None:
            fill(staging, *given)
            time.sleep(TRANSFER_S)

        HostReader.take, Staging.fill = slow_take, slow_fill  # type: ignore[method-assign,assignment]
        return super().load(context)


def measured_s(depth: int, buffers: int) -> float:
    """Measure the seconds of a step after the pipeline has filled."""
    graph = fakes.vector_loop(depth, buffers=buffers, generate_s=STAGE_S, train_s=STAGE_S)
    with rg.compile(graph, rg.Cluster(cpus=4)).launch() as job:
        steps = job.steps(WARM_UP + STEPS)
        for _ in range(WARM_UP):
            next(steps)
        start = time.perf_counter()
        staleness = [step.staleness for step in steps]
        seconds = time.perf_counter() - start
    assert staleness == [depth] * STEPS, staleness
    return seconds / STEPS


def predicted_s(depth: int, buffers: int) -> float:
    costs = rg.planning.Costs({"prompts": 0.0, "rollout": STAGE_S, "score": 0.0, "update": STAGE_S}, receive_s=TRANSFER_S)
    return rg.compile(fakes.vector_loop(depth, buffers=buffers), rg.Cluster(cpus=4), costs).prediction.period_s


def main() -> None:
    arguments = command_line(__doc__)
    path = arguments.parse_args().json
    fakes.VectorGenerator = FarGenerator  # type: ignore[misc]
    figures: dict[str, Any] = {"machine": {"cores": rg.local_cluster().cpus, "python": platform.python_version()}}
    figures["versions"] = {"ray": ray.__version__, "torch": torch.__version__}
    ours = start_ray()
    print("depth buffers   step     of the bound   (each run)          predicted")
    for depth, buffers in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2)):
        runs = [measured_s(depth, buffers) for _ in range(RUNS)]
        ratio, planned = statistics.median(runs) / STAGE_S, predicted_s(depth, buffers) / STAGE_S
        figures[f"depth {depth}, buffers {buffers}"] = {"step_s": runs, "of_the_bound": ratio, "predicted": planned}
        each = " ".join(f"{run / STAGE_S:.3f}" for run in runs)
        print(f"{depth:5} {buffers:7} {1e3 * statistics.median(runs):5.0f} ms {ratio:10.3f}     ({each})     {planned:.3f}", flush=True)
    if ours:
        ray.shutdown()
    write(path, figures)


if __name__ == "__main__":
    main()
