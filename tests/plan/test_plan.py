"""Compiling: placement, workers, channels, and what a plan predicts and guarantees."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from support.simulated_stages import Loop

import rlgraph as rg
from rlgraph import api
from rlgraph.engines.hf import model_files
from rlgraph.errors import PlanError
from rlgraph.plan.calibrate import Trace
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.cost_functions import Decode, NodeCost
from rlgraph.plan.lengths import Lengths
from rlgraph.plan.placement import host_count

ITEMS = [{"prompt": "1 + 1 =", "answer": "2"}]


def exact(responses: list[str], answers: list[str]) -> list[float]:
    return [float(r == a) for r, a in zip(responses, answers, strict=True)]


def grpo(rollout: rg.Pool, train: rg.Pool, depth: int = 1, buffers: int = 1, tensor_parallel: int = 1, path: str = "m") -> rg.Graph:
    generator = rg.Generator(path, pool=rollout, tensor_parallel=tensor_parallel)
    policy = rg.Policy(path, pool=train)
    weights = rg.feedback("weights", depth=depth, buffers=buffers)
    prompts = rg.prompts(ITEMS, count=4)
    responses = generator.rollout(prompts, weights, group_size=2)
    rewards = rg.reward(exact, prompts, responses)
    advantages = rg.advantages(responses, rewards, estimator=rg.GRPO())
    step = policy.update(responses, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("grpo", step.metrics)


def gpus(plan: rg.Plan) -> dict[str, int]:
    return {pool.name: len(pool.gpus) for pool in plan.pools}


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [((1, 3), 8, (2, 6)), ((1, 1), 7, (4, 3)), ((1, 100), 8, (1, 7)), ((13, 27), 4, (1, 3)), ((1, 1), 2, (1, 1)), ((0.3, 0.7), 10, (3, 7))],
)
def test_shares_divide_the_gpus_by_largest_remainder(shares: tuple[float, float], total: int, expected: tuple[int, int]) -> None:
    plan = rg.compile(grpo(rg.Pool("a", share=shares[0]), rg.Pool("b", share=shares[1])), rg.Cluster(gpus=total))
    assert tuple(gpus(plan).values()) == expected


def test_tensor_parallel_engines_get_whole_groups() -> None:
    plan = rg.compile(grpo(rg.Pool("a"), rg.Pool("b"), tensor_parallel=2), rg.Cluster(gpus=5))
    assert gpus(plan) == {"a": 2, "b": 3}
    assert plan.node("rollout").workers == ("generator",)
    assert plan.worker("generator").gpus == (0, 1)


def test_each_tensor_parallel_engine_has_gpus_of_its_own_side_by_side() -> None:
    plan = rg.compile(grpo(rg.Pool("a", gpus=4), rg.Pool("b", gpus=1), tensor_parallel=2), rg.Cluster(gpus=5))
    assert {worker.name: worker.gpus for worker in plan.workers if worker.gpus} == {
        "generator[0]": (0, 1),
        "generator[1]": (2, 3),
        "policy": (4,),
    }


def test_a_tensor_parallel_engine_and_the_ranks_of_a_policy_time_share_the_gpus_of_a_pool() -> None:
    both = rg.Pool("both", gpus=2)
    plan = rg.compile(grpo(both, both, depth=0, tensor_parallel=2), rg.Cluster(gpus=2))
    assert {worker.name: worker.gpus for worker in plan.workers if worker.gpus} == {
        "generator": (0, 1),
        "policy[0]": (0,),
        "policy[1]": (1,),
    }


def test_an_exact_count_is_kept_and_shares_divide_the_rest() -> None:
    assert gpus(rg.compile(grpo(rg.Pool("a", gpus=3), rg.Pool("b")), rg.Cluster(gpus=8))) == {"a": 3, "b": 5}


def test_without_gpus_the_pools_run_on_cores_and_may_share_them() -> None:
    plan = rg.compile(grpo(rg.Pool("a"), rg.Pool("b")), rg.Cluster(cpus=4))
    assert [(pool.device, pool.cpus) for pool in plan.pools] == [("cpu", 2), ("cpu", 2)]
    assert plan.worker("policy").threads == 2
    crowded = rg.compile(grpo(rg.Pool("a"), rg.Pool("b")), rg.Cluster(cpus=1))
    assert [pool.cpus for pool in crowded.pools] == [1, 1]
    [advice] = crowded.prediction.advice  # of the cores alone: placeholder costs say nothing about shares
    assert "2 cores, but the cluster has 1" in advice


def test_the_compiler_chooses_the_split_of_least_period() -> None:
    def best(generate_s: float, train_s: float) -> dict[str, int]:
        graph = grpo(rg.Pool("a", share=None), rg.Pool("b", share=None))
        nodes = {"rollout": NodeCost(parallel_s=generate_s), "update": NodeCost(parallel_s=train_s)}
        costs = rg.planning.Costs({"prompts": 0.0, "reward": 0.0, "advantages": 0.0, **nodes})
        return gpus(rg.compile(graph, rg.Cluster(gpus=8), costs))

    assert best(10, 10) == {"a": 4, "b": 4}
    assert best(30, 10) == {"a": 6, "b": 2}
    assert best(1, 100) == {"a": 1, "b": 7}


@pytest.mark.parametrize(
    ("pools", "expected"), [({"a": 6, "b": 2}, 1), ({"a": 8, "b": 8}, 2), ({"a": 16, "b": 8}, 3), ({"a": 4, "b": 4}, 1)]
)
def test_pools_that_fit_on_one_host_together_share_hosts(pools: dict[str, int], expected: int) -> None:
    assert host_count(pools, rg.Cluster(gpus=32, gpus_per_node=8)) == expected


def test_a_plan_says_how_many_hosts_its_pools_take() -> None:
    plan = rg.compile(grpo(rg.Pool("a", gpus=8), rg.Pool("b", gpus=8)), rg.Cluster(gpus=16, gpus_per_node=8))
    assert plan.hosts == 2
    assert "(2 hosts of 8 GPUs)" in str(plan)


def test_a_host_node_that_waits_for_nothing_more_joins_its_producer() -> None:
    plan = rg.compile(grpo(rg.Pool("a"), rg.Pool("b")), rg.Cluster(cpus=2))
    assert [(worker.name, worker.nodes) for worker in plan.workers] == [
        ("prompts", ("prompts",)),
        ("generator", ("rollout",)),
        ("reward", ("reward", "advantages")),
        ("policy", ("update",)),
    ]


def test_channels_hold_what_the_loop_admits_and_prompts_one_more() -> None:
    plan = rg.compile(grpo(rg.Pool("a"), rg.Pool("b"), depth=3), rg.Cluster(cpus=2))
    slots = {channel.name: channel.slots for channel in plan.channels}
    assert slots == {"prompts": 5, "rollout": 4, "reward (local)": 4, "advantages": 4}
    assert plan.certificate.open_batches == 4


def test_columns_that_nobody_reads_are_not_sent() -> None:
    plan = rg.compile(grpo(rg.Pool("a"), rg.Pool("b")), rg.Cluster(cpus=2))
    channel = next(c for c in plan.channels if c.name == "advantages")
    assert channel.columns == ("advantages",)


def test_overlap_predicts_the_slower_side_and_no_overlap_the_sum() -> None:
    costs = rg.planning.Costs({"prompts": 0.0, "reward": 0.0, "advantages": 0.0, "rollout": 3.0, "update": 2.0})
    periods = [rg.compile(grpo(rg.Pool("a"), rg.Pool("b"), depth=d), rg.Cluster(cpus=2), costs).prediction.period_s for d in (0, 1, 2)]
    assert periods == pytest.approx([5.0, 3.0, 3.0])


def test_a_long_tail_raises_the_expected_step_above_the_critical_cycle() -> None:
    tail = Lengths((0.0, 0.5, 0.9, 1.0), (5.0, 20.0, 60.0, 400.0))
    decode = NodeCost(decode=Decode(step_s=0.01))
    nodes = {"prompts": 0.0, "reward": 0.0, "advantages": 0.0, "rollout": decode, "update": NodeCost(token_s=0.004)}
    costs = rg.planning.Costs(nodes, lengths=tail)
    expected = rg.compile(grpo(rg.Pool("a"), rg.Pool("b"), depth=1), rg.Cluster(cpus=2), costs).prediction
    assert expected.step_s > expected.period_s * 1.02
    flat = replace(costs, lengths=Lengths((0.0, 1.0), (40.0, 40.0)))
    even = rg.compile(grpo(rg.Pool("a"), rg.Pool("b"), depth=1), rg.Cluster(cpus=2), flat).prediction
    assert even.step_s == pytest.approx(even.period_s)


def test_a_second_buffer_hides_the_time_that_weights_take() -> None:
    costs = rg.planning.Costs({"prompts": 0.0, "reward": 0.0, "advantages": 0.0, "rollout": 1.0, "update": 0.5}, receive_s=0.5)
    one, two = (rg.compile(grpo(rg.Pool("a"), rg.Pool("b"), 2, buffers), rg.Cluster(cpus=2), costs) for buffers in (1, 2))
    assert (one.prediction.period_s, one.loops[0].hidden) == (pytest.approx(1.5), False)
    assert (two.prediction.period_s, two.loops[0].hidden) == (pytest.approx(1.0), True)


def test_nodes_of_one_pool_in_different_processes_fire_one_after_another() -> None:
    pool = rg.Pool("shared")
    plan = rg.compile(grpo(pool, pool, depth=0), rg.Cluster(gpus=2))
    assert gpus(plan) == {"shared": 2}
    assert not [c for c in plan.channels if c.kind == "order"]  # data and weights keep the order already


WRONG = {
    "more GPUs than there are": (
        lambda: rg.compile(grpo(rg.Pool("a", gpus=9), rg.Pool("b")), rg.Cluster(gpus=8)),
        "needs at least 10 GPUs",
    ),
    "a pool without a GPU": (lambda: rg.compile(grpo(rg.Pool("a"), rg.Pool("b")), rg.Cluster(gpus=1)), "needs at least 2 GPUs"),
    "GPUs where there are none": (lambda: rg.compile(grpo(rg.Pool("a", gpus=1), rg.Pool("b")), rg.Cluster(cpus=2)), "the cluster has none"),
    "a tensor-parallel group too large": (
        lambda: rg.compile(grpo(rg.Pool("a"), rg.Pool("b"), tensor_parallel=4), rg.Cluster(gpus=4)),
        "needs at least 5 GPUs",
    ),
    "costs of an unknown node": (
        lambda: rg.compile(grpo(rg.Pool("a"), rg.Pool("b")), rg.Cluster(), rg.planning.Costs({"rolout": 1.0})),
        "costs name a node 'rolout' that graph 'grpo' lacks",
    ),
    "missing costs": (
        lambda: rg.compile(grpo(rg.Pool("a"), rg.Pool("b")), rg.Cluster(), rg.planning.Costs({"rollout": 1.0})),
        "costs lack node 'prompts'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_does_not_fit_is_refused(name: str) -> None:
    attempt, message = WRONG[name]
    with pytest.raises(PlanError, match=message):
        attempt()


def test_a_plan_for_gpus_is_not_launched_where_there_are_none(tmp_path: object) -> None:
    plan = rg.compile(grpo(rg.Pool("a"), rg.Pool("b")), rg.Cluster(gpus=8))
    with pytest.raises(rg.RlgraphError, match=r"no such folder|for 8 GPUs"):
        plan.launch()


def test_there_is_one_kind_of_plan_whoever_makes_it_and_its_graph_is_in_no_file(tmp_path: Path) -> None:
    graph = Loop(depth=1).graph()
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    read = rg.Plan.from_json(plan.to_json())
    tuned = rg.tune(lambda depth: Loop(depth=depth).graph(), rg.Cluster(cpus=2), depth=(1,)).best.plan
    assert {type(each) for each in (plan, read, tuned, plan.values, compile_plan(graph, rg.Cluster(cpus=2)))} == {rg.Plan}
    assert plan.source is graph
    assert read == plan == plan.values
    assert str(read) == str(plan)
    assert '"source"' not in plan.to_json()
    Trace(plan, (), ()).to_file(tmp_path / "trace.json")
    assert Trace.from_file(tmp_path / "trace.json").plan == plan
    for without in (read, plan.values):
        with pytest.raises(rg.errors.PlanError, match="was read from JSON and has no graph to run"):
            without.launch()
        with pytest.raises(rg.errors.PlanError, match="was read from JSON and has no graph to run"):
            without.run_here()


def test_compiling_changes_no_graph_and_its_plan_has_the_folders_of_hub_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(rg.model_folder("tiny"))
    monkeypatch.setattr(model_files, "find_cached_folder", lambda model: folder)
    graph = grpo(rg.Pool("a"), rg.Pool("b"), path="org/tiny")
    assert (len(graph.forward), len(graph.pools)) == (5, 2)  # what a graph computes once is computed

    def state() -> tuple[object, ...]:
        parts = [*graph.nodes, *graph.feedbacks, *(node.model for node in graph.nodes if node.model is not None)]
        return pickle.dumps(graph), repr(vars(graph)), [dict(vars(part)) for part in parts]

    before = state()
    plans = [rg.compile(graph, cluster) for cluster in (rg.Cluster(cpus=2), rg.Cluster(cpus=2), rg.Cluster(gpus=4, cpus=8))]
    assert state() == before
    assert plans[0] == plans[1] != plans[2]
    assert isinstance(plans[2].source, rg.Graph)
    rollout, update = plans[2].source.node("rollout"), plans[2].source.node("update")
    assert [node.model.path for node in (rollout, update) if node.model is not None] == [folder, folder]
    assert [rollout.operation.generator, update.operation.model] == [rollout.model, update.model]  # type: ignore[attr-defined]
    assert rollout.feedback is not None
    assert rollout.feedback.source is not None
    assert (rollout.feedback.source.node, update.inputs[0].node) == (update, rollout)


def with_old_names(plan: rg.Plan) -> str:
    """The plan's JSON as rlgraph wrote it when credits were tokens, chunks were parts and latest was freshest."""
    raw = json.loads(plan.to_json())
    for dependency in raw["schedule"]["dependencies"]:
        dependency["tokens"] = dependency.pop("credits")
    for event in raw["schedule"]["events"]:
        event["part"] = event.pop("chunk")
    for channel in raw["channels"]:
        channel["tokens"], channel["parts"] = channel.pop("credits"), channel.pop("chunks")
    for loop in raw["loops"]:
        loop["freshest"] = loop.pop("latest")
    raw["prediction"]["critical_tokens"] = raw["prediction"].pop("critical_credits")
    return json.dumps(raw)


def test_a_plan_that_an_older_version_wrote_is_read(tmp_path: Path) -> None:
    plan = rg.compile(Loop(depth=1, chunks=4).graph(), rg.Cluster(cpus=2))
    old = with_old_names(plan)
    assert rg.Plan.from_json(old) == plan
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"plan": json.loads(old), "spans": [], "sampled": []}))
    assert Trace.from_file(trace).plan == plan


def test_a_plan_does_what_the_facade_does(tmp_path: Path) -> None:
    plan = rg.compile(Loop(depth=1).graph(), rg.Cluster(cpus=2))
    plan.draw(tmp_path / "a.svg")
    api.draw(plan, tmp_path / "b.svg")
    plan.timeline(tmp_path / "a.json", steps=2)
    api.timeline(plan, tmp_path / "b.json", steps=2)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes() == plan._repr_svg_().encode()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert str(plan) == api.text(plan)
