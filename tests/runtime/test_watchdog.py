"""A worker that stands still is named with what it does, its channels and its Python stacks; a slow one is warned about before."""

import logging
import os
import pickle
import re
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import fakes, faults, forked_workers

from rlgraph.channels.host.channel import HostReader, HostWriter
from rlgraph.channels.host.connection import Connection, listen
from rlgraph.channels.weights.shards import WeightShard
from rlgraph.columns import Column, Columns
from rlgraph.errors import ChannelBroken, ChannelTimeout, DispatchError, NodeError, RlgraphError, WorkerDied
from rlgraph.graph.nodes import Operation
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage, node
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.schedule import Span
from rlgraph.runtime import messages
from rlgraph.runtime.driver import worker_group as group_module
from rlgraph.runtime.driver.hosts import Hosts, LocalHostAgent
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.watchdog import Culprit, Cut, Watchdog, culprit, find_disconnected
from rlgraph.runtime.driver.worker_group import WorkerGroup
from rlgraph.runtime.worker.activity import Activity, Heartbeat, offer_stacks, read_stacks
from rlgraph.runtime.worker.spec import worker_specs

DEADLINE_S = 3.0


@node(reads="values group_ids", writes="rewards")
def stuck_in_c(batch: Columns) -> dict[str, Column]:
    _deadlock()
    return fakes.score.function(batch)


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def report_of(error: BaseException) -> str:
    """Return the file that the error names, and remove it."""
    named = re.search(r"stacks of all workers are in (\S+)", str(error))
    assert named, error
    path = Path(named[1])
    text = path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    path.unlink()
    return text


def test_a_node_stuck_in_c_code_is_named_with_its_peer_its_channel_and_both_stacks() -> None:
    with forked_workers.job(fakes.vector_loop(1, middle=stuck_in_c), DEADLINE_S) as running:
        since = time.monotonic()
        with pytest.raises(ChannelTimeout) as raised:
            list(running.steps(3))
        took = time.monotonic() - since
    message = str(raised.value)
    assert "'stuck_in_c' has been running node 'stuck_in_c', step 0" in message
    assert "'policy' has been waiting for channel 'stuck_in_c' (written by node 'stuck_in_c'), step 0" in message
    assert "channel 'stuck_in_c' (stuck_in_c -> update): " in message
    assert re.search(r"worker 'stuck_in_c', Python stacks:.*in _deadlock", message, re.DOTALL)
    assert "in take" in message
    assert took < DEADLINE_S + 30  # what collecting stacks takes on a busy machine
    report = report_of(raised.value)
    assert all(f"worker '{worker}'" in report for worker in running.pids)
    assert re.search(r"worker 'policy'\n(.+\n)*.*in (take|_fail|_sleep)\n", report)
    assert not any(forked_workers.alive(pid) for pid in running.pids.values())


def test_the_last_node_of_a_graph_that_hangs_is_found_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fakes.vector_loop(2, train_s=600)
    with (
        forked_workers.job(graph, DEADLINE_S) as running,
        pytest.raises(ChannelTimeout, match="worker 'policy' has been running node 'update'") as raised,
    ):
        list(running.steps(1))
    report_of(raised.value)


@pytest.mark.stage("kills")
@pytest.mark.parametrize(
    ("dispatch", "worker"), [("forked", "prompts"), pytest.param("compiled_graph", "generator", marks=pytest.mark.ray)]
)
@pytest.mark.usefixtures("ray_unless_forked")
def test_a_stopped_process_is_named_as_stopped_soon_after_the_deadline(dispatch: str, worker: str) -> None:
    graph = fakes.vector_loop(1, generate_s=0.05)
    with Job(graph, compile_plan(graph, Cluster(cpus=2)), dispatch_name=dispatch, deadline_s=DEADLINE_S) as running:
        steps = running.steps(1000)
        next(steps)
        since = time.monotonic()
        os.kill(running.pids[worker], signal.SIGSTOP)
        with pytest.raises(ChannelTimeout, match=rf"^worker '{worker}' is stopped: .*it has been .*step \d+") as raised:
            list(steps)
        took = time.monotonic() - since
        pids = list(running.pids.values())
    assert f"worker '{worker}'\n(its process is stopped)" in report_of(raised.value)
    assert DEADLINE_S <= took < DEADLINE_S + 30  # the end of its workers included, on a busy machine
    assert not any(forked_workers.alive(pid) for pid in pids)


def go_on_once_warned(pid: int, caplog: pytest.LogCaptureFixture) -> None:
    until = time.monotonic() + 40
    while "is stopped" not in caplog.text and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(pid, signal.SIGCONT)


def test_a_process_that_goes_on_before_the_deadline_is_warned_about_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rlgraph.watchdog"), forked_workers.job(fakes.vector_loop(1, generate_s=0.05), 60) as running:
        steps = running.steps(20)
        next(steps)
        os.kill(running.pids["generator"], signal.SIGSTOP)
        warned = threading.Thread(target=go_on_once_warned, args=(running.pids["generator"], caplog), daemon=True)
        warned.start()
        assert len(list(steps)) == 19
    assert "worker 'generator' is stopped; resume it with `kill -CONT`" in caplog.text


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *(("deadlock", "update"), ("holds the interpreter", "score"), ("deadlock", "load"), ("stopped", "publish")),
        *(("full channel", "update"), ("full channel", "load"), ("broken socket", "rollout"), ("wrong rows", "score")),
    ],
)
def test_the_first_line_names_the_culprit_and_no_bystander(tmp_path: Path, kind: str, stage: str) -> None:
    fault = faults.Fault(kind, stage, 3, str(tmp_path / "clock"))
    with forked_workers.job(faults.graph(fault), DEADLINE_S) as running, pytest.raises(RlgraphError) as raised:
        list(running.steps(10))
    first = str(raised.value).splitlines()[0]
    assert f"'{fault.worker}'" in first or f"'{fault.node}'" in first, first
    if kind not in ("broken socket", "wrong rows"):
        assert first.startswith(f"worker '{fault.worker}' ")
        report_of(raised.value)
    elif kind == "broken socket":
        report_of(raised.value)


def test_who_works_for_too_long_is_ended_and_not_who_began_to_wait_for_it_before() -> None:
    waits, works = Activity("take", "update", "score"), Activity("fire", "score")
    states = {"policy": Heartbeat(2, waits, DEADLINE_S + 1), "score": Heartbeat(2, works, 1)}
    watchdog = Watchdog(compile_plan(fakes.vector_loop(1), Cluster(cpus=2)), DEADLINE_S, lambda: states, lambda workers: {})
    watchdog.look(["policy", "score"], time.monotonic(), DEADLINE_S)
    states["score"] = Heartbeat(2, works, DEADLINE_S + 1)
    with pytest.raises(ChannelTimeout, match=r"^worker 'score'"):
        watchdog.look(["policy", "score"], time.monotonic(), DEADLINE_S)


def test_who_waits_is_followed_to_who_works() -> None:
    plan = compile_plan(fakes.vector_loop(1), Cluster(cpus=2))
    states = {
        "policy": Heartbeat(2, Activity("take", "update", "score"), 9),
        "score": Heartbeat(2, Activity("take", "score", "rollout"), 8),
        "generator": Heartbeat(2, Activity("receive", "rollout", "weights", 1), 7),
        "prompts": Heartbeat(5, Activity("put", "prompts", "prompts"), 6),
    }
    assert culprit(plan, states, "policy", {}) is None  # they wait for one another
    states["generator"] = Heartbeat(2, Activity("fire", "rollout"), 5)
    assert [culprit(plan, states, worker, {}) for worker in states] == [Culprit("generator")] * 4
    states["prompts"] = Heartbeat(2, Activity("fire", "prompts"), 30)  # which nobody waits for
    assert culprit(plan, states, "policy", {}) == Culprit("generator")


def test_a_node_whose_name_reads_like_a_message_is_followed_like_any_other() -> None:
    def scored(batch: Columns) -> dict[str, Column]:
        return fakes.score.function(batch)

    scored.__name__ = name = "score' (written by node 'update'), (read by ['prompts'"
    plan = compile_plan(fakes.vector_loop(1, middle=node(reads="values group_ids", writes="rewards")(scored)), Cluster(cpus=2))
    [worker] = plan.node(name).workers
    states = {"policy": Heartbeat(2, Activity("take", "update", name), 9), worker: Heartbeat(2, Activity("fire", name), 8)}
    assert culprit(plan, states, "policy", {}) == Culprit(worker)
    states[worker] = Heartbeat(2, Activity("receive", name, "weights", 1), 8)
    states["prompts"] = Heartbeat(2, Activity("put", "prompts", "prompts"), 7)
    assert culprit(plan, states, "prompts", {}) is None  # they wait for one another, and nobody is accused by his name


def test_a_broken_channel_says_as_values_which_it_is_and_which_process_was_at_its_other_end(tmp_path: Path) -> None:
    address = str(tmp_path / "rollout")
    writer = HostWriter("rollout", 1, 1, b"key", address)
    reader = HostReader("rollout", b"key", address, 20)
    reader.fail("enough")
    with pytest.raises(ChannelBroken) as raised:
        writer.put(0, {"values": torch.zeros(1)}, 20)
    writer.close()
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.channel, error.peer) == ("rollout", os.getpid())
    told = messages.Failure("score", 0, "score", "ChannelBroken", "whatever it says", "", error.channel, error.peer)
    assert find_disconnected([told], {"generator": os.getpid(), "score": 1}) == Cut(("generator", "score"), ("rollout",))
    assert (
        find_disconnected(
            [messages.Failure("score", 0, "score", "ChannelBroken", f"channel 'x', (process {os.getpid()})", "")], {"score": 1}
        )
        is None
    )


@node(reads="values group_ids", writes="rewards")
def slow_at_six(batch: Columns) -> dict[str, Column]:
    slow_at_six.function.fired = getattr(slow_at_six.function, "fired", 0) + 1  # type: ignore[attr-defined]
    if slow_at_six.function.fired == 6:  # type: ignore[attr-defined]
        threading.Event().wait(4)
    return fakes.score.function(batch)


def test_a_slow_node_is_warned_about_long_before_the_deadline_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rlgraph.watchdog"), forked_workers.job(fakes.vector_loop(1, middle=slow_at_six), 60) as running:
        assert len(list(running.steps(8))) == 8
    [warning] = [record.getMessage() for record in caplog.records if record.name == "rlgraph.watchdog"]
    assert re.match(r"'slow_at_six' in worker 'slow_at_six' has been at step 5 for \d\.\d s, its median is \d\.\d\d s; at 60 s", warning)


def test_a_rollout_in_chunks_is_as_slow_as_its_longest_chunk(caplog: pytest.LogCaptureFixture) -> None:
    plan = compile_plan(fakes.vector_loop(1, count=8, chunks=2), Cluster(cpus=2))
    states = {"generator": Heartbeat(9, Activity("fire", "rollout"), 9.0)}
    watchdog = Watchdog(plan, 600.0, lambda: states, lambda workers: {})
    for step in range(4):
        spans = [Span(f"rollout {chunk}/2", "fire", step, "generator", 0.0, (8.0, 0.0)[chunk - 1]) for chunk in (1, 2)]
        watchdog.note(messages.Report("generator", step, {}, spans, [], [], 0))
    watchdog.look(["generator"], time.monotonic(), 600.0)
    assert not caplog.records
    states["generator"] = Heartbeat(9, Activity("fire", "rollout"), 41.0)
    watchdog.look(["generator"], time.monotonic() - 41, 600.0)
    assert "its median is 8.00 s" in caplog.text


def be_asked(folder: Path) -> None:
    offer_stacks(str(folder), "me")
    (folder / "ready").touch()
    threading.Event().wait(120)


def test_stacks_are_those_of_the_process_asked(tmp_path: Path) -> None:
    asked = forked_workers.server.Process(target=be_asked, args=(tmp_path,))  # this process may have more threads than are told
    asked.start()
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < until:
            time.sleep(0.02)
        found = read_stacks(str(tmp_path), {"me": asked.pid, "nobody": os.getpid()})
    finally:
        asked.kill()
        asked.join()
    assert "be_asked" in found["me"]
    assert found["nobody"] == "(it has not begun)"


class Dies:
    """A value that ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_worker_that_dies_before_it_connects_is_named_at_once() -> None:
    graph = fakes.vector_loop(0)
    object.__setattr__(graph.node("score").operation, "function", Dies())
    since = time.monotonic()
    with pytest.raises(WorkerDied, match="worker 'score' could not be started"), forked_workers.job(graph, 60):
        pass
    assert time.monotonic() - since < 40  # the deadline is 60


def test_a_worker_that_does_not_come_up_is_named_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    create = forked_workers.Forked.create
    monkeypatch.setattr(group_module, "START_LEAST_S", 0.0)

    def all_but_one(self, spec, driver, host=""):  # type: ignore[no-untyped-def]
        return create(self, spec, driver if spec.worker.name != "policy" else "/nowhere")

    monkeypatch.setattr(forked_workers.Forked, "create", all_but_one)
    with pytest.raises((ChannelTimeout, WorkerDied), match="'policy'"), forked_workers.job(fakes.vector_loop(0), DEADLINE_S):
        pass


def group_of(tmp_path: Path) -> tuple[WorkerGroup, socket.socket, str]:
    group = WorkerGroup(compile_plan(fakes.vector_loop(0), Cluster(cpus=2)), DEADLINE_S)
    address = str(tmp_path / "driver")
    listener = listen("driver", address, 8)
    group.welcome(listener, b"key", Hosts(str(tmp_path), (LocalHostAgent(str(tmp_path)),), (), {}))
    return group, listener, address


def test_the_end_of_ray_is_named_before_the_workers_that_end_with_it() -> None:
    group = WorkerGroup(compile_plan(fakes.vector_loop(0), Cluster(cpus=2)), DEADLINE_S, lambda hosts: "Ray's raylet on this host ended")
    with pytest.raises(DispatchError, match=r"Ray's raylet on this host ended\n.*look at this log and at memory"):
        group.reports(0)
    group._dead["policy"] = ""
    assert isinstance(group.explanation(), DispatchError)
    assert group.did() is None


def test_strangers_at_the_drivers_door_are_not_let_in_and_do_not_stop_it(tmp_path: Path) -> None:
    group, listener, address = group_of(tmp_path)
    for noise in (b"", b"x" * 500, b"\0" * 32):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address)
            stranger.sendall(noise)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        connection = Connection(sock, b"key", 20, server=False)
        messages.send(connection, messages.Hello("nobody", 1))  # knows the key, but is no worker of the plan
        with pytest.raises(EOFError):
            messages.receive(connection)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        connection = Connection(sock, b"key", 20, server=False)
        messages.send(connection, messages.Hello("policy", os.getpid()))
        messages.send(connection, messages.Opened("policy", {"a": "b"}))
        with pytest.raises(ChannelTimeout):
            group.until_open(lambda missing: group.watchdog.look(["policy"], 0, 1) if len(missing) == 3 else None)
        assert list(group.connections) == ["policy"]
    listener.close()


def test_a_worker_that_sends_nonsense_is_named(tmp_path: Path) -> None:
    group, listener, address = group_of(tmp_path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        connection = Connection(sock, b"key", 20, server=False)
        messages.send(connection, messages.Hello("policy", os.getpid()))
        connection.send(b"\x93nonsense")
        with pytest.raises(WorkerDied, match=r"worker 'policy' .* died before its first step; .*carried bytes that are not a message"):
            group.until_open(lambda missing: None)
    listener.close()


@node(reads="values group_ids", writes="rewards")
def tensor_metric(batch: Columns) -> tuple[dict[str, Column], dict[str, float]]:
    return {"rewards": batch["values"].mean(-1)}, {"loss": batch["values"].mean()}  # type: ignore[dict-item,union-attr]


def test_a_metric_that_is_no_number_is_named_at_once() -> None:
    message = r"node 'tensor_metric' failed at step 0 .* returned the metric 'loss' as Tensor; .* return value\.item\(\)"
    with forked_workers.job(fakes.vector_loop(1, middle=tensor_metric)) as running, pytest.raises(NodeError, match=message):
        list(running.steps(2))


@dataclass(frozen=True)
class Collective(Operation):
    """A trainer whose ranks meet in a collective at each step; at step 2 the last of them does not come."""

    act: str

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="train")

    def start(self, context: Context) -> Stage:
        dist.init_process_group("gloo", init_method=context.rendezvous, rank=context.rank, world_size=context.world)
        vector = context.engine.vector
        begin = context.rank * (len(vector) // context.world)
        own = WeightShard("vector", tuple(vector.shape), (begin,), vector.chunk(context.world)[context.rank])
        context.engine.weight_shards = lambda: iter([own])

        def fire(step: int, columns: Columns) -> Fired:
            if step == 2 and context.rank == context.world - 1:
                if self.act == "raises":
                    raise ValueError("rank 1 has had enough")
                if self.act == "leaves":  # and dies when its peer has failed and said so
                    dist.destroy_process_group()
                    time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
            return {}, {"loss": 0.0}

        return fire


@pytest.mark.parametrize(("act", "error"), [("raises", NodeError), ("dies", WorkerDied), ("leaves", WorkerDied)])
def test_a_rank_that_leaves_its_peers_in_a_collective_ends_the_job_at_once(act: str, error: type[Exception]) -> None:
    graph = fakes.vector_loop(1)
    update = graph.node("update")
    object.__setattr__(update, "operation", Collective(act))
    object.__setattr__(update.model, "count", 2)
    with forked_workers.job(graph) as running:
        steps = running.steps(10)
        assert next(steps).index == 0
        since = time.monotonic()
        with pytest.raises(error, match=r"worker 'policy\[1\]'"):  # after step 1, whose report may come later than the failure
            list(steps)
    assert time.monotonic() - since < 30  # the deadline is 60


def test_the_key_of_a_job_is_in_no_text() -> None:
    plan = compile_plan(fakes.vector_loop(1), Cluster(cpus=2))
    [spec, *_] = worker_specs(fakes.vector_loop(1), plan, "/tmp/x", b"the secret key", 1.0)
    assert "secret" not in repr(spec)
