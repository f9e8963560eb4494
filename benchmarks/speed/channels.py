"""Seconds of one hop of a torch tensor between two worker processes of one host: rlgraph's transports against their peers.

    python benchmarks/speed/channels.py [--quick] [--json PATH]

A hop lasts from before the writer's `put` (or what the peer calls it) to the moment the reader has a tensor it can use; the reader's own
pass over the data counts for nobody. Hops are measured one at a time, the next starts when the reader has said it is done, on the
system-wide monotonic clock. Every transport is warmed up first, since memory costs page faults when it is first touched; the cost of the
very first message of rlgraph's channel is printed as well. `memcpy` is torch's `copy_` between two warm buffers in the writer's process,
taken in turns with the hops. "rlgraph ray" is rlgraph's channel over those of Ray's Compiled Graphs, "native edge" such a graph itself.
"zero-copy" is Ray with RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1, which is off by default; its reader, like that
of rlgraph, gets views. Rows of a peer say so where it cannot carry a size.
"""

import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import ray
import torch
import torch.multiprocessing
from ray.dag import InputNode
from ray.dag.context import DAGContext
from rich.console import Console
from rich.progress import Progress

from benchmarks.lib.command import command_line, write
from benchmarks.lib.hops import KIB, MIB, WAIT_S, Row, goals, row, show
from rlgraph.channels import Site, open_reader, open_writer
from rlgraph.errors import ChannelTimeout

COUNTS = {KIB: 500, MIB: 200, 16 * MIB: 50, 256 * MIB: 10}
OURS = ("shm", "tcp", "ray")
DEADLINE_S = 120.0
STORE_BYTES = 3 * 2**29
ZERO_COPY = "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"


def tensor(size: int) -> torch.Tensor:
    return torch.arange(size // 4, dtype=torch.int32)


class End:
    """One of the two workers; each method is one side of one measurement."""

    def listen(self, transport: str, path: str) -> str:
        self.transport = transport
        self.writer = open_writer(transport, Site("hop", 2, 1, path, b"key", "127.0.0.1"))
        return self.writer.address

    def join(self, address: str) -> None:
        self.reader = open_reader(self.transport, Site("hop", 2, 1, address, b"key", timeout_s=DEADLINE_S))

    def close(self) -> None:
        self.writer.close()
        self.reader.close()

    def send(self, size: int, count: int) -> tuple[list[float], list[float]]:
        source, target, starts, copies = tensor(size), tensor(size), [], []
        for step in range(count):
            since = time.monotonic()
            target.copy_(source)
            copies.append(time.monotonic() - since)
            starts.append(time.monotonic())
            self.writer.put(step, {"x": source}, DEADLINE_S)
            self.reader.take(step, DEADLINE_S)
            self.reader.release()
        return starts, copies

    def receive(self, count: int) -> list[float]:
        ends = []
        for step in range(count):
            self.reader.take(step, DEADLINE_S)
            ends.append(time.monotonic())
            self.reader.release()
            self.writer.put(step, {}, DEADLINE_S)
        return ends

    def ping(self, count: int) -> list[float]:
        source, trips = tensor(KIB), []
        for step in range(count):
            since = time.monotonic()
            self.writer.put(step, {"x": source}, DEADLINE_S)
            self.reader.take(step, DEADLINE_S)
            trips.append(time.monotonic() - since)
            self.reader.release()
        return trips

    def pong(self, count: int) -> None:
        for step in range(count):
            self.writer.put(step, self.reader.take(step, DEADLINE_S), DEADLINE_S)
            self.reader.release()

    def wait_in_take(self) -> float:
        since = time.process_time()
        try:
            self.reader.take(0, WAIT_S)
        except ChannelTimeout:
            return (time.process_time() - since) / WAIT_S
        raise AssertionError("a message came, though nobody sent one")

    def rest(self) -> float:
        since = time.process_time()
        threading.Event().wait(WAIT_S)
        return (time.process_time() - since) / WAIT_S

    def store_send(self, receiver: Any, size: int, count: int) -> list[float]:
        source, hops = tensor(size), []
        for _ in range(count):
            since = time.monotonic()
            hops.append(ray.get(receiver.store_receive.remote([ray.put(source)])) - since)
        return hops

    def store_receive(self, refs: list[Any]) -> float:
        ray.get(refs[0])
        return time.monotonic()

    def call_ping(self, receiver: Any, count: int) -> list[float]:
        source, trips = tensor(KIB), []
        for _ in range(count):
            since = time.monotonic()
            ray.get(receiver.echo.remote(source))
            trips.append(time.monotonic() - since)
        return trips

    def echo(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def facts(self, size: int) -> tuple[int, int]:
        self.source = tensor(size)
        self.starts: list[float] = []
        return os.getpid(), torch.get_num_threads()

    def emit(self, step: int) -> torch.Tensor:
        self.starts.append(time.monotonic())
        return self.source

    def arrive(self, x: torch.Tensor) -> float:
        return time.monotonic()

    def started(self) -> list[float]:
        return self.starts


def ends(environment: dict[str, str] | None = None) -> tuple[Any, Any]:
    """Start a writing and a reading worker; the environment is the writer's, whose process sizes the buffers of native edges."""
    environment, worker = environment or {}, ray.remote(num_cpus=1)(End)
    both = {key: value for key, value in environment.items() if key == ZERO_COPY}
    return (
        worker.options(runtime_env={"env_vars": environment} if environment else None).remote(),
        worker.options(runtime_env={"env_vars": both} if both else None).remote(),
    )


def join(sender: Any, receiver: Any, transport: str, folder: str) -> None:
    """Connect the two workers by a channel each way."""
    both = [sender, receiver]
    addresses = ray.get([end.listen.remote(transport, f"{folder}/{way}") for end, way in zip(both, ("there", "back"), strict=True)])
    ray.get([end.join.remote(address) for end, address in zip(both, reversed(addresses), strict=True)])


def stop(*actors: Any) -> None:
    for actor in actors:
        ray.kill(actor)


def measure_ours(transport: str, size: int, count: int, folder: str, zero_copy: bool = False) -> list[Row]:
    sender, receiver = ends({ZERO_COPY: "1"} if zero_copy else None)
    join(sender, receiver, transport, folder)
    (starts, copies), arrivals = ray.get([sender.send.remote(size, count), receiver.receive.remote(count)], timeout=DEADLINE_S)
    ray.get([sender.close.remote(), receiver.close.remote()])
    stop(sender, receiver)
    hops = [arrived - started for started, arrived in zip(starts, arrivals, strict=True)]
    name = f"rlgraph {transport}{', zero-copy' if zero_copy else ''}"
    found = row(name, size, hops, f"first message {hops[0] * 1e3:.1f} ms")
    return [found, row("memcpy", size, copies, "in the writer, not a hop")] if transport == "shm" else [found]


def measure_store(size: int, count: int, zero_copy: bool) -> Row:
    name = "Ray object store, zero-copy" if zero_copy else "Ray object store"
    sender, receiver = ends({ZERO_COPY: "1"} if zero_copy else None)
    hops = ray.get(sender.store_send.remote(receiver, size, min(count, 50)), timeout=DEADLINE_S)
    stop(sender, receiver)
    return row(name, size, hops)


def native(sender: Any, receiver: Any) -> Any:
    """Compile the graph driver -> sender -> receiver -> driver; only its second edge carries the tensor."""
    with InputNode() as step:
        graph = receiver.arrive.bind(sender.emit.bind(step))
    return graph.experimental_compile(_max_inflight_executions=1)


def measure_native(size: int, count: int, zero_copy: bool) -> Row:
    name = "native edge, zero-copy" if zero_copy else "native edge"
    # never resized: a resized edge keeps its old buffer and hangs the teardown
    environment = {"RAY_CGRAPH_buffer_size_bytes": str(size + 2 * MIB), **({ZERO_COPY: "1"} if zero_copy else {})}
    sender, receiver = ends(environment)
    ray.get(sender.facts.remote(size))
    graph = native(sender, receiver)
    arrivals: list[float] = []
    note, until = "", time.monotonic() + 30
    while len(arrivals) < count and time.monotonic() < until:
        try:
            arrivals.append(ray.get(graph.execute(len(arrivals)), timeout=60))
        except (ray.exceptions.RayChannelError, ray.exceptions.RayTaskError, ray.exceptions.RayActorError) as error:
            note = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:80]}"
            break
    starts = ray.get(sender.started.remote(), timeout=10) if arrivals else []
    graph.teardown(kill_actors=True)
    if len(arrivals) < 3:
        return Row(name, size, None, None, None, len(arrivals), note or "impossible")
    return row(name, size, [arrived - started for started, arrived in zip(starts, arrivals, strict=False)], note)


def queue_receiver(there: Any, back: Any, count: int, echo: bool) -> None:
    for _ in range(count):
        x = there.get()
        back.put(x if echo else time.monotonic())
    there.get()  # stay until the other side has what was sent


def measure_queue(size: int, count: int, echo: bool) -> list[float]:
    """Measure the seconds of a hop, or with `echo` of a round trip; a fresh tensor each time, since a queue moves its storage for good."""
    context = torch.multiprocessing.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=queue_receiver, args=(there, back, count, echo))
    process.start()
    source, seconds = tensor(size), []
    torch.set_num_threads(1)
    for _ in range(count):
        message = source.clone()
        since = time.monotonic()
        there.put(message)
        arrived = back.get(timeout=DEADLINE_S)
        seconds.append(time.monotonic() - since if echo else arrived - since)
        del arrived
    there.put(None)
    process.join()
    return seconds


def measure_round_trips(count: int, folder: str) -> list[Row]:
    sender, receiver = ends()
    join(sender, receiver, "shm", folder)
    trips, _ = ray.get([sender.ping.remote(count), receiver.pong.remote(count)], timeout=DEADLINE_S)
    ray.get([sender.close.remote(), receiver.close.remote()])
    calls = ray.get(sender.call_ping.remote(receiver, count), timeout=DEADLINE_S)
    stop(sender, receiver)
    queue = measure_queue(KIB, count, echo=True)
    return [row("rlgraph shm", KIB, trips), row("torch.multiprocessing queue", KIB, queue), row("Ray actor call", KIB, calls)]


def measure_waiting(folder: str) -> dict[str, float]:
    """Measure the share of a core that a worker uses while it waits for three seconds."""
    sender, receiver = ends()
    shares = {"asleep outside any channel": ray.get(receiver.rest.remote())}
    for transport in OURS:
        join(sender, receiver, transport, folder)
        shares[f"rlgraph {transport}"] = ray.get(receiver.wait_in_take.remote())
        ray.get([sender.close.remote(), receiver.close.remote()])
    pid, _ = ray.get(receiver.facts.remote(KIB))
    ray.get(sender.facts.remote(KIB))
    graph = native(sender, receiver)
    ray.get(graph.execute(0), timeout=60)
    since = cpu_seconds(pid)
    threading.Event().wait(WAIT_S)
    shares["native edge"] = (cpu_seconds(pid) - since) / WAIT_S
    graph.teardown(kill_actors=True)
    return shares


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(sizes: dict[int, int], folder: str, console: Console) -> tuple[list[Row], list[Row], dict[str, float]]:
    rows: list[Row] = []
    kinds: list[Callable[[int, int], list[Row]]] = [
        lambda size, count: measure_ours("shm", size, count, folder),
        lambda size, count: measure_ours("tcp", size, count, folder),
        lambda size, count: measure_ours("ray", size, count, folder),
        lambda size, count: measure_ours("ray", size, count, folder, zero_copy=True),
        lambda size, count: [measure_native(size, min(count, 100), zero_copy=False)],
        lambda size, count: [measure_native(size, min(count, 100), zero_copy=True)],
        lambda size, count: [measure_store(size, count, zero_copy=False)],
        lambda size, count: [measure_store(size, count, zero_copy=True)],
        lambda size, count: [row("torch.multiprocessing queue", size, measure_queue(size, count, echo=False))],
    ]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(sizes) * len(kinds) + 2)
        for size, count in sizes.items():
            for kind in kinds:
                rows += kind(size, count)
                progress.advance(task)
        trips = measure_round_trips(500, folder)
        progress.advance(task)
        waiting = measure_waiting(folder)
    return rows, trips, waiting


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="only 1 KiB, 16 MiB and 256 MiB")
    options = parser.parse_args()
    console = Console(width=150)
    sizes = {size: count for size, count in COUNTS.items() if not options.quick or size in (KIB, 16 * MIB, 256 * MIB)}
    folder, before = tempfile.mkdtemp(prefix="rlgraph-"), os.getloadavg()
    ray.init(include_dashboard=False, num_cpus=4, object_store_memory=STORE_BYTES, log_to_driver=False, logging_level="error")
    try:
        DAGContext.get_current().buffer_size_bytes = MIB
        rows, trips, waiting = run(sizes, folder, console)
    finally:
        ray.shutdown()
        shutil.rmtree(folder)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Ray {ray.__version__}, 1 torch thread a worker"
    console.print(machine)
    show(rows, trips, waiting, console)
    for goal, figure, met in goals(rows, trips, waiting):
        console.print(f"{'met   ' if met else 'MISSED'}  {figure:10.3f}  {goal}", highlight=False)
    if options.json:
        measured = {"hops": [asdict(r) for r in rows], "round_trips": [asdict(r) for r in trips], "waiting": waiting}
        figures = {"machine": machine, "load_average": {"before": before, "after": os.getloadavg()}, **measured}
        write(options.json, figures)


if __name__ == "__main__":
    main()
