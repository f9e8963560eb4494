"""Adapters of one folder that are trained side by side in one pool: each has the bits that it has alone, also after a checkpoint."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.base_holders import mapped_bytes
from support import forked_workers
from support.adapter_loops import LORAS, NAMES, loops, small_tokens

import rlgraph as rg
from rlgraph.engines.lora import BaseWeights, read_adapter
from rlgraph.errors import ExportError, GraphError
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step

pytestmark = pytest.mark.stage("jobs")

STEPS = 4  # checkpoints are of steps 2 and 4
Found = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from support.tiny import tiny_llama

    return str(tiny_llama(tmp_path_factory.mktemp("models")))


def job_of(graph: rg.Graph, folder: Path) -> LocalJob:
    planned = rg.compile(graph, rg.Cluster(cpus=4))
    return LocalJob(graph, planned, Checkpoints(graph, planned, Recovery(folder, 2, 2)))


def engine(job: LocalJob, worker: str) -> Any:
    return job.progress[worker].worker.context.engine


def held(job: LocalJob, worker: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine(job, worker).weights().items()}


def worker_of(job: LocalJob, node: str) -> str:
    """The worker that runs a node."""
    return next(worker.name for worker in job.plan.workers if node in worker.nodes)


def learnt(steps: Iterable[Step], name: str) -> list[dict[str, float]]:
    """The metrics of one loop, without the node's name, which a graph of one loop leaves out."""
    found = []
    for step in steps:
        own = {key.removeprefix(f"{name} update/").removeprefix(f"{name} critic/"): value for key, value in step.metrics.items()}
        kinds = {key: value for key, value in own.items() if key.startswith(("actor/", "critic/"))}
        assert kinds
        found.append(kinds)
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def sampled(job: LocalJob, name: str) -> dict[str, torch.Tensor]:
    """The weights of the generator of a loop."""
    return {key: tensor.clone() for key, tensor in engine(job, worker_of(job, f"{name} rollout"))._model.named_parameters()}


def ended(job: LocalJob, names: Sequence[str], exports: Path) -> Found:
    """What the models of each loop hold: what was trained, what its generator has of it, and PEFT's folder."""
    found: Found = {}
    for name in names:
        policy = worker_of(job, f"{name} update")
        job.export(exports / name, dtype="float32", policy=policy, adapter="apart")
        found[name] = {"trained": held(job, policy), "sampled": sampled(job, name), "apart": read_adapter(exports / name)}
        if any(f"{name} critic" in worker.nodes for worker in job.plan.workers):
            found[name]["critic"] = held(job, worker_of(job, f"{name} critic"))
    return found


def whole_run(graph: rg.Graph, names: Sequence[str], folder: Path) -> Found:
    with job_of(graph, folder) as job:
        steps = list(job.steps(STEPS))
        found = ended(job, names, folder / "exports")
    return {name: {**found[name], "learnt": learnt(steps, name)} for name in names}


def pair(graphs: Callable[[Sequence[str]], rg.Graph], folder: Path) -> tuple[Found, Found]:
    """Run both loops together, and each alone."""
    alone: Found = {}
    for name in NAMES:
        alone |= whole_run(graphs([name]), [name], folder / name)
    return whole_run(graphs(NAMES), NAMES, folder / "together"), alone


def check(found: Found, expected: Found) -> None:
    assert found["learnt"] == expected["learnt"]
    assert found.keys() == expected.keys()
    for what in found.keys() - {"learnt"}:
        assert equal(found[what], expected[what]), what


CASES: dict[str, dict[str, Any]] = {
    "two policies and two critics": {"critic": True},
    "two policies that time-share with their generators": {"rollouts": "turns", "depth": 0},
}


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found, Path, dict[str, Any]]:
    folder, given = tmp_path_factory.mktemp("runs"), CASES[request.param]
    return *pair(lambda names: loops(model, names, **given), folder), folder, given


def test_adapters_of_one_pool_have_the_bits_that_each_has_alone(runs: tuple[Found, Found, Path, dict[str, Any]], model: str) -> None:
    together, alone, *_ = runs
    for name in NAMES:
        check(together[name], alone[name])
        assert equal(together[name]["apart"], together[name]["trained"])
        assert {len(tensor) for key, tensor in together[name]["trained"].items() if key.endswith("lora_A.weight")} == {LORAS[name].rank}
    left, right = (together[name]["sampled"] for name in NAMES)
    assert not torch.equal(left["model.layers.0.mlp.down_proj.weight"], right["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(right["model.layers.0.mlp.up_proj.weight"], BaseWeights(model)["model.layers.0.mlp.up_proj.weight"])  # no target


def test_adapters_of_one_pool_go_on_from_a_checkpoint_with_the_same_bits(
    runs: tuple[Found, Found, Path, dict[str, Any]], model: str, tmp_path: Path
) -> None:
    _, alone, folder, given = runs
    with job_of(loops(model, **given), tmp_path) as job:
        first = list(job.steps(2))
    with job_of(loops(model, **given), tmp_path) as job:
        second = list(job.steps(STEPS))  # of which the checkpoint has two
        found = ended(job, NAMES, tmp_path / "exports")
    for name in NAMES:
        check({**found[name], "learnt": learnt(first + second, name)}, alone[name])
    for name in NAMES:  # the checkpoint of the run that was never stopped holds them as well
        policy = worker_of(job, f"{name} update")
        rg.runs.export(folder / "together", tmp_path / name, "float32", policy=policy, adapter="apart")
        assert equal(read_adapter(tmp_path / name), alone[name]["apart"])


def test_processes_of_one_pool_have_the_bits_of_one_process(model: str, tmp_path: Path) -> None:
    here = whole_run(loops(model, critic=True), NAMES, tmp_path / "here")
    with forked_workers.job(loops(model, critic=True)) as job:
        assert {"policy", "critic", "policy2", "critic2"} < job.pids.keys()  # each model is a process
        steps = list(job.steps(STEPS))
        bases = {name: mapped_bytes(pid) for name, pid in job.pids.items()}
        for worker, name in (("policy", "left"), ("policy2", "right")):
            job.export(tmp_path / name, dtype="float32", policy=worker, adapter="apart")
    for name in NAMES:
        check(
            {"learnt": learnt(steps, name), "apart": read_adapter(tmp_path / name)}, {key: here[name][key] for key in ("learnt", "apart")}
        )
    holding = {"policy", "critic", "policy2", "critic2"}
    assert {name for name, base in bases.items() if base["rss"]} == holding
    weights = 4 * sum(tensor.numel() for tensor in BaseWeights(model).values())
    for name in holding:
        assert bases[name]["private"] == 0
        assert bases[name]["rss"] >= weights
    assert sum(bases[name]["pss"] for name in holding) <= 1.1 * weights  # of four processes


def test_the_models_of_one_process_have_the_same_frozen_tensors(model: str, tmp_path: Path) -> None:
    with rg.compile(loops(model, critic=True), rg.Cluster(cpus=4)).run_here() as job:
        heads = [engine(job, name)._head for name in ("policy", "critic", "policy2", "critic2")]
        places = [{p.data_ptr() for p in head.parameters() if not p.requires_grad} for head in heads]
        trained = [
            tensor.data_ptr() for name in ("policy", "critic", "policy2", "critic2") for tensor in engine(job, name).weights().values()
        ]
        with pytest.raises(ExportError, match="'critic' is a critic with an adapter"):
            job.export(tmp_path / "critic", policy="critic")
    assert places[0] == places[1] == places[2] == places[3]
    assert len(places[0]) == len(BaseWeights(model))
    assert len({*trained, *places[0]}) == len(trained) + len(places[0])


def test_a_checkpoint_holds_the_adapter_of_each_policy_alone(runs: tuple[Found, Found, Path, dict[str, Any]]) -> None:
    together, _, folder, _ = runs
    for worker, name in (("policy", "left"), ("policy2", "right")):
        own = sum(tensor.numel() for tensor in together[name]["trained"].values())
        saved = sum(file.stat().st_size for file in (folder / "together" / f"step-0000000{STEPS}" / worker).glob("*.distcp"))
        assert own * 12 <= saved < own * 12 + 200_000


def test_the_example_of_the_docs_trains_and_exports_both_policies(model: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    example = next(code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "def two(" in code)
    scope: dict[str, Any] = {"rg": rg}
    exec(example, scope)
    with rg.compile(scope["two"](model, "transformers", 6), rg.Cluster(cpus=4)).run_here() as job:
        steps = list(job.steps(2))
        for worker, rank in (("policy", 32), ("policy2", 8)):
            job.export(tmp_path / worker, policy=worker, adapter="apart")
            assert rg.LoRA.load(tmp_path / worker).rank == rank
    assert {"sums update/actor/grad_norm", "products update/actor/grad_norm"} < steps[-1].metrics.keys()


def test_one_generator_does_not_follow_two_policies(model: str) -> None:
    with pytest.raises(GraphError, match=r"follow feedback 'left weights' and 'right weights'.* give each node its own Generator"):
        loops(model, rollouts="one")


def test_one_generator_does_not_roll_out_with_and_without_a_feedback_edge(model: str) -> None:
    generator = rg.Generator(model, pool=rg.Pool("rollout", cpus=1), engine="transformers")
    policy, weights = rg.Policy(model, pool=rg.Pool("train", cpus=1)), rg.feedback("weights", depth=1)
    rollouts = [
        generator.rollout(rg.prompts([{"prompt": "1"}], count=1, name=f"{name} prompts"), *edge, group_size=2, name=f"{name} rollout")
        for name, edge in (("own", [weights]), ("first", []))
    ]
    rewards = [small_tokens(rollout, name=f"rewards {number}") for number, rollout in enumerate(rollouts)]
    advantages = [
        rg.advantages(rollout, rewards[number], estimator=rg.GRPO(), name=f"advantages {number}") for number, rollout in enumerate(rollouts)
    ]
    step = policy.update(rollouts[0], advantages[0], loss=rg.ClippedLoss())
    other = rg.Policy(model, pool=rg.Pool("other", cpus=1)).update(rollouts[1], advantages[1], loss=rg.ClippedLoss(), name="other update")
    weights.close(step.weights)
    with pytest.raises(GraphError, match="follow feedback 'weights' and none"):
        rg.Graph("mixed", step.metrics, other.metrics)
