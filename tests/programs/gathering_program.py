"""Checkpoints of three hosts that share no folder: `gathering_program.py CASE...` prints the outcome of each case as a line of JSON.

A tiny model is trained by two ranks on two hosts. The checkpoints lie in the /tmp of the driver's host, which no other host sees.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from programs import network_program as hosts
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.engines.fsdp.distributed_checkpoint import weights_of
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import ExportError, RlgraphError
from rlgraph.graph.graph import Graph
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Recovery, checkpoint_steps
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.session import Links

STEPS, EVERY = 6, 2
APART = "is not shared by"


def graph(control: hosts.Control) -> Graph:
    writing = os.fork()  # a process that has computed with torch cannot be forked
    if writing == 0:
        tiny_model(control.shared / "model", hidden=128)
        os._exit(0)
    os.waitpid(writing, 0)
    model = str(control.shared / "model")
    sampling = rg.Sampling(max_tokens=8)
    generator = rg.Generator(model, pool=rg.Pool("rollout", cpus=2), engine="transformers", dtype="float32", sampling=sampling)
    policy = rg.Policy(model, pool=rg.Pool("train", cpus=4), data_parallel=2, dtype="float32", optimizer=rg.AdamW(lr=1e-3))
    return grpo_graph(generator, policy, [{"prompt": f"{n} + 1 ="} for n in range(5)], name="gathered", rewards=hosts.lengths)


def job(made: Graph, folder: Path, on: int = hosts.HOSTS, restarts: int = 0, *, encrypt: bool = False) -> Job:
    recovery = Recovery(folder, EVERY, 2, restarts=restarts)
    plan = compile_plan(made, Cluster(cpus=8 if on == 2 else 6, hosts=on))  # cores for a rank on each of two hosts, of two threads anywhere
    return Job(made, plan, dispatch_name="placed", deadline_s=200.0, recovery=recovery, links=Links(encrypt=encrypt))


def comparable_parts(step: Any) -> tuple[int, int, Mapping[str, float]]:
    names = ("actor/", "critic/", "response_length/")
    return (
        step.index,
        step.staleness,
        {name: value for name, value in step.metrics.items() if name.startswith(names) and "time" not in name},
    )


def digest(folder: Path) -> str:
    """Hash what the newest checkpoint holds of the model, and check that all of it is whole."""
    newest = folder / f"step-{max(checkpoint_steps(folder)):08d}"
    found = hashlib.sha256()
    for shard in sorted(weights_of(newest / "policy"), key=lambda shard: (shard.box.name, shard.box.offsets)):
        found.update(f"{shard.box.name} {shard.box.offsets}".encode())
        found.update(shard.read().numpy().tobytes())
    return f"{newest.name} {found.hexdigest()}"


def ended(found: Sequence[Any], folder: Path) -> Mapping[str, object]:
    """Tell what a run that ended gave and left."""
    return {"error": "", "steps": found, "weights": digest(folder), "left": sorted(path.name for path in folder.iterdir())}


def shared(control: hosts.Control) -> Mapping[str, object]:
    """Run without an interruption, on hosts that share the folder: what the others are compared with."""
    folder = Path(tempfile.mkdtemp(dir=control.shared))
    with job(graph(control), folder) as running:
        found = [comparable_parts(step) for step in running.steps(STEPS)]
    return {"told": [notice for notice in running.notices if APART in notice], **ended(found, folder)}


def resumed(control: hosts.Control) -> Mapping[str, object]:
    """Run on three hosts, go on with two, and then with three again; one of them has another folder of the same path.

    Meanwhile look at each host's ports, and try to export to the folder that not all hosts see.
    """
    made, folder = graph(control), Path(tempfile.mkdtemp())
    control("on", 3, "mkdir", "-p", str(folder))
    found, ports, told = [], [], []
    for on, until, encrypt in ((3, 2, False), (2, 4, True), (3, 6, False)):
        with job(made, folder, on, encrypt=encrypt) as running:
            told.append([notice for notice in running.notices if APART in notice])
            ranks = {worker.host for worker in running.plan.workers if worker.world > 1}
            found += [comparable_parts(step) for step in running.steps(until)]
            ports.append({n: sorted(control("listening", n)) for n in range(1, on + 1)})
            refused = exported(running, folder)
    control("on", 3, "sh", "-c", f'test -z "$(ls {folder})"')
    return {"ranks": len(ranks), "ports": ports, "refused": refused, "told": told, **ended(found, folder)}


def exported(running: Job, folder: Path) -> str:
    try:
        running.export(folder / "exported")
    except ExportError as error:
        return str(error)
    return ""


def wait_for_partial_shard(folder: Path, step: int) -> Path:
    """Wait until the shard of host 3's rank begins to arrive in a checkpoint that is not whole."""
    while True:
        for file in folder.glob(f".part-*-{step:08d}/policy/__1_*"):
            if file.stat().st_size > 0 and not (folder / f"step-{step:08d}").exists():
                return file
        time.sleep(0.002)


def driver_killed(control: hosts.Control) -> Mapping[str, object]:
    """Kill the driver while a shard comes from another host, and run the program again."""
    made, folder = graph(control), Path(tempfile.mkdtemp())
    child = os.fork()
    if child == 0:
        with job(made, folder) as running:
            list(running.steps(10**6))
        os._exit(1)
    while EVERY not in checkpoint_steps(folder):
        time.sleep(0.01)
    control("slow", 3, "10mbit")
    half = wait_for_partial_shard(folder, 2 * EVERY)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seen = {"half": half.stat().st_size, "whole": sorted(checkpoint_steps(folder))}
    control("join", 3)
    with job(made, folder) as running:
        begin = running.finished_steps
        found = [comparable_parts(step) for step in running.steps(STEPS)]
    return {"begin": begin, "full": _size(folder, half), **seen, **ended(found, folder)}


def _size(folder: Path, half: Path) -> int:
    """The size that a shard has when it is whole."""
    return (folder / f"step-{STEPS:08d}" / "policy" / half.name).stat().st_size


def host_killed(control: hosts.Control) -> Mapping[str, object]:
    """Kill a host while its shard goes to the driver: the job starts again from the checkpoint before."""
    made, folder, seen = graph(control), Path(tempfile.mkdtemp()), {}

    def kill() -> None:
        half = wait_for_partial_shard(folder, 2 * EVERY)
        control("kill", 3)
        seen.update(half=half.stat().st_size, whole=sorted(checkpoint_steps(folder)), name=half)
        control("start", 3)
        hosts.until_up(3)

    with job(made, folder, restarts=2) as running:
        steps = running.steps(STEPS)
        found = [comparable_parts(next(steps)) for _ in range(EVERY)]
        thread = threading.Thread(target=kill)
        control("slow", 3, "10mbit")
        thread.start()
        found += [comparable_parts(step) for step in steps]
        thread.join()
        restarts = running._restarts.used
    full = _size(folder, seen.pop("name"))
    return {"full": full, "restarts": restarts, **seen, **ended(found, folder)}


def fill_disk(file: int, folder: Path) -> None:
    """Leave 256 KiB of a disk, to which another checkpoint may be written meanwhile: what was free a moment ago may not be any more."""
    while (room := shutil.disk_usage(folder).free - (256 << 10)) > 0:
        with contextlib.suppress(OSError):
            os.posix_fallocate(file, 0, room)
            return


def disk_full(control: hosts.Control) -> Mapping[str, object]:
    """Let the driver's disk be full once a checkpoint is there; another one may be under way by then."""
    made, folder = graph(control), Path(tempfile.mkdtemp())
    control("on", 1, "mount", "-t", "tmpfs", "-o", "size=100m", "none", str(folder))
    try:
        with job(made, folder) as running:
            steps = running.steps(2 * STEPS)
            while EVERY not in checkpoint_steps(folder):
                next(steps)
            with (folder / "lock").open("r+b") as file:  # a file that belongs there
                fill_disk(file.fileno(), folder)
            for _ in steps:
                pass
    except RlgraphError as error:
        whole = sorted(checkpoint_steps(folder))
        left = sorted({path.name for path in folder.iterdir()} - {path.name for path in checkpoint_steps(folder).values()})
        return {"kind": type(error).__name__, "error": str(error), "newest": digest(folder)[:13], "whole": whole, "left": left}
    return {"error": ""}


hosts.CASES |= {
    "shared": shared,
    "resumed": resumed,
    "driver killed": driver_killed,
    "host killed while it sends": host_killed,
    "driver's disk full": disk_full,
}


if __name__ == "__main__":
    sys.exit(hosts.main(len(sys.argv) - 1, sys.argv[1:]))
