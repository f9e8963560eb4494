"""A job whose batches and weights go through Ray's own channels gives the oracle's bits, and a place without Ray is refused."""

import os
import re
import signal
from pathlib import Path

import pytest
from support import fakes, forked_workers

import rlgraph as rg
from rlgraph.errors import NodeError, PlanError, WorkerDied
from rlgraph.graph.graph import Graph
from rlgraph.plan.channels import with_transport
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step


def bits(step: Step) -> tuple[int, float, float, int]:
    return step.index, step.metrics["loss"], step.metrics["weight"], step.staleness


def job(graph: Graph) -> Job:
    plan = with_transport(compile_plan(graph, Cluster(cpus=2)), "ray")
    assert {end.transport for end in plan.loops} == {"ray"}
    return Job(graph, plan, dispatch_name="compiled_graph", deadline_s=60.0)


@pytest.mark.stage("jobs")
@pytest.mark.ray
@pytest.mark.usefixtures("ray_here")
def test_bits_are_those_of_the_oracle() -> None:
    with job(fakes.vector_loop(2, buffers=2, ranks=2)) as running:
        found = [bits(step) for step in running.steps(6)]
    graph = fakes.vector_loop(2, buffers=2)
    with LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) as here:
        assert found == [bits(step) for step in here.steps(6)]


@pytest.mark.stage("jobs")
@pytest.mark.ray
@pytest.mark.usefixtures("ray_here")
def test_a_killed_writer_is_named_at_once_though_ray_tells_its_readers_nothing() -> None:
    with job(fakes.vector_loop(1, generate_s=0.05)) as running:
        steps = running.steps(1000)
        next(steps)
        pids, folder = set(running.pids.values()), running.session.folder
        os.kill(running.pids["generator"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="worker 'generator'"):
            list(steps)
    assert forked_workers.traces(folder, pids) == []


def test_workers_that_are_none_of_rays_are_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fakes.vector_loop(1)
    plan = with_transport(compile_plan(graph, Cluster(cpus=2)), "ray")
    monkeypatch.setattr(forked_workers, "compile_plan", lambda *given, **more: plan)
    with (
        pytest.raises(NodeError, match=r"before the first step.* has transport 'ray', and this process is not a worker of a Ray"),
        forked_workers.job(graph),
    ):
        pass


def test_a_transport_that_is_not_offered_is_refused() -> None:
    plan = rg.compile(fakes.vector_loop(1), Cluster(cpus=2))
    with pytest.raises(PlanError, match=r"transport='tcp': a launch chooses one of \['shm', 'ray'\]"):
        plan.launch(transport="tcp")


def test_rays_channels_between_hosts_are_refused() -> None:
    plan = compile_plan(fakes.vector_loop(1), Cluster(cpus=4, hosts=2))
    assert any(loop.transport == "tcp" for loop in plan.loops)
    with pytest.raises(PlanError, match=r"transport='ray' and 2 hosts: .* can hang; compile for one host"):
        with_transport(plan, "ray")


def test_rays_channels_between_gpus_are_refused() -> None:
    plan = compile_plan(fakes.vector_loop(1), Cluster(gpus=2))
    with pytest.raises(PlanError, match="transport='ray': 'weights' goes from GPU to GPU by transport 'peer'"):
        with_transport(plan, "ray")


def test_shared_memory_may_be_said_and_is_what_a_plan_takes_by_itself() -> None:
    plan = compile_plan(fakes.vector_loop(1), Cluster(cpus=2))
    assert with_transport(plan, "shm") == plan


class Teller:
    """An actor that says what it was fired for."""

    def fire(self, node: str, step: int, *batches: str) -> str:
        return f"{node}{step}({' '.join(batches)})"


@pytest.mark.stage("jobs")
@pytest.mark.ray
@pytest.mark.usefixtures("ray_here")
def test_the_forward_graph_runs_as_a_graph_of_ray_and_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    plan = rg.compile(fakes.vector_loop(1, ranks=2), Cluster(cpus=2))
    actors = {worker.name: ray.remote(Teller).options(num_cpus=0).remote() for worker in plan.workers}
    compiled = plan.ray_dag(actors).experimental_compile()
    try:
        rollouts = "rollout3(prompts3()) rollout3(prompts3())"  # one of each rank
        assert ray.get(compiled.execute(3), timeout=60) == [f"update3({rollouts} score3({rollouts}))"]
        rg.api.draw_ray(compiled, tmp_path / "graph.mmd")
        drawn = (tmp_path / "graph.mmd").read_text()
        names = dict(re.findall(r'(t\d+)\["(\w+)"\]', drawn))
        assert sorted(names.values()) == ["InputNode", "MultiOutputNode", "prompts", "rollout", "rollout", "score", "update"]
        edges = [(names[source], names[reader]) for source, reader in re.findall(r"(t\d+) --> (t\d+)", drawn)]
        assert edges.count(("rollout", "update")) == edges.count(("rollout", "score")) == 2  # the first skips the stage of the reward
        assert ("score", "update") in edges
        assert ("update", "MultiOutputNode") in edges
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(
            PlanError, match=r"graph.svg'\): .svg needs .*the program `dot` \(apt install graphviz\); .* end the name in .mmd"
        ):
            rg.api.draw_ray(compiled, tmp_path / "graph.svg")
        monkeypatch.undo()
    finally:
        compiled.teardown(kill_actors=True)


def test_an_ending_that_nothing_draws_is_refused() -> None:
    with pytest.raises(PlanError, match=r"draw_ray\('graph.txt'\): a graph of Ray is drawn as .mmd, .svg, .png, .pdf"):
        rg.api.draw_ray(None, "graph.txt")


def test_a_graph_of_ray_wants_an_actor_for_each_worker_and_its_method() -> None:
    plan = rg.compile(fakes.vector_loop(1), Cluster(cpus=2))
    with pytest.raises(PlanError, match=r"workers \['prompts', 'generator', 'score', 'policy'\] have no actor"):
        plan.ray_dag({})
    with pytest.raises(PlanError, match=r"the actors of \['prompts', .*\] have no method fire\(node, step, \*batches\)"):
        plan.ray_dag({worker.name: object() for worker in plan.workers})
