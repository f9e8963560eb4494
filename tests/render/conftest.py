"""Plans to draw: the five graphs of the tutorial's kind, small and large extremes, and random ones. All compiled for real."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Feedback, Model, Node, Operation, Output, declare, feedback
from rlgraph.graph.traits import NodeTraits, Work
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.cost_functions import SleepCost
from rlgraph.plan.costs import Costs
from rlgraph.plan.plan import Plan
from rlgraph.values.pool import Pool

ROLLOUT = ("prompts", "prompt_mask", "responses", "response_mask", "rollout_log_probs", "weight_version")
READS = ("responses", "response_mask", "rollout_log_probs")
EIGHT = Cluster(gpus=8, cpus=64)


@dataclass(frozen=True)
class Idle(Operation):
    """An operation of some kind of work that is planned but never run."""

    work: Work = "host"

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work=self.work, by_group=self.work == "forward")

    def start(self, context: Any) -> Any:
        raise AssertionError("a plan is drawn without running it")


@dataclass(frozen=True)
class Sandbox(Idle):
    """An operation that uses a host pool from inside, as a rollout with tools does."""

    host_pool: Pool | None = None

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work=self.work, host_pool=self.host_pool)


def stage(
    name: str,
    inputs: dict[Node, tuple[str, ...]],
    writes: tuple[str, ...] = (),
    work: Work = "host",
    model: Model | None = None,
    loop: Feedback | None = None,
    operation: Idle | None = None,
) -> Node:
    """Declare a node that reads the given columns of each input."""
    reads = tuple(column for columns in inputs.values() for column in columns)
    rows = 128 if not inputs else None
    return declare(
        name, operation or Idle(work), [Output(n) for n in inputs], reads=reads, writes=writes, rows=rows, model=model, feedback=loop
    )


def grpo(name: str, rollout_pool: Pool, train_pool: Pool, depth: int, buffers: int = 1, sandbox: Pool | None = None) -> Graph:
    loop = feedback("weights", depth=depth, buffers=buffers)
    generator, policy = Model(path="m", pool=rollout_pool), Model(path="m", pool=train_pool)
    prompts = stage("prompts", {}, ("prompt_texts", "answer"))
    inside = Sandbox("generate", sandbox) if sandbox else None
    rollout = stage("rollout", {prompts: ("prompt_texts",)}, ROLLOUT, "generate", generator, loop, inside)
    rewards = stage("reward", {prompts: ("answer",), rollout: ("responses",)}, ("rewards",))
    advantages = stage("advantages", {rollout: ("response_mask",), rewards: ("rewards",)}, ("advantages",))
    update = stage("policy.update", {rollout: READS, advantages: ("advantages",)}, (), "train", policy)
    loop.close(Output(update, "weights"))
    return Graph(name, Output(update, "metrics"))


def ppo() -> Graph:
    rollout_pool, train_pool, score_pool = Pool("rollout", share=2), Pool("train", share=2), Pool("score", share=1)
    generator, policy = Model(path="m", pool=rollout_pool), Model(path="m", pool=train_pool)
    critic, reference = Model(path="m", pool=train_pool), Model(path="m", pool=score_pool)
    loop = feedback("weights", depth=1)
    prompts = stage("prompts", {}, ("prompt_texts", "answer"))
    rollout = stage("rollout", {prompts: ("prompt_texts",)}, ROLLOUT, "generate", generator, loop)
    rewards = stage("reward", {prompts: ("answer",), rollout: ("responses",)}, ("rewards",))
    old = stage("policy.log_probs", {rollout: READS[:2]}, ("old_log_probs",), "forward", policy)
    ref = stage("reference.log_probs", {rollout: READS[:2]}, ("ref_log_probs",), "forward", reference)
    values = stage("critic.values", {rollout: READS[:2]}, ("values",), "forward", critic)
    scored = {rollout: ("response_mask",), rewards: ("rewards",), old: ("old_log_probs",), ref: ("ref_log_probs",)}
    shaped = stage("kl_shaped_rewards", scored, ("token_rewards",))
    targets = stage("advantages", {rollout: ("response_mask",), shaped: ("token_rewards",), values: ("values",)}, ("advantages", "returns"))
    correction = stage("rollout_correction", {rollout: READS[1:], old: ("old_log_probs",)}, ("rollout_is_weights",))
    inputs = {rollout: READS, old: ("old_log_probs",), targets: ("advantages",), correction: ("rollout_is_weights",)}
    update = stage("policy.update", inputs, (), "train", policy)
    fit = stage("critic.update", {rollout: READS[:2], values: ("values",), targets: ("returns",)}, (), "train", critic)
    loop.close(Output(update, "weights"))
    return Graph("ppo", Output(update, "metrics"), Output(fit, "metrics"))


PPO_SLEEP = {"model2": SleepCost(sleep_s=0.3, wake_s=0.2, bytes=4 << 30), "model4": SleepCost(sleep_s=0.1, wake_s=0.1)}
PPO_SECONDS = {
    "prompts": 0.1,
    "rollout": 9.0,
    "reward": 0.4,
    "policy.log_probs": 1.3,
    "reference.log_probs": 1.2,
    "critic.values": 1.2,
    "kl_shaped_rewards": 0.05,
    "advantages": 0.1,
    "rollout_correction": 0.02,
    "policy.update": 4.0,
    "critic.update": 3.8,
}


def twenty() -> Graph:
    """Twenty nodes, two generators with a loop each, three rewards, and names of every length."""
    pools = [Pool("large-generator"), Pool("small"), Pool("train", share=2)]
    big, small, policy, student = (Model(path="m", pool=pools[i]) for i in (0, 1, 2, 2))
    strong, weak = feedback("weights", depth=2, buffers=2), feedback("student_weights", depth=1)
    prompts = stage("prompts", {}, ("prompt_texts", "answer"))
    first = stage("rollout", {prompts: ("prompt_texts",)}, ROLLOUT, "generate", big, strong)
    second = stage("student_rollout", {prompts: ("prompt_texts",)}, ("responses2", "mask2"), "generate", small, weak)
    judged = [stage(f"reward_{i}", {prompts: ("answer",), first: ("responses",)}, (f"reward{i}",)) for i in range(4)]
    mixed = stage("mixed_rewards", {node: node.writes for node in judged}, ("rewards",))
    other = stage("student_reward", {prompts: ("answer",), second: ("responses2",)}, ("rewards2",))
    old = stage("policy.log_probs", {first: ("responses",)}, ("old",), "forward", policy)
    cross = stage("student.log_probs_of_the_teacher_responses", {first: ("responses",)}, ("cross",), "forward", student)
    back = stage("policy.log_probs_of_student", {second: ("responses2",)}, ("back",), "forward", policy)
    filtered = stage("filter", {first: ("response_mask",), mixed: ("rewards",)}, ("kept",))
    shaped = stage("shape", {filtered: ("kept",), old: ("old",), cross: ("cross",)}, ("token_rewards",))
    advantages = stage("advantages", {shaped: ("token_rewards",), first: ("response_mask",)}, ("advantages",))
    kept2 = stage("student_filter", {other: ("rewards2",), back: ("back",)}, ("kept2",))
    advantages2 = stage("student_advantages", {kept2: ("kept2",), second: ("mask2",)}, ("advantages2",))
    correction = stage("correction", {first: ("rollout_log_probs",), old: ("old",)}, ("is_weights",))
    inputs = {first: READS, advantages: ("advantages",), correction: ("is_weights",)}
    update = stage("policy.update", inputs, (), "train", policy)
    follow = stage("student.update", {second: ("responses2",), advantages2: ("advantages2",)}, (), "train", student)
    strong.close(Output(update, "weights"))
    weak.close(Output(follow, "weights"))
    return Graph("teacher_and_student", Output(update, "metrics"), Output(follow, "metrics"))


def single() -> Graph:
    return Graph("one", Output(stage("evaluate", {}, ("scores",))))


@pytest.fixture(scope="session")
def plans() -> dict[str, Plan]:
    shared = Pool("shared")
    return {
        "sync_colocated": compile_plan(grpo("grpo", shared, shared, depth=0), EIGHT),
        "one_step_off": compile_plan(grpo("grpo", Pool("rollout", share=1), Pool("train", share=3), depth=1), EIGHT),
        "k_step_off": compile_plan(grpo("grpo", Pool("rollout", share=None), Pool("train", share=None), depth=2, buffers=2), EIGHT),
        "ppo": compile_plan(
            ppo(), EIGHT, Costs(PPO_SECONDS, publish_s=0.1, receive_s=0.3, swap_s=0.02, source="measured", sleep=PPO_SLEEP)
        ),
        "ppo_cores": compile_plan(ppo(), Cluster(cpus=2)),
        "tool_use": compile_plan(grpo("tool_use", Pool("rollout", share=3), Pool("train", share=1), 1, 2, Pool("sandbox", cpus=32)), EIGHT),
        "twenty": compile_plan(twenty(), EIGHT),
        "single": compile_plan(single(), Cluster(cpus=1)),
    }


@st.composite
def _graphs(draw: st.DrawFn) -> Graph:
    """Random graphs: up to 14 nodes on up to 3 pools and the host, any names, up to 3 feedback edges."""
    names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
    labels = draw(st.lists(names, min_size=18, max_size=18, unique=True))
    pools = [Pool(f"{label}{i}") for i, label in enumerate(labels[: draw(st.integers(2, 3))])]
    homes = [*pools[:2], *draw(st.lists(st.sampled_from(pools), max_size=2))]
    models = [Model(path="m", pool=pool) for pool in homes]
    loops = [feedback(f"loop {labels[17 - i]}", depth=draw(st.integers(0, 2))) for i in range(draw(st.integers(0, 3)))]
    driven: list[Node] = []
    nodes = [stage(f"source {labels[3]}", {}, (labels[4], f"{labels[4]}+"))]
    for index in range(draw(st.integers(0, 13))):
        sources = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4, unique=True))
        loop = loops[len(driven)] if len(driven) < len(loops) else None
        model = models[index % len(models)] if loop else draw(st.sampled_from([None, *models]))
        if loop and model and any(model is node.model for node in driven):
            model = Model(path="m", pool=model.pool)  # a model follows one edge
        columns = tuple(f"{label}{index}" for label in labels[5 : 5 + draw(st.integers(1, 4))])
        node = stage(f"{labels[4]}{index}", {n: n.writes[:1] for n in sources}, columns, "forward" if model else "host", model, loop)
        nodes.append(node)
        driven += [node] if loop else []
    ends: list[Node] = []
    for loop, reader in zip(loops, driven, strict=False):
        elsewhere = [model for model in models if model.pool is not reader.pool and all(model is not end.model for end in ends)]
        trained = draw(st.sampled_from(elsewhere or [Model(path="m", pool=next(pool for pool in pools if pool is not reader.pool))]))
        ends.append(stage(f"update {loop.name}", {reader: reader.writes[:1]}, (), "train", trained))
        loop.close(Output(ends[-1], "weights"))
    return Graph(labels[0], *(Output(node, "metrics") for node in [*nodes, *ends]))


@pytest.fixture(scope="session")
def random_plans() -> st.SearchStrategy[Plan]:
    return _graphs().map(lambda graph: compile_plan(graph, Cluster(gpus=8, cpus=4)))
