"""Graphs whose rollout leaves in chunks: which nodes work on a chunk, in what order, the prediction, and what is refused."""

from collections.abc import Callable

import pytest

import rlgraph as rg
from rlgraph.errors import GraphError

ITEMS = [{"prompt": "?", "answer": "!"}]


def right(response: str, answer: str) -> float:
    return float(response == answer)


@rg.node(reads="rewards group_ids", writes="ranks")
def ranked(batch: rg.Columns) -> rg.Columns:
    return {"ranks": batch["rewards"]}


class Parts:
    """The nodes of a graph with a reward, and log-probs of policy and reference in one pool."""

    def __init__(self, chunks: int = 4, *, depth: int = 1, count: int = 16, by_group: bool = True, one_pool: bool = False) -> None:
        self.rollout_pool = rg.Pool("rollout")
        self.train_pool = self.rollout_pool if one_pool else rg.Pool("train")
        self.generator = rg.Generator("m", pool=self.rollout_pool)
        self.policy, self.reference = rg.Policy("m", pool=self.train_pool), rg.Reference("m", pool=self.train_pool)
        self.weights = rg.feedback("weights", depth=depth)
        self.prompts = rg.prompts(ITEMS, count=count)
        self.rollout = self.generator.rollout(self.prompts, self.weights, group_size=2, chunks=chunks)
        self.rewards = rg.reward(right, self.prompts, self.rollout, by_group=by_group)
        self.advantages = rg.advantages(self.rollout, self.rewards, estimator=rg.GRPO())

    def graph(self, *extra: rg.Output) -> rg.Graph:
        step = self.policy.update(self.rollout, self.advantages, *extra, loss=rg.ClippedLoss(kl_coef=0.1 if len(extra) > 1 else 0.0))
        self.weights.close(step.weights)
        return rg.Graph("parts", step.metrics)

    def with_passes(self) -> rg.Graph:
        return self.graph(self.policy.log_probs(self.rollout), self.reference.log_probs(self.rollout))


def plan(graph: rg.Graph, **seconds: float) -> rg.Plan:
    costs = rg.planning.Costs({node.name: seconds.get(node.name, 0.0) for node in graph.nodes}) if seconds else None
    return rg.compile(graph, rg.Cluster(gpus=2, cpus=8), costs)


def test_rewards_and_passes_work_on_chunks_and_other_nodes_take_the_whole_batch() -> None:
    found = {node.name: node.chunks for node in plan(Parts().with_passes()).nodes}
    assert found == {
        "prompts": 1, "rollout": 4, "reward": 4, "advantages": 4, "old_log_probs": 4, "ref_log_probs": 4, "update": 1,
    }  # fmt: skip


def test_nodes_of_a_pool_all_work_on_one_chunk_before_the_next() -> None:
    found = plan(Parts(2).with_passes())
    order = [event.name for event in found.schedule.events if event.pool == "train" and event.kind == "fire"]
    assert order == ["old_log_probs 1/2", "ref_log_probs 1/2", "old_log_probs 2/2", "ref_log_probs 2/2", "update"]
    orders = {channel.name: (channel.credits, channel.chunks) for channel in found.channels if channel.kind == "order"}
    assert orders == {"order old_log_probs to ref_log_probs": (0, 2), "order ref_log_probs to old_log_probs": (1, 2)}


@pytest.mark.parametrize(("chunks", "step_s"), [(1, 1.3), (2, 1.15), (4, 1.075)])
def test_an_on_policy_step_waits_for_the_reward_of_the_last_chunk_only(chunks: int, step_s: float) -> None:
    parts = Parts(chunks, depth=0)
    assert plan(parts.graph(), rollout=1.0, reward=0.3).prediction.period_s == pytest.approx(step_s)


def test_the_plan_prints_the_count_of_chunks() -> None:
    printed = str(plan(Parts().with_passes()))
    assert "8 x 4" in printed
    assert "rollout 1/4 ->" in str(plan(Parts().graph(), rollout=1.0))
    assert plan(Parts().with_passes()).node("reward").rows == 32


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no whole number": (lambda: Parts(0), "chunks=0; chunks is a whole number of chunks"),
    "true": (lambda: Parts(True), "chunks=True"),
    "no divisor of the prompts": (lambda: Parts(3), "chunks=3, which does not divide the 16 rows per step of 'prompts'"),
    "no node that takes a chunk": (
        lambda: Parts(by_group=False).graph(),
        r"no node can work on a chunk .* 'reward' takes the whole batch .* 'update' takes the whole batch .* leave chunks out",
    ),
    "a pool shared with the rollout": (lambda: shared_pool(), "'old_log_probs' runs in its pool 'rollout', so only after it"),
    "more chunks than a channel holds": (lambda: Parts(8, depth=8).graph(), "9 batches may be open: 72 chunks, but a channel has 64 slots"),
}


def shared_pool() -> rg.Graph:
    parts = Parts(depth=0, by_group=False, one_pool=True)
    return parts.graph(parts.policy.log_probs(parts.rollout))


@pytest.mark.parametrize("name", REFUSED)
def test_a_rollout_that_cannot_leave_in_chunks_is_refused_with_the_reason(name: str) -> None:
    declare, message = REFUSED[name]
    with pytest.raises(GraphError, match=message):
        declare()


def test_a_node_that_also_reads_of_the_whole_batch_takes_the_whole_batch() -> None:
    parts = Parts()
    again = rg.reward(lambda response, rank: 1.0, parts.rollout, ranked(parts.rewards, parts.rollout), name="again")
    assert again.node.chunks == 1
    assert parts.rewards.node.chunks == 4
