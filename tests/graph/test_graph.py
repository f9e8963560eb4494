"""Declaring: what a graph is found from, and every rule with its message."""

from collections.abc import Callable

import pytest

import rlgraph as rg
from rlgraph import algorithms
from rlgraph.errors import GraphError, RlgraphError

ITEMS = [{"prompt": "1 + 1 =", "answer": "2"}]


def exact(responses: list[str], answers: list[str]) -> list[float]:
    return [float(r == a) for r, a in zip(responses, answers, strict=True)]


class Parts:
    """A GRPO graph in pieces, to put together wrongly."""

    def __init__(self, depth: int = 1, **pools: rg.Pool) -> None:
        self.generator = rg.Generator("model", pool=pools.get("rollout", rg.Pool("rollout")))
        self.policy = rg.Policy("model", pool=pools.get("train", rg.Pool("train")))
        self.weights = rg.feedback("weights", depth=depth)
        self.prompts = rg.prompts(ITEMS, count=4)
        self.rollout = self.generator.rollout(self.prompts, self.weights, group_size=2)
        self.rewards = rg.reward(exact, self.prompts, self.rollout)
        self.advantages = rg.advantages(self.rollout, self.rewards, estimator=rg.GRPO())


def test_a_graph_is_found_from_its_outputs_in_order_of_declaration() -> None:
    parts = Parts()
    step = parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss())
    parts.weights.close(step.weights)
    graph = rg.Graph("grpo", step.metrics)
    assert [node.name for node in graph.nodes] == ["prompts", "rollout", "reward", "advantages", "update"]
    assert graph.node("rollout").rows == 8


def test_an_edge_carries_only_what_is_read() -> None:
    parts = Parts()
    step = parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss())
    parts.weights.close(step.weights)
    graph = rg.Graph("grpo", step.metrics)
    edge = graph.forward.edges[graph.node("rollout"), graph.node("reward")]
    assert set(edge["columns"]) == {"responses", "response_mask", "group_ids"}  # the last to say which prompt an error is about


def test_without_old_log_probs_ratios_are_taken_against_the_engine() -> None:
    parts = Parts()
    assert "rollout_log_probs" in parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss()).metrics.node.reads
    old = parts.policy.log_probs(parts.rollout)
    unmeasured = rg.options.Guards(warn_mismatch=None)
    step = parts.policy.update(parts.rollout, old, parts.advantages, loss=rg.ClippedLoss(), guards=unmeasured, name="with_old")
    reads = step.metrics.node.reads
    assert "old_log_probs" in reads
    assert "rollout_log_probs" not in reads


def open_feedback() -> object:
    parts = Parts()
    step = parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss())
    return rg.Graph("open", step.metrics)


def no_cycle() -> object:
    parts = Parts()
    frozen = parts.generator.rollout(parts.prompts, group_size=2, name="frozen")
    rewards = rg.reward(exact, parts.prompts, frozen, name="frozen_reward")
    advantages = rg.advantages(frozen, rewards, estimator=rg.GRPO(), name="frozen_advantages")
    step = parts.policy.update(frozen, advantages, loss=rg.ClippedLoss())
    parts.weights.close(step.weights)
    return rg.Graph("no cycle", step.metrics, parts.advantages)


def two_of_a_name() -> object:
    parts = Parts()
    again = rg.reward(exact, parts.prompts, parts.rollout)
    return rg.Graph("twice", parts.rewards, again)


def closed_twice() -> object:
    parts = Parts()
    step = parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss())
    parts.weights.close(step.weights)
    return parts.weights.close(step.weights)


def close_with_metrics() -> object:
    parts = Parts()
    return parts.weights.close(parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss()).metrics)


def both_carry() -> object:
    parts = Parts()
    again = rg.reward(exact, parts.prompts, parts.rollout, name="again")
    return rg.advantages(parts.rollout, parts.rewards, again, estimator=rg.GRPO())


def read_from(sampling: rg.Sampling, read: Callable[[rg.Policy, rg.Output, rg.Output], object]) -> Callable[[], object]:
    def declared() -> object:
        rollout = rg.Generator("m", pool=rg.Pool("rollout"), sampling=sampling).rollout(rg.prompts(ITEMS, count=4), group_size=2)
        return read(rg.Policy("m", pool=rg.Pool("train")), rollout, rg.advantages(rollout, brief(rollout), estimator=rg.GRPO()))

    return declared


def corrected(policy: rg.Policy, rollout: rg.Output, advantages: rg.Output) -> object:
    return rg.stages.rollout_correction(rollout, policy.log_probs(rollout), weights=rg.estimators.TruncatedIS(level="token"))


def bypassed(policy: rg.Policy, rollout: rg.Output, advantages: rg.Output) -> object:
    return policy.update(rollout, advantages, loss=algorithms.loss("bypass_pg_is"))


def also(policy: rg.Policy, rollout: rg.Output, advantages: rg.Output) -> object:
    more = [(rollout, rg.SFTLoss(), 0.1), ([rollout, advantages], algorithms.ProximalLoss(), 0.1)]
    return policy.update(rollout, policy.log_probs(rollout), advantages, loss=rg.ClippedLoss(), also=more)


@rg.node(reads="response_mask", writes="rewards")
def brief(batch: rg.Columns) -> rg.Columns:
    return {"rewards": -batch["response_mask"].sum(-1).float()}  # type: ignore[union-attr]


def read_by_nobody() -> object:
    parts = Parts()
    rollout = parts.generator.rollout(parts.prompts, group_size=2)
    advantages = rg.advantages(rollout, rg.reward(exact, parts.prompts, rollout), estimator=rg.GRPO())
    step = parts.policy.update(rollout, advantages, loss=rg.ClippedLoss())
    parts.weights.close(step.weights)
    return rg.Graph("g", step.metrics)


def two_pools_of_a_name() -> object:
    parts = Parts(1, rollout=rg.Pool("gpu", share=1), train=rg.Pool("gpu", share=2))
    step = parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss())
    parts.weights.close(step.weights)
    return rg.Graph("pools", step.metrics)


WRONG: dict[str, tuple[Callable[[], object], type[RlgraphError], str]] = {
    "unknown column": (
        lambda: rg.reward(exact, Parts().rollout),
        GraphError,
        r"node 'reward' reads column 'answers', which none of its inputs \['rollout'\] carries; pass the output of 'prompts' to it",
    ),
    "a column of nobody": (
        lambda: rg.node(reads="moon", writes="rewards")(lambda batch: batch)(Parts().rollout),
        GraphError,
        "reads column 'moon', .*pass the output of a node that writes it",
    ),
    "both inputs carry it": (both_carry, GraphError, r"reads column 'rewards', which \['reward', 'again'\] both carry"),
    "an input that is read by nobody": (
        lambda: rg.advantages(Parts().rollout, Parts().rewards, Parts().prompts, estimator=rg.GRPO()),
        GraphError,
        "reads nothing of its input 'prompts'.*leave that input out",
    ),
    "an input that is no output": (lambda: rg.advantages("rollout", estimator=rg.GRPO()), GraphError, "was given str 'rollout'"),  # type: ignore[arg-type]
    "open feedback": (open_feedback, GraphError, r"open feedback 'weights'; close it with weights.close\(step.weights\)"),
    "feedback closes no cycle": (no_cycle, GraphError, "'update' does not depend on 'rollout'"),
    "an edge that nobody reads": (
        read_by_nobody,
        GraphError,
        r"'weights' is closed with 'update', but no node of the graph reads it; .* generator.rollout\(prompts, weights\), or",
    ),
    "closed twice": (closed_twice, GraphError, "closed twice"),
    "closed with metrics": (close_with_metrics, GraphError, "closed with the metrics of 'update'; close it with the weights"),
    "a depth beyond all channels": (lambda: rg.feedback("w", depth=63), GraphError, "at most 62 are possible"),
    "latest of one": (lambda: rg.feedback("w", depth=0, latest=True), GraphError, "only one version exists"),
    "two nodes of a name": (two_of_a_name, GraphError, "2 nodes called 'reward'; use different names, with name="),
    "two pools of a name": (two_pools_of_a_name, GraphError, "2 different pools called 'gpu'"),
    "ratios against a truncated distribution": (
        read_from(rg.Sampling(top_p=0.9), lambda policy, *given: policy.update(*given, loss=rg.ClippedLoss())),
        GraphError,
        "node 'update' reads 'rollout_log_probs' of 'rollout', which samples with top_p=0.9, top_k=0, .* use top_p=1",
    ),
    "a correction by log-probs of some tokens": (read_from(rg.Sampling(top_k=5), corrected), GraphError, "node 'correction' .* top_k=5"),
    "a correction by those of likely ones": (read_from(rg.Sampling(min_p=0.1), corrected), GraphError, "'correction' .* min_p=0.1"),
    "a bypass of greedy responses": (read_from(rg.Sampling(temperature=0), bypassed), GraphError, "temperature=0: .* temperature above 0"),
    "another batch of truncated responses": (read_from(rg.Sampling(top_p=0.9), also), GraphError, "reads 'rollout_log_probs'"),
    "a share of infinity": (lambda: rg.Pool("p", share=float("inf")), GraphError, "share=inf"),
    "half a GPU": (lambda: rg.Pool("p", gpus=0.5), GraphError, "gpus=0.5"),  # type: ignore[arg-type]
    "an output that is none": (lambda: rg.Graph("g", 3), GraphError, "was given int 3 as an output"),  # type: ignore[arg-type]
    "a negative KL": (
        lambda: rg.stages.kl_shaped_rewards(Parts().rollout, Parts().rewards, coef=-1.0),
        GraphError,
        "coef=-1.0; coef is a number of at least 0",
    ),
    "a reward without parameters": (lambda: rg.reward(lambda: [1.0]), GraphError, "name the columns it reads"),
    "tools on GPUs": (lambda: rg.Tools([rg.tools.python], pool=rg.Pool("p")), GraphError, "tools run on host cores"),
    "a node of two arguments": (lambda: rg.node(reads="a", writes="b")(lambda a, b: a), GraphError, "a function of one argument"),
    "a node that writes nothing": (lambda: rg.node(reads="a", writes="")(lambda a: a), GraphError, "reads and writes at least one column"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_raises_an_error_with_place_finding_rule_and_fix(name: str) -> None:
    declare, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        declare()


def test_a_users_node_is_called_like_a_function() -> None:
    @rg.node(reads="response_mask", writes="rewards")
    def brevity(batch: rg.Columns) -> rg.Columns:
        return {"rewards": -batch["response_mask"].sum(-1).float()}  # type: ignore[union-attr]

    parts = Parts()
    output = brevity(parts.rollout)
    assert output.node.name == "brevity"
    assert output.columns == ("rewards",)
    assert output.node.rows == 8


def test_pairs_of_truncated_responses_leave_the_engines_log_probs_out() -> None:
    for sampling, whole in ((rg.Sampling(), True), (rg.Sampling(top_p=0.9), False)):
        pairs = read_from(sampling, lambda policy, rollout, advantages: rg.preferred(rollout, brief(rollout)))()
        assert isinstance(pairs, rg.Output)
        assert ("rollout_log_probs" in pairs.columns) == whole


def test_the_rollouts_generator_evaluates_no_other_weights() -> None:
    parts = Parts()
    step = parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss())
    evaluation = rg.evaluate(parts.generator, ITEMS, None, reward=exact, every=1)
    parts.weights.close(step.weights)
    with pytest.raises(rg.errors.GraphError, match="'rollout' and 'evaluate' belong to one model, and follow feedback 'weights' and none"):
        rg.Graph("g", step.metrics, evaluation)


def test_what_no_output_of_a_graph_depends_on_is_named_in_a_warning() -> None:
    parts = Parts()
    dropped = parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss(), name="first")
    step = parts.policy.update(parts.rollout, parts.advantages, loss=rg.ClippedLoss())
    rg.evaluate(parts.generator, ITEMS, parts.weights, reward=exact, every=1)
    parts.weights.close(step.weights)
    del dropped
    costs = rg.planning.Costs(dict.fromkeys(("prompts", "rollout", "reward", "advantages", "update"), 1.0))
    with pytest.warns(rg.errors.PlanWarning, match=r"depends on \['first', 'evaluate', 'evaluate rewards'\], which never run"):
        rg.compile(rg.Graph("g", step.metrics), rg.Cluster(gpus=2, cpus=4), costs)
