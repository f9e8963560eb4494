"""A batch that leaves rollout in parts: the same batch, losses and weights in every bit, and what works on a part overlaps decoding."""

from itertools import pairwise

import pytest
import torch
from support import digests, fakes, forked_workers
from support.digests import ITEMS, DigestPolicy

import rlgraph as rg
from rlgraph.columns import FINISH_REASONS, Columns
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.nodes.base import tensor_of
from rlgraph.nodes.rollout.decode_loop import WRITES
from rlgraph.runtime.measure import Step
from rlgraph.runtime.worker.executor import reduce_metrics

SAMPLING = rg.Sampling(max_tokens=6, temperature=0.9, stop_token_ids=tuple(range(1, 12)))
STOPS = torch.tensor([0, *SAMPLING.stop_token_ids])  # 0 is the tiny model's own


def bits(step: Step) -> tuple[float, ...]:
    return (*(step.metrics[name] for name in ("loss", "weight", "rewards/max")), step.staleness)


def fake_bits(chunks: int, depth: int = 1) -> list[tuple[float, ...]]:
    with rg.compile(fakes.vector_loop(depth, count=8, chunks=chunks), rg.Cluster(cpus=2)).run_here() as job:
        return [bits(step) for step in job.steps(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def graph(model: str, chunks: int, *, passes: bool = False, continuous: bool = False, depth: int = 1) -> rg.Graph:
    """GRPO on a tiny model; `passes` adds the log-probs of the policy and of a reference in one pool, by part."""
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=SAMPLING, dtype="float32")
    train = rg.Pool("train")
    policy = DigestPolicy(model, pool=train, optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights = rg.feedback("weights", depth=depth)
    prompts = rg.prompts(ITEMS, count=4, seed=3)
    rollout = generator.rollout(prompts, weights, group_size=4, chunks=chunks, continuous=continuous)
    rewards = rg.reward(length_and_letters, prompts, rollout)
    inputs = [rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO())]
    if passes:
        reference = rg.Reference(model, pool=train, dtype="float32")
        inputs += [policy.log_probs(rollout), reference.log_probs(rollout)]
    step = policy.update(*inputs, loss=rg.ClippedLoss(clip_high=0.28, kl_coef=0.1 if passes else 0.0))
    weights.close(step.weights)
    return rg.Graph("tiny", step.metrics, whole_batch(rollout, rewards))


@rg.node(reads=[*WRITES, "rewards"], writes="rows")
def whole_batch(batch: Columns) -> tuple[Columns, dict[str, float]]:
    responses, mask, reasons = tensor_of(batch, "responses"), tensor_of(batch, "response_mask"), tensor_of(batch, "finish_reasons")
    ended = (torch.isin(responses, STOPS) & mask).any(-1)
    at_limit = (mask.sum(-1) == SAMPLING.max_tokens) & ~ended
    cut = reasons == FINISH_REASONS.index("length")
    found = {"digest/batch": digests.digest(batch[c] for c in sorted(batch)), "digest/at_limit": at_limit.float().mean().item()}
    assert torch.equal(cut, at_limit), "of each response, not only of so many"
    return {"rows": batch["group_ids"]}, found


def length_and_letters(response: str, prompt: str, answer: str) -> float:
    return len(response) + 0.1 * len(set(response)) - 0.01 * len(prompt) + int(answer)


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("depth", [0, 2])
def test_chunks_change_no_bit_of_a_small_loop(chunks: int, depth: int) -> None:
    assert fake_bits(chunks, depth) == fake_bits(1, depth)


@pytest.mark.parametrize(("chunks", "continuous"), [(1, False), (4, True)])
def test_every_step_says_which_share_of_its_responses_was_cut_off(model: str, chunks: int, continuous: bool) -> None:
    with rg.compile(graph(model, chunks, continuous=continuous), rg.Cluster(gpus=2)).run_here() as job:
        for step in job.steps(3):
            assert step.metrics["response/truncated"] == step.metrics["digest/at_limit"]
            assert 0 < step.metrics["response/truncated"] < 1


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_change_no_bit_of_the_batch_the_loss_and_the_weights(model: str, chunks: int) -> None:
    whole, parts = digests.run_here(graph(model, 1), 4), digests.run_here(graph(model, chunks), 4)
    names = ("digest/batch", "digest/weights", "actor/pg_loss", "actor/grad_norm", "critic/rewards/max", "critic/rewards/min")
    assert [[step[name] for name in names] for step in parts] == [[step[name] for name in names] for step in whole]
    assert [step["critic/rewards/mean"] for step in parts] == pytest.approx([step["critic/rewards/mean"] for step in whole])


def test_chunks_change_no_bit_where_the_next_batch_joins_the_tail(model: str) -> None:
    whole, parts = digests.run_here(graph(model, 1, continuous=True), 4), digests.run_here(graph(model, 2, continuous=True), 4)
    assert [(step["digest/batch"], step["digest/weights"]) for step in parts] == [(s["digest/batch"], s["digest/weights"]) for s in whole]


@pytest.mark.parametrize("chunks", [2, 4])
def test_log_probs_of_chunks_equal_those_of_the_batch_in_every_bit(model: str, chunks: int) -> None:
    whole, parts = digests.run_here(graph(model, 1, passes=True), 3), digests.run_here(graph(model, chunks, passes=True), 3)
    assert [step["digest/weights"] for step in parts] == [step["digest/weights"] for step in whole]
    assert [step["actor/ppo_kl"] for step in parts] == [step["actor/ppo_kl"] for step in whole]


def test_parts_of_two_generator_workers_equal_the_oracle_without_parts() -> None:
    with forked_workers.job(fakes.vector_loop(1, count=8, chunks=4, ranks=2)) as job:
        assert [bits(step) for step in job.steps(5)] == fake_bits(1)


def test_a_reward_begins_with_the_first_part_while_others_are_decoded() -> None:
    with forked_workers.job(fakes.vector_loop(1, count=8, chunks=4, generate_s=0.8)) as job:
        list(job.steps(2))
        fired = {(span.name, span.step): span for span in job.spans() if span.kind == "fire"}
    for step in range(2):
        assert fired["score 1/4", step].start_s < fired["rollout 4/4", step].end_s


def test_passes_of_workers_take_turns_in_their_pool_by_part(model: str) -> None:
    with forked_workers.job(graph(model, 4, passes=True)) as job:
        found = [digests.clockless_metrics(step) for step in job.steps(3)]
        spans = [span for span in job.spans() if span.kind == "fire"]
    assert [step["digest/weights"] for step in found] == [
        step["digest/weights"] for step in digests.run_here(graph(model, 1, passes=True), 3)
    ]
    train = sorted((s for s in spans if s.name.split(" ")[0] in ("old_log_probs", "ref_log_probs", "update")), key=lambda s: s.start_s)
    by_part = [f"{node} {part}/4" for part in range(1, 5) for node in ("old_log_probs", "ref_log_probs")]
    assert [s.name for s in train] == [*by_part, "update"] * 3
    assert all(before.end_s <= after.start_s for before, after in pairwise(train))


def test_metrics_of_parts_are_averaged_but_of_extremes_the_extreme_is_kept() -> None:
    parts = [{"r/mean": 1.0, "r/max": 2.0, "r/min": 0.0, "once": 5.0}, {"r/mean": 2.0, "r/max": 9.0, "r/min": -1.0}]
    assert reduce_metrics(parts) == {"r/mean": 1.5, "r/max": 9.0, "r/min": -1.0, "once": 5.0}
