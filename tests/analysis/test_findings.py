"""Findings match the run: for each observation of the tuning guide, one run that shows it and one that does not."""

from dataclasses import replace

import pytest
from support import fakes
from support.simulated_run import simulate_run

import rlgraph as rg
from rlgraph.analysis.findings import findings
from rlgraph.analysis.run import Run
from rlgraph.plan.cost_functions import SleepCost
from rlgraph.plan.plan import Plan


def plan(depth: int, generate_s: float, train_s: float, score_s: float = 0.001, moving_s: float = 0.0, cpus: int = 8) -> Plan:
    nodes = {"prompts": 0.001, "rollout": generate_s, "score": score_s, "update": train_s}
    return rg.compile(fakes.vector_loop(depth), rg.Cluster(cpus=cpus), rg.planning.Costs(nodes, publish_s=moving_s, swap_s=moving_s))


def time_shared(sleep_s: float) -> Plan:
    graph = fakes.vector_loop(0, pools=(pool := rg.Pool("both"), pool))
    costs = rg.planning.Costs(
        {"prompts": 0.001, "rollout": 2.0, "score": 0.001, "update": 2.0}, sleep={"policy": SleepCost(sleep_s, sleep_s)}
    )
    return rg.compile(graph, rg.Cluster(gpus=1), costs)


def said(run: Run) -> str:
    return "\n".join(findings(run))


def with_metric(run: Run, name: str, value: float) -> Run:
    return replace(run, steps=tuple({**step, name: value} for step in run.steps))


def test_notices_come_first_and_do_not_replace_the_other_findings() -> None:
    run = simulate_run(plan(1, 3.0, 1.0), 30, tail=1.8)
    assert findings(replace(run, notices=("the loader copies",))) == ("the loader copies", *findings(run))


def test_a_trainer_that_waits_with_even_lengths_is_advised_a_split_with_more_rollout() -> None:
    advice = said(simulate_run(plan(1, 3.0, 1.0), 30, tail=1.8))
    assert "wait_prev_gen is high" in advice
    assert "'train' waits 6" in advice  # two thirds of its time
    assert "share 6:2 for 'rollout':'train' instead of 4:4" in advice
    assert "max_tokens" not in advice


def test_a_trainer_that_waits_for_a_long_tail_is_advised_shorter_responses_not_devices() -> None:
    advice = said(simulate_run(plan(1, 3.0, 1.0), 30, tail=10.0))
    assert "lengths have a long tail (the longest is 10.0 times" in advice
    assert "cap max_tokens, set continuous=True, or raise depth above 1" in advice
    assert "share" not in advice


def test_a_generator_that_waits_for_versions_is_advised_more_training_devices() -> None:
    advice = said(simulate_run(plan(1, 1.0, 3.0), 30))
    assert "training limits the step; share 2:6 for 'rollout':'train' instead of 4:4" in advice
    assert "wait_prev_gen" not in advice


def test_sides_that_alternate_are_advised_one_version_of_staleness() -> None:
    advice = said(simulate_run(plan(0, 3.0, 1.0), 30))
    assert "with depth=1 they overlap, at one version of staleness, and a step can come near 3.0" in advice, "the longer side's seconds"
    assert "(now 4.0" in advice


def test_sides_that_overlap_well_get_no_advice_to_change() -> None:
    advice = findings(simulate_run(plan(1, 2.0, 2.0), 30, jitter=0.0))
    assert len(advice) == 1
    assert "overlap well" in advice[0]


def test_visible_weight_transfers_are_advised_a_second_buffer() -> None:
    assert "buffers=2 receives it while the generator decodes" in said(simulate_run(plan(1, 2.0, 1.9, moving_s=0.2), 30))
    assert "buffers=2" not in said(simulate_run(plan(1, 2.0, 1.9), 30))


def test_a_slow_reward_is_named() -> None:
    assert "waits" in said(simulate_run(plan(0, 1.0, 1.0, score_s=0.5), 30))
    assert "for 'score' (0.5" in said(simulate_run(plan(0, 1.0, 1.0, score_s=0.5), 30))
    assert "'score'" not in said(simulate_run(plan(0, 1.0, 1.0), 30))


OUT_OF_BOUNDS = [
    ("rollout_corr/k3_kl", 0.001, 0.05, "different log-probs"),
    ("actor/pg_clipfrac", 0.02, 0.5, "the loss clips 50% of the tokens"),
    ("critic/advantages/zero", 0.5, 1.0, "100% of the responses have an advantage of 0"),
]


@pytest.mark.parametrize(("metric", "small", "large", "words"), OUT_OF_BOUNDS)
def test_a_metric_out_of_bounds_is_named(metric: str, small: float, large: float, words: str) -> None:
    run = simulate_run(plan(1, 2.0, 2.0), 30, jitter=0.0)
    assert words not in said(with_metric(run, metric, small))
    assert words in said(with_metric(run, metric, large))


def test_log_probs_of_a_stale_policy_are_no_mismatch() -> None:
    stale, fresh = (with_metric(simulate_run(plan(depth, 2.0, 2.0), 30), "actor/ppo_kl_abs", 0.3) for depth in (1, 0))
    assert "different log-probs" not in said(stale)
    assert "different log-probs" in said(fresh)


def test_a_run_without_steps_has_no_findings() -> None:
    run = simulate_run(plan(1, 2.0, 2.0), 4)
    assert findings(replace(run, steps=(), spans=())) == ()


def test_a_nan_metric_is_ignored() -> None:
    run = with_metric(simulate_run(plan(1, 2.0, 2.0), 30, jitter=0.0), "actor/pg_clipfrac", float("nan"))
    assert "clips" not in said(run)


def test_engines_that_wake_and_sleep_for_long_are_advised_larger_batches() -> None:
    assert "engines that time-share 'both' wake and sleep for 20% of its time" in said(simulate_run(time_shared(0.5), 30))
    assert "time-share" not in said(simulate_run(time_shared(0.1), 30))
