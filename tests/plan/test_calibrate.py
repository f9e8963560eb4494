"""Costs from a run: the functions behind its firings are found again, latencies included, and nothing that they do not show."""

import re
from dataclasses import replace

import numpy as np
import pytest
from support.recorded_runs import STEPS, cost_of, record_run
from support.simulated_stages import LONG_TAIL, PROMPT_TOKENS, UNIFORM, Loop

import rlgraph as rg
from rlgraph.plan.calibrate import Trace, by_passes, costs_of, measured_costs, share_of
from rlgraph.plan.cost_functions import NodeCost, Setting
from rlgraph.plan.lengths import Lengths
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import Event, Sampled, Span


def by_length(event: str, lengths: list[int]) -> float:
    if event == "rollout":
        return 2e-3 * max(lengths) + 1e-4 * sum(lengths)
    return 0.05 + 2e-4 * (sum(lengths) + PROMPT_TOKENS * len(lengths)) if event == "update" else 0.01


def test_the_functions_of_decoding_and_training_are_found() -> None:
    costs = measured_costs(*record_run(Loop(depth=1), by_length))
    decode = cost_of(costs, "rollout").decode
    assert decode is not None
    assert (decode.step_s, decode.sequence_s) == (pytest.approx(2e-3, rel=1e-3), pytest.approx(1e-4, rel=1e-3))
    assert cost_of(costs, "update").token_s == pytest.approx(2e-4, rel=1e-3)
    assert cost_of(costs, "update").serial_s == pytest.approx(0.05, rel=1e-2)
    assert cost_of(costs, "reward").parallel_s == pytest.approx(0.01)


def test_noise_is_kept_as_spread() -> None:
    chance = np.random.default_rng(3)
    noisy = measured_costs(*record_run(Loop(depth=1), lambda event, lengths: 0.1 * chance.uniform(0.8, 1.2)))
    update = cost_of(noisy, "update")
    assert (update.token_s, update.parallel_s) == (0.0, pytest.approx(0.1, rel=0.05))
    assert np.std(update.spread) == pytest.approx(0.4 / np.sqrt(12), rel=0.3)


def test_a_slow_first_step_makes_no_latency_of_the_prompts_that_the_window_holds() -> None:
    """The first update compiles for 100 s. The driver begins a step once all have ended that are as old as the window is long."""
    updates = iter([100.0])
    plan, spans, sampled = record_run(
        Loop(depth=1), lambda event, lengths: next(updates, 2.0) if event == "update" else by_length(event, lengths)
    )
    ends = {step: max(span.end_s for span in spans if span.step == step) for step in range(STEPS)}
    late = {span: max(ends.get(span.step - plan.window, 0.0) - span.start_s, 0.0) for span in spans if span.name == "prompts"}
    assert max(late.values()) > 90
    held = [
        replace(span, start_s=span.start_s + late.get(span, 0.0), end_s=span.end_s + late.get(span, 0.0)) for span in spans if span.step < 8
    ]
    assert cost_of(measured_costs(plan, held, sampled), "prompts").serial_s == pytest.approx(0.0, abs=1e-3)


def test_lengths_that_hardly_vary_claim_one_number_only() -> None:
    same = Lengths((0.0, 1.0), (50.0, 50.0))
    costs = measured_costs(*record_run(Loop(depth=1), by_length, lengths=same))
    decode = cost_of(costs, "rollout").decode
    assert decode is not None
    assert sum(value > 0 for value in (decode.step_s, decode.sequence_s, decode.prefill_s, decode.start_s)) == 1


def test_two_batch_sizes_separate_the_constant_part_from_the_part_that_grows() -> None:
    same = Lengths((0.0, 1.0), (50.0, 50.0))
    loops = Loop(depth=1), Loop(depth=1, rows=Loop().rows // 2)

    def seconds(event: str, lengths: list[int]) -> float:
        return 0.03 + 1e-3 * len(lengths) if event == "reward" else by_length(event, lengths)

    costs = costs_of([Trace(*record_run(loop, seconds, lengths=same)) for loop in loops])
    twice = rg.compile(Loop(depth=1, rows=2 * Loop().rows).graph(), rg.Cluster(cpus=2), costs)
    for node in ("rollout", "reward", "update"):
        assert twice.node(node).seconds == pytest.approx(seconds(node, [50] * 2 * Loop().rows), rel=1e-3)
    assert costs.lengths == Lengths.fit([50], PROMPT_TOKENS)


def claimed(sizes: tuple[int, ...], seed: int) -> set[str]:
    """Fit decoding to noisy runs with batches of these sizes whose responses are equally long."""
    chance = np.random.default_rng(seed)

    def noisy(event: str, lengths: list[int]) -> float:
        return by_length(event, lengths) * chance.uniform(0.95, 1.05)

    def recorded(size: int) -> Trace:
        plan, spans, sampled = record_run(Loop(depth=1, rows=size * Loop().rows), noisy, lengths=Lengths((0.0, 1.0), (50.0, 50.0)))
        return Trace(plan, spans, [replace(s, prompt_tokens=s.prompt_tokens + int(chance.integers(9))) for s in sampled])

    decode = cost_of(costs_of([recorded(size) for size in sizes]), "rollout").decode
    assert decode is not None
    return {name for name in ("step_s", "sequence_s", "prefill_s", "start_s") if getattr(decode, name)}


@pytest.mark.parametrize(("sizes", "expected"), [((1,), {"step_s"}), ((1, 2), {"step_s", "sequence_s"})])
def test_where_all_lengths_are_equal_time_is_of_decoding_whatever_the_noise(sizes: tuple[int, ...], expected: set[str]) -> None:
    assert [claimed(sizes, seed) for seed in range(10)] == [expected] * 10


@pytest.mark.parametrize("loop", [Loop(depth=0), Loop(depth=1), Loop(depth=3), Loop(depth=1, shared=True)])
def test_a_plan_with_the_costs_of_a_run_predicts_that_run_latencies_included(loop: Loop) -> None:
    """In one pool at depth 1 the update waits for the rollout of the next batch too, whose tokens it does not train on."""
    plan, spans, sampled = record_run(loop, by_length, late_s=0.02)
    costs = measured_costs(plan, spans, sampled)
    ends = [max(s.end_s for s in spans if s.step == step) for step in range(STEPS)]
    again = rg.compile(loop.graph(), rg.Cluster(cpus=loop.devices), costs)
    assert again.prediction.step_s == pytest.approx((ends[-1] - ends[4]) / (STEPS - 5), rel=0.05)
    assert {node.cost for node in again.nodes} == {"measured"}


def test_a_trace_that_begins_in_the_middle_of_a_run_charges_no_event_for_earlier_waits() -> None:
    """Weights come from a step before the record, and a second buffer takes them unseen: the generator waited, it was not late."""
    plan, spans, sampled = record_run(Loop(depth=1, buffers=2), lambda event, _: 0.5 if event == "update" else 0.1, late_s=0.02)
    seen = [span for span in spans if span.kind != "receive"]
    whole, cut = (measured_costs(plan, kept, sampled) for kept in (seen, [span for span in seen if span.step >= STEPS - 6]))
    assert cut.swap_s == pytest.approx(whole.swap_s, rel=0.05)


def test_weights_that_interrupt_a_firing_are_not_counted_in_it_and_have_no_latency() -> None:
    plan, spans, sampled = record_run(Loop(depth=2), by_length)
    loads = {span.step: span for span in spans if span.kind == "load"}

    def interrupted(span: Span) -> Span:
        """Begin the rollout where its weights were loaded, and load them shortly before it ends."""
        if span.kind == "load":
            end_s = next(s.end_s for s in spans if (s.name, s.step) == ("rollout", span.step)) - 0.01
            return replace(span, start_s=end_s - span.seconds, end_s=end_s)
        return replace(span, start_s=loads[span.step].start_s) if span.name == "rollout" and span.step in loads else span

    apart, within = (measured_costs(plan, run, sampled) for run in (spans, [interrupted(span) for span in spans]))
    assert within.swap_s == pytest.approx(apart.swap_s)
    predicted = [rg.compile(Loop(depth=2).graph(), rg.Cluster(cpus=2), costs).prediction.step_s for costs in (apart, within)]
    assert predicted[1] == pytest.approx(predicted[0], rel=0.01)


def test_chunks_of_a_batch_are_measured_together_and_predicted_apart() -> None:
    costs = measured_costs(*record_run(Loop(depth=1), by_length))
    whole, parts = (rg.compile(Loop(depth=0, chunks=chunks).graph(), rg.Cluster(cpus=2), costs) for chunks in (1, 4))
    seconds = [event.seconds for event in parts.schedule.events if event.node == "rollout" and event.kind == "fire"]
    assert sum(seconds) == pytest.approx(whole.node("rollout").seconds)
    assert seconds[0] > 0.5 * sum(seconds)  # a quarter of the responses holds a long one already
    saved = whole.prediction.step_s - parts.prediction.step_s
    reward_s = whole.node("reward").seconds
    assert 0.25 * reward_s < saved < 0.75 * reward_s  # parts that leave together, behind one long response, hide nothing


def test_costs_are_scaled_to_other_rows_and_devices_and_say_so() -> None:
    costs = measured_costs(*record_run(Loop(depth=1), by_length))
    larger = rg.compile(Loop(depth=1, rows=32, trainers=2).graph(), rg.Cluster(cpus=3), costs)
    truth = np.mean([by_length("rollout", row.tolist()) for row in LONG_TAIL.batches(400, 32).astype(int)])
    assert larger.node("rollout").seconds == pytest.approx(truth, rel=0.05)
    assert larger.node("rollout").cost == "scaled"
    assert "(scaled to this plan: prompts, rollout, reward, update)" in " ".join(str(larger).split())


def rollout_on(cores: int, costs: rg.planning.Costs) -> rg.Plan:
    """A plan in which the one engine of the rollout has so many cores."""
    return rg.compile(Loop(depth=1, lengths=UNIFORM, rollout_share=cores).graph(), rg.Cluster(cpus=1 + cores), costs)


def profiled_on(cores: int, kept: float) -> Trace:
    """A run in which the one engine of the rollout has so many cores, of which each doubling keeps a share of the ideal speed-up."""
    faster = cores * kept ** np.log2(cores)
    loop = Loop(depth=1, rollout_share=cores)
    plan, spans, sampled = record_run(
        loop, lambda event, lengths: by_length(event, lengths) / (faster if event == "rollout" else 1.0), lengths=UNIFORM, cores=1 + cores
    )
    return Trace(plan, spans, sampled)


@pytest.mark.parametrize("kept", [0.5, 0.7, 1.0])
def test_engines_of_two_widths_show_what_a_wider_one_gains(kept: float) -> None:
    costs = costs_of([profiled_on(2, kept), profiled_on(1, kept)])
    decode = cost_of(costs, "rollout").decode
    assert decode is not None
    assert decode.doubling == pytest.approx(kept, rel=0.02)
    for cores in (1, 2, 4):
        plan = rollout_on(cores, costs)
        truth = (
            np.mean([by_length("rollout", row.tolist()) for row in UNIFORM.batches(400, 16).astype(int)]) / cores / kept ** np.log2(cores)
        )
        assert plan.node("rollout").seconds == pytest.approx(truth, rel=0.05)
        assert plan.prediction.assumed == ()


def test_a_width_that_no_run_had_is_said_to_be_assumed_with_bounds_that_hold() -> None:
    costs = costs_of([profiled_on(2, 0.5)])
    plan = rollout_on(1, costs)
    (said,) = plan.prediction.assumed
    assert "'rollout' was measured on 2 cores an engine and is predicted on 1" in said
    low, high = map(float, re.findall(r"([\d.]+) s if it keeps (?:nothing|all)", said))
    truth = np.mean([by_length("rollout", row.tolist()) for row in UNIFORM.batches(400, 16).astype(int)])
    assert 0.97 * low <= truth <= high
    assert low < plan.node("rollout").seconds < high
    assert "assumed: 'rollout' was measured on 2 cores" in " ".join(str(plan).split())
    assert rollout_on(2, costs).prediction.assumed == ()


@pytest.mark.parametrize("sizes", [(1,), (1, 2)])
def test_one_size_of_batch_does_not_tell_steps_from_sequences_which_is_said_with_bounds_that_hold(sizes: tuple[int, ...]) -> None:
    same = Lengths((0.0, 1.0), (50.0, 50.0))
    costs = costs_of([Trace(*record_run(Loop(depth=1, rows=size * Loop().rows), by_length, lengths=same)) for size in sizes])
    there, larger = (rg.compile(Loop(depth=1, rows=rows).graph(), rg.Cluster(cpus=2), costs) for rows in (16, 64))
    truth = by_length("rollout", [50] * 64)
    assert there.prediction.assumed == ()
    if len(sizes) == 2:
        assert larger.prediction.assumed == ()
        assert larger.node("rollout").seconds == pytest.approx(truth, rel=0.01)
        return
    (said,) = larger.prediction.assumed
    assert "'rollout' was measured on 16 responses per engine and is predicted on 64" in said
    low, high = map(float, said.split(" alone, ")[1].split(" s if")[0].split(" to "))
    assert low <= truth <= high
    assert "profile batches of two sizes" in said


def test_an_update_on_a_rollout_and_examples_is_predicted_to_take_what_it_took() -> None:
    setting = Setting(devices=1, engines=1, rows=72)  # 64 of a rollout, and 8 examples
    chance = np.random.default_rng(5)
    sampled = [Sampled("rollout", step, "generator", 64 * 20, tuple(chance.integers(4, 9, 64).tolist())) for step in range(12)]
    cost = by_passes(setting, [share_of(setting, [each]) for each in sampled], np.full(12, 2.6), NodeCost())
    lengths = Lengths.fit([length for each in sampled for length in each.response_tokens], 20)
    assert cost.token_s > 0
    assert cost.seconds(setting, lengths, 12, 72).mean() == pytest.approx(2.6, rel=0.01)


def test_the_lengths_of_a_run_are_in_its_costs() -> None:
    costs = measured_costs(*record_run(Loop(depth=1), by_length, lengths=UNIFORM))
    assert costs.lengths is not None
    assert 60 <= costs.lengths.tokens[0] <= costs.lengths.mean <= costs.lengths.longest <= 120
    assert costs.lengths.prompt_tokens == PROMPT_TOKENS


def right(response: str, answer: str) -> float:
    return float(response == answer)


def evaluated(*, at_start: bool) -> rg.Graph:
    """Fine-tuning that is evaluated every 8 steps, beside it."""
    policy, generator = rg.Policy("tiny", pool=rg.Pool("train")), rg.Generator("tiny", pool=rg.Pool("evaluation"))
    step = policy.update(rg.examples([{"prompt": "1 + 1 =", "completion": " 2"}], 2, policy), loss=rg.SFTLoss())
    weights = rg.feedback("weights", depth=0)
    score = rg.evaluate(generator, [{"prompt": "2 =", "answer": "2"}], weights, reward=right, every=8, at_start=at_start)
    weights.close(step.weights)
    return rg.Graph("evaluated", step.metrics, score)


def profiled(graph: rg.Graph, steps: int) -> rg.Plan:
    """Plan the graph with the costs of a run of so many steps, in which an update takes 2 s and an evaluation 24 s."""
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    due = plan.due_events()

    def happens(name: str, step: int) -> bool:
        return name not in due or due[name](step)

    def seconds(event: Event, step: int) -> float:
        return {"update": 2.0, "evaluate": 24.0}.get(event.name, 0.0) if happens(event.name, step) else 0.0

    spans = [span for span in simulate(plan.schedule, steps, seconds) if happens(span.name, span.step)]
    return rg.compile(graph, rg.Cluster(cpus=2), measured_costs(plan, spans, []))


@pytest.mark.parametrize("steps", [4, 17])
def test_an_evaluation_counts_although_it_fired_while_the_run_warmed_up_alone(steps: int) -> None:
    plan = profiled(evaluated(at_start=True), steps)
    assert plan.prediction.step_s == pytest.approx(24.0 / 8, rel=0.01)
    assert not plan.prediction.left_out


def test_a_plan_says_that_an_evaluation_did_not_fire_in_the_run_that_was_measured() -> None:
    plan = profiled(evaluated(at_start=False), 4)
    assert plan.prediction.step_s == pytest.approx(2.0, rel=0.01)
    (said, *_) = plan.prediction.left_out
    assert said.startswith("'evaluate' is due every 8 steps and did not fire in the run that was measured")
