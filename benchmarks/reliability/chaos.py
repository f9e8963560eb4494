"""Kills, cuts and freezes at random on three hosts of namespaces: nothing lost, doubled or reordered, the weights of an undisturbed run.

    python benchmarks/reliability/chaos.py --minutes 60 --json PATH
    python benchmarks/reliability/chaos.py --minutes 1 --vector       a vector in place of the model, which loads at once
    python benchmarks/reliability/chaos.py --minutes 30 --vector --replan   hosts stay away for longer, and the run continues on the others

A real tiny model is trained by GRPO on the CPU: generator on host 1, reference on host 2, trainer on host 3. The driver stays; each event
hits a worker, a host or a link, and most lead to a restart from the last checkpoint. Which event, whom and for how long is drawn from
`--seed`. Then an undisturbed run of the same plan does as many steps, and every step is compared: prompts, lengths of responses, loss,
gradient norm, staleness, and a digest of the weights. Needs iproute2, and root or a kernel that gives users namespaces.
"""

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from programs import network_program as hosts  # noqa: E402
from support import fakes, forked_workers, namespaces, placed_workers  # noqa: E402

import rlgraph as rg  # noqa: E402
from benchmarks.lib.machine import machine  # noqa: E402
from benchmarks.reliability import kills  # noqa: E402
from rlgraph.columns import Columns  # noqa: E402
from rlgraph.engines.hf.pretrained import tiny_model  # noqa: E402
from rlgraph.graph.nodes import Output, declare  # noqa: E402
from rlgraph.nodes.base import Context  # noqa: E402
from rlgraph.plan.plan import Replan  # noqa: E402
from rlgraph.plan.replan import Replanner  # noqa: E402
from rlgraph.runtime.checkpoint.store import Recovery  # noqa: E402
from rlgraph.runtime.driver.job import Job  # noqa: E402

EVERY = 4  # steps between two checkpoints
LONGEST_S = 10.0  # of a cut or a freeze: those of up to about 5 s are survived without a restart
AWAY_S = 60.0  # the same where the plan follows the hosts
PAUSE_S = 4.0  # at most, after an event
PATIENCE_S = 120.0  # for the next step, on a machine that does other work too
COMPARED = ("weight", "weights", "prompt/", "length/", "loss", "rewards/", "actor/pg_loss", "actor/grad_norm")
EVENTS = {  # how often one is drawn against the others
    "a worker is killed": 4,
    "a host is killed": 3,
    "a host is cut off": 4,
    "a cable is out": 2,
    "a host is frozen": 3,
    "two hosts do not hear each other": 2,
    "a link is slow": 1,
}


Kept: TypeAlias = tuple[int, int, dict[str, Any]]  # index, staleness and metrics of a step


class Driven(fakes.Judge):
    """Rewards with which the vector neither grows without bound nor comes to rest, so that each batch leaves its mark for long."""

    def start(self, context: Context) -> Any:
        def fire(step: int, columns: Columns) -> Any:
            values, ids = columns["values"].mean(-1), columns["group_ids"]  # type: ignore[union-attr]
            drive = 0.01 * ids + 0.1 * torch.sin(values)  # type: ignore[operator]
            return {"rewards": drive / torch.where(values == 0, torch.ones_like(values), values)}, {}

        return fire


def judged(rollout: Output) -> Output:
    model = fakes.VectorCritic("vector", pool=rg.Pool("judge"))
    node = declare("judge", Driven(), (rollout,), reads=("values", "group_ids"), writes=("rewards",), model=model)
    return Output(node)


def graph(model: str, depth: int) -> rg.Graph:
    """Build a graph with a pool for each host; without a model it trains a vector."""
    if not model:
        return fakes.vector_loop(depth, generate_s=0.01, middle=judged)
    sampling = rg.Sampling(max_tokens=8, stop_token_ids=tuple(range(1, 40)))
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32")
    reference = rg.Reference(model, pool=rg.Pool("reference"), dtype="float32")
    policy = kills.WatchedPolicy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights = rg.feedback("weights", depth=depth)
    prompts = rg.prompts(kills.ITEMS, count=kills.PROMPTS, seed=kills.SEED)
    rollout = generator.rollout(prompts, weights, group_size=kills.GROUP)
    rewards = kills.odd_tokens(Path(os.devnull))(rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, reference.log_probs(rollout), loss=rg.ClippedLoss(clip_high=0.28, kl_coef=0.01))
    weights.close(step.weights)
    return rg.Graph("chaos", step.metrics)


class Faults:
    """Makes events on a thread until it is told to end; all is healed when `end` returns."""

    def __init__(self, control: hosts.Control, running: Job, seed: int, longest_s: float) -> None:
        self._longest_s = longest_s
        self.events: Counter[str] = Counter()
        self._control, self._running, self._draw = control, running, random.Random(seed)
        self._over, self._stepped = threading.Event(), threading.Event()
        self._broken: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stepped(self) -> None:
        self._stepped.set()

    def end(self) -> None:
        """Heal everything; from now on nothing happens. Raises what went wrong on the thread."""
        self._over.set()
        self._stepped.set()
        self._thread.join()
        if self._broken:
            raise self._broken[0]

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                if self._draw.random() < 0.8:  # else in the middle of a restart
                    self._stepped.clear()
                    self._stepped.wait(PATIENCE_S)
                self._over.wait(self._draw.uniform(0, PAUSE_S))
                if not self._over.is_set():
                    what = self._draw.choices(list(EVENTS), list(EVENTS.values()))[0]
                    self._happen(what)
                    self.events[what] += 1
        except BaseException as error:  # noqa: BLE001 (raised again by `end`)
            self._broken.append(error)

    def _happen(self, what: str) -> None:
        control, draw = self._control, self._draw
        host, seconds = draw.choice((2, 3)), draw.uniform(0.2, self._longest_s)
        if what == "a worker is killed":
            dispatch = self._running.session.dispatch
            assert isinstance(dispatch, placed_workers.Placed)
            if dispatch.created:
                at, pid = draw.choice(sorted(dispatch.created.values()))
                placed_workers.call(at, 5.0, "kill", pid)
        elif what == "a host is killed":
            control("kill", host)
            self._over.wait(seconds / 2)
            control("start", host)
            hosts.until_up(host)
        elif what == "a host is frozen":
            control("freeze", host)
            self._over.wait(seconds)
            control("thaw", host)
        elif what == "two hosts do not hear each other":
            control("mute", 2, 3)
            control("mute", 3, 2)
            self._over.wait(seconds)
            control("join", 2)
            control("join", 3)
        elif what == "a link is slow":
            control("slow", host, "2mbit")
            self._over.wait(seconds)
            control("join", host)
        else:
            host = draw.choice((1, 2, 3))
            control("cut" if what == "a host is cut off" else "unplug", host)
            self._over.wait(seconds)
            control("join", host)


def disturbed(control: hosts.Control, model: str, depth: int, minutes: float, seed: int, *, replan: bool) -> Mapping[str, object]:
    """Run with events for so long, then compare with an undisturbed run of as many steps."""
    made = graph(model, depth)
    plan = rg.compile(made, rg.Cluster(cpus=2 * hosts.HOSTS, hosts=hosts.HOSTS))
    recovery = Recovery(Path(tempfile.mkdtemp(dir=control.shared)), EVERY, 2, restarts=1000)
    found: list[Kept] = []
    workers: set[int] = set()
    plans: list[int] = []  # the hosts of each plan, in their order
    looks = Replanner(Replan(every=20, gain=0.05), lambda graph: {}) if replan else None
    with Job(made, plan, dispatch_name="placed", deadline_s=60, recovery=recovery, replanner=looks) as running:
        faults = Faults(control, running, seed, AWAY_S if replan else LONGEST_S)
        steps = running.steps(10**6)
        for _ in range(2):
            found.append(kept(next(steps)))
        faults.start()
        until = time.monotonic() + 60 * minutes
        for step in steps:
            found.append(kept(step))
            workers.add(running.pids.get("policy", 0))
            plans += [running.plan.cluster.hosts] if plans[-1:] != [running.plan.cluster.hosts] else []
            faults.stepped()
            if time.monotonic() > until:
                break
        faults.end()
    wrong = compared(found, made, plan)
    return {
        "minutes": minutes,
        "seed": seed,
        "depth": depth,
        "steps": len(found),
        "events": dict(faults.events),
        "events_in_all": sum(faults.events.values()),
        "trainers": len(workers),  # one more than there were restarts that reached a step
        "hosts_of_plans": plans,
        "wrong": wrong,
        "weights": found[-1][2].get("weights", found[-1][2].get("weight")),
    }


def kept(step: Any) -> Kept:
    return step.index, step.staleness, {name: value for name, value in step.metrics.items() if name.startswith(COMPARED)}


def compared(found: Sequence[Kept], made: rg.Graph, plan: rg.Plan) -> list[str]:
    """List the steps that differ from those of an undisturbed run of the same plan."""
    if [index for index, _, _ in found] != list(range(len(found))):
        return [f"steps came as {[index for index, _, _ in found]}"]
    with Job(made, plan, dispatch_name="placed", deadline_s=60) as here:
        expected = [kept(step) for step in here.steps(len(found))]
    return [f"step {index} differs" for (index, *one), (_, *other) in zip(found, expected, strict=True) if one != other]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--vector", action="store_true", help="train a vector, which loads at once, and no model")
    parser.add_argument("--replan", action="store_true", help="continue on the hosts that are left, and use those that come back")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.replan and not given.vector:
        parser.error("--replan: the bits of a model depend on the cores of its workers, so on the plan; add --vector")
    if not given.inside:
        if why := namespaces.explain_refusal():
            sys.exit(f"this machine makes no hosts of namespaces: {why}")
        sys.exit(subprocess.run(namespaces.isolate_command([sys.executable, __file__, *sys.argv[1:], "--inside"]), check=False).returncode)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        sys.exit(run(given, "" if given.vector else made_model(Path(folder))))


def made_model(folder: Path) -> str:
    """Write the tiny model in another process, since one that has computed with torch cannot be forked; import what workers need, once."""
    writing = os.fork()
    if writing == 0:
        tiny_model(folder / "model")
        os._exit(0)
    if os.waitpid(writing, 0)[1]:
        raise SystemExit("the tiny model could not be written")
    for module in forked_workers.PRELOADED:
        importlib.import_module(module)
    return str(folder / "model")


def run(given: argparse.Namespace, model: str) -> int:
    def case(control: hosts.Control) -> Mapping[str, object]:
        return disturbed(control, model, given.depth, given.minutes, given.seed, replan=given.replan)

    load = round(os.getloadavg()[0], 1)

    def told(outcome: Mapping[str, object]) -> None:
        found = {"machine": {**machine(), "load_before": load, "load_after": round(os.getloadavg()[0], 1)}, **outcome}
        print(json.dumps(found), flush=True)
        write(given.json, found)

    hosts.CASES["chaos"] = case
    return hosts.main(1, ["chaos"], told)


if __name__ == "__main__":
    main()
