"""How far a step is: what nodes count reaches the driver, and a person sees it at once, also where the output is no terminal."""

import io
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support import fakes
from support.forked_workers import job as forked_job  # noqa: F401, makes the dispatch known
from support.grpo import grpo_graph
from support.tiny import tiny_llama

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.graph.nodes import Operation, Output, declare
from rlgraph.nodes.base import Context, Stage
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.worker.activity import (
    WORKS,
    Activity,
    Heartbeat,
    StatusWriter,
    event_name,
    read_status,
    status_path,
    under_way,
)


def test_what_is_counted_is_read_until_something_else_begins(tmp_path: Path) -> None:
    status = StatusWriter(status_path(str(tmp_path), "generator"))
    assert read_status(str(tmp_path), "generator") is None
    status.enter(3, Activity("fire", "rollout"))
    status.count(34, 128, "responses")
    found = read_status(str(tmp_path), "generator")
    assert found is not None
    assert str(found).startswith("running node 'rollout' (34 of 128 responses), step 3, for ")
    loading = Activity("load", "über den Rand", "the policy's weights to it", 1 << 40)
    status.enter(4, loading)
    again = read_status(str(tmp_path), "generator")
    assert again is not None
    assert (again.step, again.activity, again.total, again.unit) == (4, loading, 0, "")
    status.enter(5, Activity("fire", "ü" * 200))  # longer than there is room for: cut, and nothing beside it touched
    longest = read_status(str(tmp_path), "generator")
    assert longest is not None
    assert longest.activity == Activity("fire", "ü" * 127 + "\ufffd")
    assert read_status(str(tmp_path), "nobody") is None


def test_ranks_are_counted_together_and_waits_left_out() -> None:
    plan = compile_plan(fakes.vector_loop(0), rg.Cluster(cpus=2))
    states = {
        "generator[0]": Heartbeat(1, Activity("fire", "rollout"), 2.0, 3, 8, "responses"),
        "generator[1]": Heartbeat(1, Activity("fire", "rollout"), 2.0, 5, 8, "responses"),
        "policy": Heartbeat(0, Activity("fire", "update"), 1.0, 1, 6, "micro-batches"),
        "score": Heartbeat(0, Activity("take", "score", "rollout"), 1.0),
    }
    assert under_way(states, plan) == "rollout 8 of 16 responses, update 1 of 6 micro-batches"
    assert under_way({"policy": Heartbeat(0, Activity("fire", "update"), 1.0)}, plan) == "update"
    assert under_way({"policy": Heartbeat(0, Activity("publish", "update", "weights", 1), 1.0)}, plan) == "publish weights"
    assert under_way({}, plan) == ""


def test_what_works_has_the_name_of_its_event() -> None:
    plan = compile_plan(fakes.vector_loop(1), rg.Cluster(cpus=2))
    for event in plan.schedule.events:
        if event.kind in WORKS:
            assert event_name(Activity(event.kind, event.node, event.edge), plan) == event.name  # type: ignore[arg-type]


@dataclass(frozen=True)
class Counting(Operation):
    """Scores one response after another, and says so."""

    seconds: float

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Columns:
            values = columns["values"]
            assert isinstance(values, torch.Tensor)
            for row in range(len(values)):
                context.report_progress(row, len(values), "responses")
                time.sleep(self.seconds / len(values))
            return {"rewards": values.mean(-1)}

        return fire


def counting(seconds: float) -> Callable[[Output], Output]:
    return lambda rollout: Output(declare("rewards", Counting(seconds), (rollout,), reads=("values",), writes=("rewards",)))


def job(graph: rg.Graph) -> Job:
    return Job(graph, rg.compile(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=60.0)


def test_lines_say_within_a_step_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.modules["rlgraph.record"], "LINE_S", 0.1)
    with job(fakes.vector_loop(0, middle=counting(0.8))) as running:
        list(rg.record(running, 2, tmp_path))
    out, err = capsys.readouterr()
    lines = out.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("step 1/2  staleness")))
    counts = [int(found[1]) for line in lines[:first] if (found := re.fullmatch(r"step 1/2  rewards (\d) of 4 responses", line))]
    assert len(counts) > 2
    assert counts == sorted(counts)
    assert any(line.startswith("step 2/2  rewards ") for line in lines[first:])
    assert re.search(r"starting workers: .*generator.*\nall workers are ready after \d+ s\n", err)


def test_what_was_printed_is_seen_before_a_start_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as seen, os.fdopen(writing, "wb") as raw:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw.raw, 1 << 16)))  # as of a program whose output is piped
        print("the plan")
        running = job(fakes.vector_loop(0))
        monkeypatch.setattr(running, "_start", lambda: pytest.fail("started") if seen.read1() != b"the plan\n" else None)
        running.__enter__()
        running.close()


def test_rollouts_count_responses_and_updates_micro_batches(tmp_path: Path) -> None:
    folder = str(tiny_llama(tmp_path))
    sampling = rg.Sampling(max_tokens=6)
    generator = rg.Generator(folder, pool=rg.Pool("rollout"), sampling=sampling, engine="transformers", max_context=64)
    policy = rg.Policy(folder, pool=rg.Pool("train"), micro_batch_tokens=32)
    graph = grpo_graph(
        generator, policy, [{"prompt": f"{i} + 1 ="} for i in range(4)], name="counts", reward=lengths, count=2, group_size=4, depth=0
    )
    found: dict[str, list[tuple[int, int, str]]] = {"generator": [], "policy": []}
    with rg.compile(graph, rg.Cluster(cpus=2)).run_here() as running:
        for name, counts in found.items():
            running.progress[name].worker.context.report_progress = lambda *count, counts=counts: counts.append(count)
        list(running.steps(1))
    assert found["generator"][0] == (0, 8, "responses")
    assert found["generator"][-1] == (8, 8, "responses")
    passes = found["policy"][-1][1]
    assert passes > 1
    assert found["policy"] == [(done, passes, "micro-batches") for done in range(passes + 1)]


def lengths(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]
