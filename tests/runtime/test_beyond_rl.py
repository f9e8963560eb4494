"""Graphs without a generator, and updates on several batches: they run, go on from checkpoints, and take the gradient that they should."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_workers  # noqa: F401 (a way of dispatch)
from support.direct_forward import SUMS, forward_log_probs, norm_of, policy, read_first_batch, run
from torch.nn.functional import logsigmoid

import rlgraph as rg
from rlgraph.analysis.run import InvariantMonitor
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import CertificateError, GraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.training.advantages import Preferred
from rlgraph.plan.compile import loop_bounds
from rlgraph.plan.events import publish_event
from rlgraph.plan.play import simulate
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import behind_by_loop

PAIRS = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": " no" + "!" * n} for n, r in enumerate(SUMS[:6])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab=288))


def test_supervised_fine_tuning_in_many_passes_takes_the_gradient_of_the_mean_over_all_tokens(model: str) -> None:
    trained = policy(model, micro_batch_tokens=20)
    source = rg.examples(SUMS, 6, trained)
    (metrics,) = run(trained.update(source, loss=rg.SFTLoss()).metrics)
    columns = read_first_batch(source)
    net, log_probs = forward_log_probs(model, columns)
    loss = -log_probs.sum() / columns["response_mask"].sum()
    assert metrics["actor/sft_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm_of(net, loss), rel=1e-4)


def test_pairs_in_many_passes_take_the_gradient_of_the_pairs(model: str) -> None:
    trained, reference = policy(model, micro_batch_tokens=20), rg.Reference(model, pool=rg.Pool("ref"), dtype="float32")
    source = rg.pairs(PAIRS, 4, trained)
    step = trained.update(source, reference.log_probs(source), loss=rg.DPO(beta=0.5))
    first, second = run(step.metrics, 2)
    net, log_probs = forward_log_probs(model, read_first_batch(source))
    ratios = (log_probs - log_probs.detach()).sum(-1)
    loss = -logsigmoid(0.5 * (ratios[0::2] - ratios[1::2])).mean()
    assert first["actor/pg_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert first["actor/grad_norm"] == pytest.approx(norm_of(net, loss), rel=1e-4)
    assert first["preference/pairs"] == 4
    assert second["preference/margin"] > 0.0


def test_an_update_on_two_batches_takes_the_weighted_sum_of_their_gradients(model: str) -> None:
    trained, reference = policy(model, micro_batch_tokens=64), rg.Reference(model, pool=rg.Pool("ref"), dtype="float32")
    sums, two = rg.examples(SUMS, 5, trained), rg.pairs(PAIRS, 2, trained)
    also = [([two, reference.log_probs(two)], rg.losses.IPO(beta=0.5), 0.25)]
    (metrics,) = run(trained.update(sums, loss=rg.SFTLoss(), also=also).metrics)
    net, of_pairs = forward_log_probs(model, read_first_batch(two))
    columns = read_first_batch(sums)
    other, of_sums = forward_log_probs(model, columns)
    lengths = read_first_batch(two)["response_mask"].sum(-1)
    ratios = (of_pairs - of_pairs.detach()).sum(-1) / lengths
    pairs_loss = (ratios[0::2] - ratios[1::2] - 1).square().mean()
    sft_loss = -of_sums.sum() / columns["response_mask"].sum()
    (0.25 * pairs_loss).backward()
    sft_loss.backward()
    for parameter, more in zip(net.parameters(), other.parameters(), strict=True):
        parameter.grad += more.grad
    norm = float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["actor/pg_loss"] == pytest.approx((sft_loss + 0.25 * pairs_loss).item(), abs=1e-5)
    assert metrics["pairs/pairs"] == 2
    assert metrics["actor/sft_loss"] == pytest.approx(sft_loss.item(), abs=1e-5)


def test_examples_join_an_update_on_rollouts_of_another_number_of_rows(model: str) -> None:
    sampling = rg.Sampling(max_tokens=4)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, max_context=64, dtype="float32")
    trained, weights = policy(model), rg.feedback("weights", depth=0)
    rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=3), weights, group_size=2)
    rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], rollout)
    scored = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    demonstrations = rg.examples(SUMS, 5, trained, name="demonstrations")
    step = trained.update(rollout, scored, loss=rg.ClippedLoss(), also=[(demonstrations, rg.SFTLoss(), 0.5)])
    weights.close(step.weights)
    plan = rg.compile(rg.Graph("mixed", step.metrics), rg.Cluster(cpus=2))
    assert plan.node("update").rows == 6 + 5
    with plan.run_here() as job:
        steps = list(job.steps(3))
    assert [step.staleness for step in steps] == [0, 0, 0]
    assert steps[-1].metrics["demonstrations/nll"] < steps[0].metrics["demonstrations/nll"]
    assert {"actor/ppo_kl", "critic/rewards/mean"} <= set(steps[0].metrics)


def test_a_graph_without_a_generator_goes_on_from_its_checkpoint_with_the_same_numbers(model: str, tmp_path: Path) -> None:
    def plan() -> rg.Plan:
        trained = policy(model)
        return rg.compile(rg.Graph("sft", trained.update(rg.examples(SUMS, 4, trained), loss=rg.SFTLoss()).metrics), rg.Cluster(cpus=2))

    def job(folder: Path) -> LocalJob:
        made = plan()
        assert isinstance(made.source, rg.Graph)
        return LocalJob(made.source, made, Checkpoints(made.source, made, Recovery(folder, 2, 2)))

    with job(tmp_path / "whole") as running:
        whole = [step.metrics["actor/nll"] for step in running.steps(5)]
    with job(tmp_path / "cut") as running:
        first = [step.metrics["actor/nll"] for step in running.steps(2)]
    with job(tmp_path / "cut") as running:
        assert running.finished_steps == 2
        rest = [step.metrics["actor/nll"] for step in running.steps(5)]
        running.export(tmp_path / "model", dtype="float32")
    assert first + rest == whole
    assert rg.Policy(str(tmp_path / "model"), pool=rg.Pool("train")).path
    certificate = plan().certificate
    assert (certificate.staleness_bound, certificate.deadlock_free) == (0, True)


MISTAKES: dict[str, tuple[Any, str]] = {
    "no triple": (lambda e: [(e, rg.SFTLoss())], r"has also\[0\]=.*each is \(batch, loss, weight\)"),
    "no loss": (lambda e: [(e, "sft", 1.0)], "has loss='sft'; pass a loss object"),
    "no weight": (lambda e: [(e, rg.SFTLoss(), 0.0)], "its weight is a finite number above 0"),
    "no batch": (lambda e: [("e", rg.SFTLoss(), 1.0)], "its batch is the output of a node"),
    "a column that is not there": (lambda e: [(e, rg.DPO(), 1.0)], "reads column 'also0.preferences', which none of its inputs"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_further_batches_are_checked_where_they_are_declared(what: str) -> None:
    trained = rg.Policy("tiny", pool=rg.Pool("train"))
    also, message = MISTAKES[what]
    with pytest.raises(GraphError, match=message):
        trained.update(rg.examples(SUMS, 4, trained), loss=rg.SFTLoss(), also=also(rg.examples(SUMS, 4, trained, name="more")))


def test_online_pairs_are_the_best_and_the_worst_of_each_group(model: str) -> None:
    sampling = rg.Sampling(max_tokens=4)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, max_context=64, dtype="float32")
    trained, weights = policy(model), rg.feedback("weights", depth=1, buffers=2)
    reference = rg.Reference(model, pool=rg.Pool("ref"), dtype="float32")
    rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}, {"prompt": "2 ="}], count=2), weights, group_size=4)
    two = rg.preferred(rollout, rg.reward(lambda responses: [float(len(text)) for text in responses], rollout))
    step = trained.update(two, reference.log_probs(two), loss=rg.DPO())
    weights.close(step.weights)
    plan = rg.compile(rg.Graph("online", step.metrics), rg.Cluster(cpus=2))
    assert (plan.node("preferred").rows, plan.certificate.staleness_bound) == (4, 1)
    with plan.run_here() as job:
        steps = list(job.steps(3))
    assert steps[2].staleness == 1
    assert steps[0].metrics["preference/pairs"] == 2 * steps[0].metrics["preferred/share"]

    columns = {"rewards": torch.tensor([1.0, 3.0, 0.0, 2.0, 5.0, 5.0, 5.0, 5.0]), "prompts": torch.arange(8)[:, None]}
    chosen, metrics = Preferred(("prompts",), 4, 0.0, None).choose(columns)  # type: ignore[misc]
    assert chosen["prompts"][:, 0].tolist() == [1, 2, 4, 5]  # type: ignore[call-overload, union-attr]
    assert chosen["preferences"].tolist() == [1.0, -1.0, 0.0, 0.0]  # type: ignore[union-attr]
    assert metrics["preferred/share"] == 0.5


def test_further_batches_of_one_source_have_metrics_of_their_own(model: str) -> None:
    trained = policy(model)
    source = rg.examples(SUMS, 4, trained)
    (metrics,) = run(trained.update(source, loss=rg.SFTLoss(), also=[(source, rg.SFTLoss(dft=n > 0), 1.0) for n in range(2)]).metrics)
    assert metrics["examples/sft_loss"] == pytest.approx(metrics["actor/sft_loss"])
    assert metrics["examples2/sft_loss"] < metrics["examples/sft_loss"]


def test_a_reward_model_learns_pairs_and_scores_in_the_next_graph(model: str, tmp_path: Path) -> None:
    judge = rg.LearnedReward(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=3e-3), dtype="float32", micro_batch_tokens=60)
    plan = rg.compile(rg.Graph("judge", judge.update(rg.pairs(PAIRS, 6, judge)).metrics), rg.Cluster(cpus=2))
    with plan.run_here() as job:
        steps = [step.metrics for step in job.steps(8)]
        job.export(tmp_path / "judge", dtype="float32")
    assert steps[0]["critic/vf_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert steps[-1]["reward/accuracy"] == 1.0
    assert steps[-1]["reward/margin"] > 0.1

    scorer = rg.LearnedReward(str(tmp_path / "judge"), pool=rg.Pool("judge"), dtype="float32")
    source = rg.pairs(PAIRS, 6, policy(model))
    columns = read_first_batch(source)
    engine = scorer.load(Context())
    scores = scorer.rewards(source).node.operation.fire(Context(engine=engine), columns)[0]["rewards"]  # type: ignore[attr-defined]
    engine.close()
    assert bool((scores[0::2] > scores[1::2]).all())
    from transformers import AutoModelForSequenceClassification

    net = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge", num_labels=1, dtype=torch.float32)
    length = int(columns["response_mask"][0].sum())
    whole = torch.cat([columns["prompts"][0][columns["prompt_mask"][0]], columns["responses"][0][:length]])[None]
    net.config.pad_token_id = 287
    assert scores[0].item() == pytest.approx(net(input_ids=whole).logits[0, 0].item(), abs=1e-4)


def two_players(model: str, depths: tuple[int, int]) -> rg.Graph:
    """Two generators, two updates, and a feedback edge for each, of these depths."""
    updates, rollouts = [], []
    sampling = rg.Sampling(max_tokens=3)
    asked = rg.prompts([{"prompt": "1 + 1 ="}, {"prompt": "2 ="}], count=2)
    edges = [rg.feedback(f"{name} weights", depth=d, buffers=1 + (d > 0)) for name, d in zip(("first", "second"), depths, strict=True)]
    for name, weights in zip(("first", "second"), edges, strict=True):
        generator = rg.Generator(
            model,
            pool=rg.Pool(f"{name} rollout"),
            engine="transformers",
            sampling=sampling,
            max_context=64,
            seed=len(name),
            dtype="float32",
        )
        rollouts.append(generator.rollout(asked, weights, group_size=2, name=name))
    for number, (name, weights) in enumerate(zip(("first", "second"), edges, strict=True)):
        own, other = rollouts[number], rollouts[1 - number]
        rewards = longer(own.with_prefix("own."), other.with_prefix("other."), name=f"{name} rewards")
        trained = rg.Policy(model, pool=rg.Pool(f"{name} train"), optimizer=rg.AdamW(lr=1e-3 * (number + 1)), dtype="float32")
        scored = rg.advantages(own, rewards, estimator=rg.GRPO(), name=f"{name} advantages")
        updates.append(trained.update(own, scored, loss=rg.ClippedLoss(), name=f"{name} update"))
        weights.close(updates[-1].weights)
    return rg.Graph("play", *(step.metrics for step in updates))


def test_two_policies_that_play_each_other_have_a_loop_each_and_one_certificate(model: str) -> None:
    plan = rg.compile(two_players(model, (0, 1)), rg.Cluster(cpus=4))
    assert [(loop.name, loop.depth) for loop in plan.loops] == [("first weights", 0), ("second weights", 1)]
    assert (plan.certificate.staleness_bound, plan.certificate.deadlock_free) == (1, True)
    assert [(loop.name, loop.staleness, loop.open_batches) for loop in plan.certificate.loops] == [
        ("first weights", 0, 1),
        ("second weights", 1, 2),
    ]
    with plan.run_here() as job:
        steps = list(job.steps(3))
    assert [step.staleness for step in steps] == [0, 1, 1], "of both loops the oldest"
    assert steps[2].metrics["first update/staleness/max"] == 0
    assert [steps[0].metrics[f"{name} update/actor/lr"] for name in ("first", "second")] == [1e-3, 2e-3]


@pytest.mark.parametrize("broken", [0, 1])
def test_the_bound_of_each_loop_is_checked_although_the_others_keep_theirs(model: str, broken: int) -> None:
    names = ("first", "second")
    plan = rg.compile(two_players(model, (1, 2) if broken == 0 else (2, 1)), rg.Cluster(cpus=4))
    assert plan.certificate.staleness_bound == 2
    metrics = {f"{name} update/staleness/max": float(loop.staleness) for name, loop in zip(names, plan.certificate.loops, strict=True)}
    InvariantMonitor(plan).check(5, [], 2, {}, behind=behind_by_loop(plan, metrics))
    metrics[f"{names[broken]} update/staleness/max"] += 1
    with pytest.raises(CertificateError, match=rf"staleness at most 1 in '{names[broken]} weights'\): its oldest token there is 2"):
        InvariantMonitor(plan).check(5, [], 2, {}, behind=behind_by_loop(plan, metrics))


@pytest.mark.parametrize("broken", ["first", "second"])
def test_a_credit_too_many_in_one_loop_changes_the_certificate_of_that_loop_alone(model: str, broken: str) -> None:
    graph = two_players(model, (0, 0))
    plan = rg.compile(graph, rg.Cluster(cpus=4))
    monitor = InvariantMonitor(replace(plan, certificate=replace(plan.certificate, open_batches=2)))
    one_more = tuple(
        replace(d, credits=d.credits + (d.reason == "loop" and d.before == publish_event(f"{broken} weights")))
        for d in plan.schedule.dependencies
    )
    schedule = replace(plan.schedule, dependencies=one_more)
    assert {loop.name: loop.staleness for loop in loop_bounds(graph, schedule)} == {
        name: int(name == f"{broken} weights") for name in ("first weights", "second weights")
    }
    spans = simulate(schedule, 6)

    def checked() -> None:
        for step in range(6):
            monitor.check(step, [span for span in spans if span.step == step], 0, {})

    with pytest.raises(CertificateError, match=rf"at most 1 open in '{broken} weights'\): 2 batches"):
        checked()


@pytest.mark.stage("jobs")
def test_two_policies_play_each_other_in_workers_with_the_bits_of_one_process(model: str) -> None:
    graph = two_players(model, (0, 1))
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    assert sorted(node.name for node in plan.nodes if node.work in ("generate", "train")) == sorted(
        f"{name}{what}" for name in ("first", "second") for what in ("", " update")
    )

    def numbers(step: Any) -> tuple[int, dict[str, float]]:
        return step.staleness, {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}

    with plan.run_here() as here:
        alone = [numbers(step) for step in here.steps(4)]
    with Job(graph, plan, dispatch_name="forked", deadline_s=60.0) as job:
        found = [numbers(step) for step in job.steps(4)]
    assert found == alone
    assert [staleness for staleness, _ in found] == [0, 1, 1, 1], "the second loop is one version behind"
    assert all(metrics["first update/staleness/max"] == 0 for _, metrics in found)
    assert (job.observed_maxima.staleness, plan.certificate.staleness_bound, plan.certificate.deadlock_free) == (1, 1, True)
    assert 1 <= (job.observed_maxima.open_batches or 0) <= plan.certificate.open_batches


@rg.node(reads=["own.response_mask", "other.response_mask"], writes="rewards")
def longer(batch: Any) -> Any:
    """Reward the response that is longer than the other player's to the same prompt."""
    own, other = (batch[f"{who}.response_mask"].sum(-1) for who in ("own", "other"))
    return {"rewards": torch.sign((own - other).float())}
