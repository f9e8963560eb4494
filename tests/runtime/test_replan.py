"""A run that changes its plan on its way: its steps are those of a run that was stopped and resumed with the other plan."""

import os
import re
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support import digests, forked_workers
from support.digests import ITEMS, clockless_metrics, odd_tokens
from support.simulated_stages import Loop, Times

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import PlanError
from rlgraph.plan.plan import Replan
from rlgraph.plan.replan import Replanner
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.driver.hosts import FoundHosts
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def job(plan: rg.Plan, folder: Path, **options: Any) -> Job:
    assert isinstance(plan.source, rg.Graph)
    options = {"dispatch_name": "forked", "deadline_s": 60.0, "recovery": Recovery(folder, 100, 2)} | options
    return Job(plan.source, plan, **options)


def trained_on(model: str, ranks: int, depth: int = 1) -> rg.Plan:
    return digests.plan(digests.digest_loop(model, depth=depth, ranks=ranks, max_tokens=4))


class Unloadable(rg.Reference):
    """A model that no worker can load."""

    def load(self, context: Any) -> Any:
        raise MemoryError("no room for it")


def graph(model: str, kind: type[rg.Reference]) -> rg.Graph:
    prompts = rg.prompts(ITEMS, count=4, seed=3)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=rg.Sampling(max_tokens=4), dtype="float32")
    rollout = generator.rollout(prompts)
    return rg.Graph("scored", kind(model, pool=rg.Pool("reference"), dtype="float32").log_probs(rollout), odd_tokens(rollout))


def test_a_changed_plan_continues_in_every_bit_as_a_run_that_was_stopped_and_resumed(model: str, tmp_path: Path) -> None:
    one, two = (trained_on(model, ranks, depth=2) for ranks in (1, 2))
    found, expected = [], []
    with job(one, tmp_path / "changed") as running:
        for step in running.steps(8):
            found.append(clockless_metrics(step))
            if step.index == 1:
                running.replan(two)
        run = running.run()
    assert (len(run.earlier) + len(run.steps), run.plan, len(running.pids)) == (8, two.values, len(one.workers) + 1)
    for plan, last in ((one, len(run.earlier)), (two, 8)):
        with job(plan, tmp_path / "resumed") as running:
            expected += [clockless_metrics(step) for step in running.steps(last)]
    assert found == expected


def test_a_plan_that_cannot_start_leaves_the_run_under_the_plan_before(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = (graph(model, kind) for kind in (rg.Reference, Unloadable))
    with job(digests.plan(good), tmp_path) as running:
        running.replan(digests.plan(bad))
        found = [clockless_metrics(step) for step in running.steps(4)]
    assert found == digests.run_here(good, 4)
    assert "these workers could not start, so the run continues under the plan before" in capfd.readouterr().err


def test_a_change_whose_checkpoint_cannot_be_written_leaves_the_plan_as_it_is(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(checkpoints: Checkpoints, step: int, shards: object) -> None:
        raise OSError(28, "No space left on device")

    good = graph(model, rg.Reference)
    with job(digests.plan(good), tmp_path) as running, monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_complete", full)
        steps = running.steps(40)
        found = [clockless_metrics(next(steps))]
        running.replan(digests.plan(graph(model, rg.Reference)))
        found += map(clockless_metrics, islice(steps, 20))
        patched.undo()
    assert found == digests.run_here(good, 21)
    assert "the plan stays as it is" in capfd.readouterr().err


def test_a_run_with_long_rollouts_gives_its_generator_a_device_of_the_trainer(tmp_path: Path) -> None:
    loop = Loop(generators=1, trainers=2, times=Times(step_s=1e-4, sequence_s=2e-4, train_token_s=1e-5))
    other = replace(loop, generators=2, trainers=1).graph()
    looks = Replanner(Replan(every=8, gain=0.1, graphs=(other,)), lambda graph: {})
    with job(rg.compile(loop.graph(), rg.Cluster(cpus=3)), tmp_path, replanner=looks) as running:
        found, after = list[Any](), 0
        for step in islice(running.steps(5000), 100):  # a look at the plan takes seconds on a loaded machine
            found.append((step.metrics["tokens"], step.staleness))
            after += running.plan.source is other
            if after == 5:
                break
        assert running.plan.source is other
        assert re.match(r"after step \d+, rollout 1, train 2 -> rollout 2, train 1: predicted ", running.notices[-1])
    with digests.plan(replace(loop, trainers=1, times=Times(0.0, 0.0, 0.0, 0.0, 0.0)).graph()).run_here() as here:
        assert found == [(step.metrics["tokens"], step.staleness) for step in here.steps(len(found))]


def test_a_source_that_waits_for_older_steps_to_be_saved_costs_no_more_than_its_work(tmp_path: Path) -> None:
    slow = Times(start_s=0.1, step_s=0.0, sequence_s=0.0, train_start_s=0.1, train_token_s=0.0)
    with job(rg.compile(Loop(times=slow).graph(), rg.Cluster(cpus=2)), tmp_path) as running:
        assert len(list(running.steps(10))) == 10
        costs = running.costs()
    assert costs.cost_of("prompts").serial_s < 0.5 * costs.cost_of("update").serial_s


class Elastic(forked_workers.Forked):
    """Workers of `there` hosts of two cores."""

    there = 2

    def hosts(self, plan: rg.Plan, patience_s: float = 0.0) -> FoundHosts:
        if plan.cluster.hosts > Elastic.there:
            raise PlanError(f"only {Elastic.there} hosts")
        return super().hosts(plan, patience_s)

    def devices(self) -> rg.Cluster:
        return rg.Cluster(cpus=2 * Elastic.there, hosts=Elastic.there)


def test_a_run_continues_on_the_hosts_that_are_left_and_uses_one_that_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISPATCHES, "elastic", Elastic)
    monkeypatch.setattr(Elastic, "there", 2)
    large = Loop(generators=2, trainers=2, times=Times(step_s=1e-4, sequence_s=2e-4, train_token_s=1e-4))
    small = replace(large, generators=1, trainers=1).graph()
    looks = Replanner(Replan(every=8, graphs=(small,)), lambda graph: {})
    found, cores = list[Any](), list[int]()
    with job(
        rg.compile(large.graph(), Elastic().devices()),
        tmp_path,
        dispatch_name="elastic",
        recovery=Recovery(tmp_path, 4, 2, restarts=1),
        replanner=looks,
    ) as running:
        for step in islice(running.steps(5000), 100):
            found.append((step.metrics["tokens"], step.staleness))
            cores += [running.plan.cluster.cpus] if cores[-1:] != [running.plan.cluster.cpus] else []
            if step.index == 5:
                Elastic.there = 1
                os.kill(running.pids["policy[1]"], signal.SIGKILL)
            if cores == [4, 2]:
                Elastic.there = 2
            if len(cores) == 3:
                break
    assert cores == [4, 2, 4]
    assert re.match(r"after step \d+, with 1 of 2 hosts left: rollout 2, train 2 -> rollout 1, train 1", running.notices[0])
    with digests.plan(replace(large, generators=1, trainers=1, times=Times(0.0, 0.0, 0.0, 0.0, 0.0)).graph()).run_here() as here:
        assert found == [(step.metrics["tokens"], step.staleness) for step in here.steps(len(found))]


def test_a_plan_of_other_nodes_or_a_job_without_checkpoints_is_refused(model: str, tmp_path: Path) -> None:
    plan = trained_on(model, 1)
    with job(plan, tmp_path) as running, pytest.raises(PlanError, match="'weights' 'depth' was 1 and is 2; only pools"):
        running.replan(trained_on(model, 1, depth=2))
    with pytest.raises(PlanError, match="pass checkpoint='folder' too"):
        plan.launch(replan=rg.planning.Replan())
    fixed = digests.digest_loop(model, ranks=1)
    with pytest.raises(PlanError, match="one way to divide"):
        digests.plan(fixed).launch(replan=rg.planning.Replan(), checkpoint=tmp_path / "other")
