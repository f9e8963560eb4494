"""Runs jobs on three hosts of namespaces or six, and what happens to the hosts meanwhile: `network_program.py SWITCHES CASE...`.
It prints the outcome of each case as a line of JSON.

The driver runs on host 1, with the generator; the judge is on host 2 and the policy on host 3, so each host has a link to each other one.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import fakes, namespaces, placed_workers, wide_weights
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import RlgraphError
from rlgraph.graph.graph import Graph
from rlgraph.plan.channels import shape_of
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.replan import Replanner
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.session import Links
from rlgraph.runtime.local import LocalJob
from rlgraph.values.pool import Pool

HOSTS = 3
THROUGH_A_TREE = "weights through a tree"
WIDER = {THROUGH_A_TREE: 6}  # hosts of cases at switches of their own
GIVE_UP_S = 60.0  # without an error; the job is then ended


class Control:
    """Asks the process at the switch to do something: `control("cut", 2)`."""

    def __init__(self, link: Connection, shared: Path) -> None:
        self._link = link
        self.shared = shared  # a folder that all hosts see

    def __call__(self, what: str, *arguments: object) -> Any:
        self._link.send((what, arguments))
        answer = self._link.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def graph(generate_s: float = 0.02, count: int = 4) -> Graph:
    judged = Pool("judge")
    return fakes.vector_loop(1, generate_s=generate_s, count=count, middle=lambda rollout: fakes.score_on_pool(judged, rollout))


def job(
    made: Graph,
    recovery: Recovery | None = None,
    deadline_s: float = 60.0,
    *,
    encrypt: bool = False,
    hosts: int = HOSTS,
    costs: rg.planning.Costs | None = None,
    replanner: Replanner | None = None,
) -> Job:
    plan = compile_plan(made, Cluster(cpus=2 * HOSTS, hosts=hosts), costs)
    return Job(
        made, plan, dispatch_name="placed", deadline_s=deadline_s, recovery=recovery, links=Links(encrypt=encrypt), replanner=replanner
    )


def created(running: Job, worker: str) -> tuple[int, int]:
    dispatch = running.session.dispatch
    assert isinstance(dispatch, placed_workers.Placed)
    return dispatch.created[worker]


def kill(running: Job, worker: str) -> None:
    host, pid = created(running, worker)
    assert placed_workers.call(host, 5.0, "kill", pid)


Fault = Callable[[Control, Job], None]


def named(control: Control, fault: Fault, heal: Fault | None = None, made: Graph | None = None) -> Mapping[str, object]:
    """Run a job, let the fault happen after some steps, and tell what it raised and after how many seconds."""
    began, running = 0.0, job(made or graph())
    try:
        with running:
            steps = running.steps(10**6)
            for _ in range(5):
                next(steps)
            fault(control, running)
            began = time.monotonic()
            for step in steps:
                if time.monotonic() - began > GIVE_UP_S:
                    return {"error": "", "step": step.index}
    except RlgraphError as error:
        took_s = time.monotonic() - began
        return {"kind": type(error).__name__, "error": str(error), "seconds": round(took_s, 1)}
    finally:
        if heal is not None:
            heal(control, running)
    return {"error": ""}


def on(what: str, *arguments: object) -> Fault:
    return lambda control, running: control(what, *arguments)


def both(first: Fault, second: Fault) -> Fault:
    def do(control: Control, running: Job) -> None:
        first(control, running)
        second(control, running)

    return do


def host_is_back(n: int) -> Fault:
    return both(on("start", n), lambda *_: until_up(n))


def until_up(n: int) -> None:
    while placed_workers.call(n, 1.0, "read_clock") is None:
        time.sleep(0.05)


def survives(control: Control, during: Fault, after: Fault, steps: int = 40) -> Mapping[str, object]:
    """Run a job of so many steps through a disturbance that it is to survive; tell whether its numbers are those of one process."""
    made = graph()
    with LocalJob(made, compile_plan(made, Cluster(cpus=2))) as here:
        expected = [step.metrics["loss"] for step in here.steps(steps)]
    with job(made) as running:
        given = running.steps(steps)
        found = [next(given).metrics["loss"] for _ in range(5)]
        during(control, running)
        found += [next(given).metrics["loss"] for _ in range(steps - 6)]
        after(control, running)
        found += [step.metrics["loss"] for step in given]
    return {"error": "", "same": found == expected}


def goes_on(control: Control, lost: Fault, back: Fault) -> Mapping[str, object]:
    """Lose host 3 and have it back 9 s later: the job waits, goes on from its checkpoint, and ends with the numbers of one process."""
    made, count = graph(), 60
    with LocalJob(made, compile_plan(made, Cluster(cpus=2))) as here:
        expected = [step.metrics["loss"] for step in here.steps(count)]
    running, is_back = job(made, Recovery(Path(tempfile.mkdtemp(dir=control.shared)), every=4, keep=2, restarts=2)), []

    def bring_back() -> None:
        time.sleep(9)
        back(control, running)
        is_back.append(time.monotonic())

    with running:
        steps = running.steps(count)
        found = [next(steps).metrics["loss"] for _ in range(6)]
        lost(control, running)
        thread = threading.Thread(target=bring_back)
        thread.start()
        arrived = []
        for step in steps:
            found.append(step.metrics["loss"])
            arrived.append(time.monotonic())
        thread.join()
        restarts = running._restarts.used
    again_s = next((at - is_back[0] for at in arrived if at > is_back[0]), 0.0)
    return {"error": "", "same": found == expected, "restarts": restarts, "again_s": round(again_s, 1)}


def goes_on_without(control: Control) -> Mapping[str, object]:
    """Lose host 3 for good: the job goes on from its checkpoint on the two others, and ends with the numbers of one process."""
    made, count = graph(), 40
    with LocalJob(made, compile_plan(made, Cluster(cpus=2))) as here:
        expected = [step.metrics["loss"] for step in here.steps(count)]
    recovery = Recovery(Path(tempfile.mkdtemp(dir=control.shared)), every=4, keep=2, restarts=1)
    with job(made, recovery, replanner=Replanner(rg.planning.Replan(every=1000), lambda graph: {})) as running:
        steps = running.steps(count)
        found = [next(steps).metrics["loss"] for _ in range(6)]
        control("kill", 3)
        began = time.monotonic()
        found.append(next(steps).metrics["loss"])
        again_s = time.monotonic() - began
        found += [step.metrics["loss"] for step in steps]
        hosts = running.plan.cluster.hosts
    host_is_back(3)(control, running)
    return {"error": "", "same": found == expected, "hosts": hosts, "again_s": round(again_s, 1)}


def disk_full(control: Control) -> Mapping[str, object]:
    """Let the disk of the policy's host be full in the middle of a run with checkpoints."""
    folder = tempfile.mkdtemp(dir=control.shared)
    running = job(graph(), Recovery(Path(folder), every=10, keep=2, restarts=0))
    try:
        with running:
            steps = running.steps(25)
            for _ in range(3):
                next(steps)
            control("on", 3, "mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=1", "none", folder)
            given = 3 + len(list(steps))
    except RlgraphError as error:
        return {"kind": type(error).__name__, "error": str(error)}
    finally:
        control("on", 3, "sh", "-c", f"umount {folder} || true")
    return {"error": "", "given": given}


def clock_jumps(control: Control) -> Mapping[str, object]:
    """Set the driver's wall clock a day ahead, then back; the hosts' monotonic clocks are days apart anyway."""
    real = time.time

    def set_to(ahead_s: float) -> Fault:
        return lambda *_: setattr(time, "time", lambda: real() + ahead_s)

    return survives(control, set_to(86_400.0), set_to(0.0))


def encrypted(control: Control) -> Mapping[str, object]:
    """Run a job in plain and one by TLS; tell whether the numbers are the same, and how many packets named a column."""
    made, steps, outcome, losses = graph(), 10, {"error": ""}, []
    for how in ("plain", "secret"):
        control("sniff", b"response_mask", placed_workers.PORT)
        with job(made, encrypt=how == "secret") as running:
            losses.append([step.metrics["loss"] for step in running.steps(steps)])
        outcome[how] = control("sniffed")
    return {**outcome, "same": losses[0] == losses[1]}


def passed_on(control: Control, mib: int = 16, hosts: int = HOSTS, costs: rg.planning.Costs | None = None) -> Mapping[str, object]:
    """Send versions to four generators; tell what came of them, the shape, and the bytes of a version on each host's link."""
    steps, before, outcome = 24, {}, {}
    with job(wide_weights.graph(mib), hosts=hosts, costs=costs) as running:
        outcome["shape"] = shape_of(running.plan, running.plan.loops[0])
        outcome["on"] = {worker.name: worker.host + 1 for worker in running.plan.workers}
        given = list(running.steps(1))
        before = {n: control("traffic", n) for n in range(1, hosts + 1)}
        given += list(running.steps(steps))
        after = {n: control("traffic", n) for n in range(1, hosts + 1)}
    outcome["copies"] = {n: [(b - a) / steps / (mib << 20) for a, b in zip(before[n], after[n], strict=True)] for n in before}
    outcome["same"] = [step.metrics["same"] for step in given]
    outcome["versions"] = [step.metrics["version"] for step in given]
    return {"error": "", **outcome}


def through_a_tree(control: Control) -> Mapping[str, object]:
    """Send versions of 7 MiB, too small for parts, from two hosts to four others."""
    seconds = dict.fromkeys(("prompts", "rollout", "update"), 0.0)
    return passed_on(control, 7, WIDER[THROUGH_A_TREE], rg.planning.Costs(seconds, publish_bytes=7 << 20))


def lost_within_a_version(control: Control, fault: Fault, heal: Fault | None = None) -> Mapping[str, object]:
    """Let a version of 32 MiB take more than a second over the trainers' link, and lose something in the middle of it."""
    size, processes = 32 << 20, {}

    def lose(control: Control, running: Job) -> None:
        assert isinstance(running.session.dispatch, placed_workers.Placed)
        processes.update(running.session.dispatch.created)
        control("slow", 3, "200mbit")
        sent = begin = control("traffic", 3)[1]
        while sent - begin < size // 3:
            time.sleep(0.02)
            sent = control("traffic", 3)[1]
        fault(control, running)

    found = named(control, lose, heal, wide_weights.graph(32))
    control("join", 3)
    end = time.monotonic() + 10
    while (
        left := [worker for worker, (n, pid) in processes.items() if placed_workers.call(n, 5.0, "runs", pid)]
    ) and time.monotonic() < end:
        time.sleep(0.05)
    return {**found, "left": left, "workers": len(processes)}


@rg.node(reads="response_mask", writes="rewards")
def lengths(batch: rg.Columns) -> rg.Columns:
    return {"rewards": batch["response_mask"].sum(-1).float()}  # type: ignore[union-attr]


def listens(control: Control) -> Mapping[str, object]:
    """Train a tiny model whose two ranks are on two hosts, and look at each host's ports meanwhile."""
    writing = os.fork()  # a process that has computed with torch cannot be forked
    if writing == 0:
        tiny_model(control.shared / "model")
        os._exit(0)
    os.waitpid(writing, 0)
    model = str(control.shared / "model")
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", dtype="float32", sampling=rg.Sampling(max_tokens=4))
    policy = rg.Policy(model, pool=rg.Pool("train", share=2.0), data_parallel=2, dtype="float32")
    with job(grpo_graph(generator, policy, name="ranks", rewards=lengths, count=2), deadline_s=200.0) as running:
        ranks = {worker.host for worker in running.plan.workers if worker.world > 1}
        given = len(list(running.steps(2)))
        ports = {n: control("listening", n) for n in range(1, HOSTS + 1)}
    return {"error": "", "given": given, "ranks": sorted(ranks), "ports": ports}


CASES: dict[str, Callable[[Control], Mapping[str, object]]] = {
    "worker killed on the driver's host": lambda c: named(c, lambda _, r: kill(r, "generator")),
    "worker killed on another host": lambda c: named(c, lambda _, r: kill(r, "policy")),
    "host killed": lambda c: named(c, on("kill", 3), host_is_back(3)),
    "cable of a host": lambda c: named(c, on("unplug", 3), on("join", 3)),
    "silent cut of the policy's host": lambda c: named(c, on("cut", 3), on("join", 3)),
    "silent cut of the judge's host": lambda c: named(c, on("cut", 2), on("join", 2)),
    "silent cut with megabytes under way": lambda c: named(
        c, both(on("slow", 3, "20mbit"), on("cut", 3)), on("join", 3), graph(count=20_000)
    ),
    "cut of the driver": lambda c: named(c, on("cut", 1), on("join", 1)),
    "cut between two others": lambda c: named(c, both(on("mute", 2, 3), on("mute", 3, 2)), both(on("join", 2), on("join", 3))),
    "half open": lambda c: named(c, on("mute", 3, 1), on("join", 3)),
    "half open between two others": lambda c: named(c, on("mute", 2, 3), on("join", 2)),
    "half open, the other way": lambda c: named(c, on("mute", 1, 3), on("join", 1)),
    "weights passed on": passed_on,
    THROUGH_A_TREE: through_a_tree,
    "host that passes on killed": lambda c: lost_within_a_version(c, on("kill", 2), host_is_back(2)),
    "worker that passes on killed": lambda c: lost_within_a_version(c, lambda _, r: kill(r, "generator[0]")),
    "worker that passes on killed, on the last host": lambda c: lost_within_a_version(c, lambda _, r: kill(r, "generator[2]")),
    "trainers' host killed": lambda c: lost_within_a_version(c, on("kill", 3), host_is_back(3)),
    "cut between trainers and one that passes on": lambda c: lost_within_a_version(
        c, both(on("mute", 2, 3), on("mute", 3, 2)), both(on("join", 2), on("join", 3))
    ),
    "host frozen": lambda c: named(c, on("freeze", 2), on("thaw", 2)),
    "slow link": lambda c: survives(c, on("slow", 3, "2mbit"), on("join", 3)),
    "clock jump": clock_jumps,
    "disk full": disk_full,
    "ports": listens,
    "encrypted": encrypted,
    "host killed, and back": lambda c: goes_on(c, on("kill", 3), host_is_back(3)),
    "silent cut, and back": lambda c: goes_on(c, on("cut", 3), on("join", 3)),
    "host killed, for good": goes_on_without,
    "short cut": lambda c: survives(c, both(on("cut", 3), both(lambda *_: time.sleep(1.5), on("join", 3))), lambda *_: None),
}


def drive(link: Connection, shared: Path, names: Sequence[str], hosts: int) -> None:
    control = Control(link, shared)
    for n in range(1, hosts + 1):
        until_up(n)
    for name in names:
        began = time.monotonic()
        outcome = CASES[name](control)
        control("outcome", {"case": name, "whole_s": round(time.monotonic() - began, 1), **outcome})


class Switch:
    """The hosts with their servers, as the driver asks for them to change."""

    def __init__(self, name: str, cases: Sequence[str], tell: Callable[[Mapping[str, object]], None], hosts: int = HOSTS) -> None:
        self._tell = tell
        self.network = namespaces.Network(hosts, name=name, named=False)
        for n in range(1, hosts + 1):
            self._serve(n)
        self.link, there = multiprocessing.Pipe()
        self.driver = self.network.fork(1, lambda: (self.link.close(), drive(there, self.network.shared, cases, hosts)))
        there.close()

    def _serve(self, n: int) -> None:
        self.network.fork(n, lambda: placed_workers.serve(n))

    def obey(self) -> bool:
        """Do what the driver asks for next; False if it has ended."""
        try:
            what, arguments = self.link.recv()
        except EOFError:
            return False
        answer = None
        try:
            if what == "outcome":
                self._tell(*arguments)
            else:
                answer = getattr(self.network, what)(*arguments)
            if what == "start":
                self._serve(*arguments)
            self.link.send(answer)
        except Exception as error:  # noqa: BLE001 (the case that asked gets it)
            self.link.send(error)
        return True


def tell(outcome: Mapping[str, object]) -> None:
    print(json.dumps(outcome), flush=True)


def main(switches: int, cases: Sequence[str], tell: Callable[[Mapping[str, object]], None] = tell) -> int:
    """Run cases on several networks side by side, since a case mostly waits; those with more hosts come after the others."""
    narrow = [case for case in cases if case not in WIDER]
    worst = until_over([Switch(f"s{i}", narrow[i::switches], tell) for i in range(switches)]) if narrow else 0
    return max(worst, *(until_over([Switch("w", [case], tell, WIDER[case])]) for case in cases if case in WIDER), 0)


def until_over(made: Sequence[Switch]) -> int:
    """Do what the drivers ask for until all have ended; return their worst exit code."""
    running, drivers, worst = made, {switch.driver for switch in made}, 0
    while running:
        ready = wait([switch.link for switch in running])
        running = [switch for switch in running if switch.link not in ready or switch.obey()]
    while drivers:
        pid, status = os.wait()
        if pid in drivers:
            drivers.remove(pid)
            worst = max(worst, os.waitstatus_to_exitcode(status))
    for switch in made:
        switch.network.end()
    return worst


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:] or list(CASES)))
