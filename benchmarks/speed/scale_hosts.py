"""Runs on one, two and three hosts beside the rehearsal of each, made before it, for docs/developers/scale.md.

    python benchmarks/speed/scale_hosts.py --json benchmarks/results/scale_hosts_cpu.json

The hosts are namespaces of this machine, with network stacks of their own and links of `RATE_MBIT` megabits a second, by tc's token
bucket. Nodes sleep known seconds, and send batches and weights of known size. In some runs a host is killed by SIGKILL after known
steps, and comes back. A rehearsal is given those seconds and sizes, the rate of the link less the headers of its packets, and the
seconds of a restart, which come from runs on as many hosts before the others. Needs iproute2, and root or a kernel that gives users
namespaces.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from programs import network_program as hosts  # noqa: E402
from support import fakes, namespaces, placed_workers  # noqa: E402, F401

import rlgraph as rg  # noqa: E402
from rlgraph.columns import Columns  # noqa: E402
from rlgraph.graph.nodes import Output, declare  # noqa: E402
from rlgraph.graph.traits import NodeTraits  # noqa: E402
from rlgraph.nodes.base import Context  # noqa: E402
from rlgraph.plan.rehearse import Course, prepare_course, with_failures  # noqa: E402
from rlgraph.runtime.checkpoint.store import Recovery  # noqa: E402
from rlgraph.runtime.driver.job import Job  # noqa: E402
from rlgraph.values.pool import Pool  # noqa: E402

RATE_MBIT = 100
PAYLOAD, PACKET = 1448, 1514  # bytes of TCP in a full Ethernet packet, and of the packet as tc counts it
SITE = rg.planning.ClusterSite(bandwidth=RATE_MBIT * 1e6 / 8 * PAYLOAD / PACKET)
GENERATE_S, TRAIN_S = 0.4, 0.3
ROWS, TOKENS, NUMBERS = 64, 4096, 1 << 20  # of a batch, of a response, of a version: 2.4 and 4.2 megabytes
EVERY, STEPS = 4, 12
ROUNDS = 2  # of each point without kills
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Point:
    """A run: its hosts, how far it is ahead, and the steps after which host `hosts` is killed."""

    hosts: int
    depth: int
    buffers: int = 1
    kills: tuple[int, ...] = ()
    steps: int = STEPS


BEFORE = {count: Point(count, 1, kills=(6,), steps=10) for count in (2, 3)}  # tell the seconds of a restart
POINTS = (
    *(Point(count, depth) for count in (1, 2, 3) for depth in (0, 1)),
    Point(2, 1, buffers=2),
    Point(2, 1, kills=(7,)),
    Point(3, 1, kills=(7,)),
    Point(3, 0, kills=(6, 11)),
)


class Weights(fakes.Vector):
    """An engine with a version of known size."""

    def __init__(self) -> None:
        self.vector = torch.zeros(NUMBERS)


class Generator(fakes.VectorGenerator):
    def load(self, context: Context) -> Any:
        return Weights()


class Policy(fakes.VectorPolicy):
    def load(self, context: Context) -> Any:
        return Weights()


@dataclass(frozen=True)
class Generate(fakes.Generate):
    """Sleeps, and gives a batch of known size."""

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="generate", dims={"T": TOKENS})

    def start(self, context: Context) -> Any:
        def fire(step: int, columns: Columns) -> Columns:
            time.sleep(self.seconds)
            return {
                "values": torch.zeros(ROWS, TOKENS),
                "response_mask": torch.ones(ROWS, TOKENS, dtype=torch.bool),
                "weight_version": torch.full((ROWS, TOKENS), context.version, dtype=torch.int32),
                "group_ids": columns["prompt_ids"].clone(),  # type: ignore[union-attr]
            }

        return fire


def graph(point: Point) -> rg.Graph:
    """Build the loop: on three hosts a judge is on the second one, else a reward beside the generator."""
    weights = rg.feedback("weights", depth=point.depth, buffers=point.buffers)
    source = rg.prompts(fakes.ITEMS, ROWS, seed=1)
    writes = ("values", "response_mask", "weight_version", "group_ids")
    generator, policy = Generator("vector", pool=Pool("rollout")), Policy("vector", pool=Pool("train"))
    node = declare("rollout", Generate(GENERATE_S), (source,), reads=("prompt_ids",), writes=writes, model=generator, feedback=weights)
    rollout = Output(node)
    rewards = fakes.score_on_pool(Pool("judge"), rollout) if point.hosts == 3 else fakes.score(rollout)
    reads = ("values", "response_mask", "weight_version", "rewards")
    update = declare("update", fakes.Train(TRAIN_S), (rollout, rewards), reads=reads, writes=(), model=policy)
    weights.close(Output(update, "weights"))
    return rg.Graph("hosts", Output(update, "metrics"))


def cluster(point: Point) -> rg.Cluster:
    return rg.Cluster(cpus=6, hosts=point.hosts)


def course(point: Point) -> Course:
    made = graph(point)
    seconds = {node.name: {"rollout": GENERATE_S, "update": TRAIN_S}.get(node.name, 0.0) for node in made.nodes}
    costs = rg.planning.Costs(seconds, publish_bytes=4 * NUMBERS)
    return prepare_course(made, cluster(point), costs, {}, SITE, point.steps, None, 0)[1]


def rehearsed_s(point: Point, restart_s: float) -> float:
    """Predict the seconds from the end of the first step to that of the last one, with a failure right after each step of `kills`."""
    played = course(point)
    first_s = played.play(0, 1).step_ends()[0]

    def ends(first: int, count: int) -> Sequence[float]:
        return played.play(first, count).step_ends()

    def gaps() -> Iterator[float]:
        saved, waited = 0, 0.0
        for step in point.kills:
            yield waited + ends(saved, step - saved)[-1] + 1e-6
            saved, waited = step // EVERY * EVERY, restart_s
        yield float("inf")

    drawn = gaps()
    return with_failures(ends, point.steps, GENERATE_S + TRAIN_S, EVERY, restart_s, lambda: next(drawn)).seconds - first_s


def measured_s(control: hosts.Control, point: Point) -> float:
    """Run a point, and measure the same seconds."""
    made = graph(point)
    recovery = Recovery(Path(tempfile.mkdtemp(dir=control.shared)), EVERY, 2, restarts=2) if point.kills else None
    plan = rg.compile(made, cluster(point))
    arrived = []
    with Job(made, plan, dispatch_name="placed", deadline_s=DEADLINE_S, recovery=recovery) as running:
        for step in running.steps(point.steps):
            arrived.append(time.monotonic())
            if step.index + 1 in point.kills:
                control("kill", point.hosts)
                control("start", point.hosts)
                control("slow", point.hosts, f"{RATE_MBIT}mbit")
                hosts.until_up(point.hosts)
    return arrived[-1] - arrived[0]


def compared(control: hosts.Control) -> Mapping[str, object]:
    """Rehearse and run all points, one after another."""
    for n in range(1, hosts.HOSTS + 1):
        control("slow", n, f"{RATE_MBIT}mbit")
    restarts = {count: measured_s(control, before) - rehearsed_s(before, 0.0) for count, before in BEFORE.items()}
    rows = []
    for point in POINTS:
        rehearsed = rehearsed_s(point, restarts.get(point.hosts, 0.0))
        runs = [measured_s(control, point) for _ in range(1 if point.kills else ROUNDS)]
        measured = statistics.median(runs)
        times = {"rehearsed_s": rehearsed, "measured_s": measured, "runs_s": runs}
        rows.append({**asdict(point), **times, "error": rehearsed / measured - 1})
        print(rows[-1], flush=True)
    return {"restart_s": restarts, "points": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--rehearse", action="store_true", help="rehearse alone: no run")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rehearse:
        for point in POINTS:
            print(point, round(rehearsed_s(point, 10.0), 3))
        return
    if not given.inside:
        if why := namespaces.explain_refusal():
            sys.exit(f"this machine makes no hosts of namespaces: {why}")
        sys.exit(subprocess.run(namespaces.isolate_command([sys.executable, __file__, *sys.argv[1:], "--inside"]), check=False).returncode)

    before = os.getloadavg()

    def told(outcome: Mapping[str, object]) -> None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
        sizes = {
            "rate_mbit": RATE_MBIT,
            "generate_s": GENERATE_S,
            "train_s": TRAIN_S,
            "batch_bytes": 9 * ROWS * TOKENS,
            "version_bytes": 4 * NUMBERS,
        }
        values = {"machine": machine, "linux": platform.release(), "load_before": before, "every": EVERY, **sizes, **outcome}
        print(json.dumps(values))
        if given.json:
            given.json.write_text(json.dumps(values, indent=1) + "\n")

    hosts.CASES["scale"] = compared
    sys.exit(hosts.main(1, ["scale"], told))


if __name__ == "__main__":
    main()
