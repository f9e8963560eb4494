"""A batch is cut into passes as the trainer does it, and what the host takes for each pass is found in a run and predicted."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recorded_runs import cost_of, record_run
from support.simulated_stages import PROMPT_TOKENS, Loop
from support.tiny import batch_of

import rlgraph as rg
from rlgraph.batching.packing import plan_micro_batches
from rlgraph.nodes.training.update import UpdateSchedule
from rlgraph.plan.calibrate import Trace, costs_of
from rlgraph.plan.cost_functions import NodeCost, Passes, Setting
from rlgraph.plan.lengths import Lengths

LIMIT, TOKEN_S, ALONE_S, SHARDED_S = 500, 1e-4, 0.02, 0.03


@settings(deadline=None)
@given(
    *(st.lists(st.integers(0, 40), min_size=2, max_size=24), st.integers(10, 200), st.integers(1, 5), st.integers(1, 3)),
    st.sampled_from([1, 2, 3, 8]),
)
def test_passes_are_those_of_the_trainer(lengths: list[int], limit: int, ranks: int, mini_batches: int, group: int) -> None:
    step = mini_batches * group
    lengths = (lengths * step)[: len(lengths) // mini_batches * step] or [1] * step
    batch = batch_of([*lengths, *[40] * group], group=group)
    batch["prompt_mask"] = torch.ones_like(batch["prompt_mask"])
    trained: list[int] = []
    for mini_batch in UpdateSchedule(mini_batches=mini_batches).cut({name: column[:-group] for name, column in batch.items()}):
        plans = plan_micro_batches(mini_batch, ranks, limit, flat=True, shared=group > 1)
        trained += [max(sum(s.tokens for s in plan[index]) for plan in plans) for index in range(len(plans[0]))]
    cut = Passes(limit, mini_batches, group=group)
    passes = cut.of_a_rank(np.array([lengths, lengths], dtype=float), batch["prompts"].shape[1], ranks)
    assert (passes[0] == passes[1]).all()
    assert passes[0][passes[0] > 0].tolist() == trained


@given(st.lists(st.integers(1, 40), min_size=4, max_size=24), st.integers(10, 400), st.integers(1, 6), st.integers(1, 30))
def test_shared_prompts_never_take_more_tokens_than_own_ones(lengths: list[int], limit: int, ranks: int, prompt: int) -> None:
    rows = np.array([lengths], dtype=float)
    shared, own = (Passes(limit, group=group).of_a_rank(rows, prompt, ranks).sum() for group in (4, 1))
    assert shared <= own


def test_sixteen_responses_behind_one_prompt_count_it_once() -> None:
    """Each response without its last token, which predicts nothing."""
    rows = np.full((1, 16), 257.0)
    found = {group: Passes(16384, group=group).of_a_rank(rows, 1024, 1).sum() for group in (1, 16)}
    assert found == {1: 20480, 16: 5120}


def test_ranks_without_work_get_responses_behind_another_copy_of_the_prompt() -> None:
    rows = np.full((1, 16), 257.0)
    found = [Passes(16384, group=16).of_a_rank(rows, 1024, ranks).sum() for ranks in (1, 2, 4, 16)]
    assert found == [5120, 1024 + 8 * 256, 1024 + 4 * 256, 1024 + 256]


def test_an_update_whose_passes_cost_no_launch_counts_shared_prompts_once() -> None:
    cost = NodeCost(token_s=0.1)
    own, shared = (
        rg.planning.Costs({"node": cost}, lengths=Lengths((0.0, 1.0), (11.0, 11.0), 20.0)).mean(
            "node", Setting(1, 1, 4, Passes(1000, group=group))
        )
        for group in (1, 4)
    )
    assert (own, shared) == (pytest.approx(0.1 * 4 * 31), pytest.approx(0.1 * (20 + 4 * 10)))


def test_steps_of_fewer_passes_have_none_in_the_place_of_more() -> None:
    found = Passes(10).of_a_rank(np.array([[5.0, 5.0, 5.0], [2.0, 2.0, 2.0], [50.0, 1.0, 1.0]]), 1.0, 1)
    assert found.tolist() == [[10, 5], [6, 0], [50, 2]]


def test_each_mini_batch_is_cut_by_itself() -> None:
    assert Passes(10, mini_batches=2).of_a_rank(np.array([[4.0, 4.0, 4.0, 4.0]]), 1.0, 1).tolist() == [[8, 8]]


def seconds(cost: NodeCost, setting: Setting, tokens: float) -> float:
    return rg.planning.Costs({"node": cost}, lengths=Lengths((0.0, 1.0), (tokens, tokens))).mean("node", setting)


def test_a_pass_takes_as_long_as_its_tokens_but_no_less_than_its_launch() -> None:
    cost = NodeCost(serial_s=1.0, token_s=0.1, pass_s=2.0, sharded_pass_s=3.0)
    assert seconds(cost, Setting(rows=5, passes=Passes(40)), 10) == pytest.approx(1.0 + 4.0 + 2.0)
    assert seconds(cost, Setting(2, 2, 10, Passes(40)), 10) == pytest.approx(1.0 + 4.0 + 3.0), "each rank has half of the rows"
    assert seconds(cost, Setting(2, 1, 5, Passes(40)), 10) == pytest.approx(1.0 + 2.0 + 2.0), "one rank with two devices"
    assert seconds(cost, Setting(rows=5), 10) == pytest.approx(1.0 + 5.0), "where passes are not known tokens count"


def trained(passes: Passes, ranks: int, least_s: float) -> Callable[[str, list[int]], float]:
    """Make the cost of an update whose passes take at least so long."""

    def taken(event: str, lengths: list[int]) -> float:
        if event != "update":
            return 0.01
        each = passes.of_a_rank(np.array([lengths], dtype=float), PROMPT_TOKENS, ranks)
        return float(np.maximum(each[each > 0] * TOKEN_S, least_s).sum())

    return taken


def run_on_gpus(loop: Loop, tokens: tuple[float, float], least_s: float) -> Trace:
    """Make the trace of a run on GPUs."""
    run = record_run(loop, trained(Passes(LIMIT), loop.trainers, least_s), lengths=Lengths((0.0, 1.0), tokens))
    return Trace(*run)


ALONE = [run_on_gpus(Loop(depth=1, micro_batch_tokens=LIMIT), tokens, ALONE_S) for tokens in ((20, 90), (60, 200))]
SHARDED = run_on_gpus(Loop(depth=1, trainers=2, micro_batch_tokens=LIMIT), (20, 90), SHARDED_S)


def test_what_the_host_takes_for_a_pass_is_found() -> None:
    update = cost_of(costs_of(ALONE), "update")
    assert update.token_s == pytest.approx(TOKEN_S, rel=0.01)
    assert update.pass_s == pytest.approx(ALONE_S, rel=0.03)
    assert (update.serial_s, update.sharded_pass_s) == (pytest.approx(0.0, abs=1e-6), 0.0)


def test_a_run_on_more_devices_tells_what_a_sharded_pass_takes() -> None:
    both, alone = costs_of([*ALONE, SHARDED]), costs_of(ALONE)
    assert cost_of(both, "update").sharded_pass_s == pytest.approx(SHARDED_S, rel=0.02)
    assert replace(cost_of(both, "update"), sharded_pass_s=0.0) == cost_of(alone, "update")
    assert replace(both, nodes=alone.nodes) == alone
    assert costs_of([SHARDED, *ALONE]).on != alone.on, "the devices are those of the first"


def test_a_rank_that_waits_for_the_other_makes_no_pass_longer_and_is_not_handed_over_sooner() -> None:
    """One rank begins early, and waits within its firing; the wait is known already as what kept the other."""
    loop = Loop(depth=1, trainers=2, micro_batch_tokens=LIMIT)
    both = Trace(*record_run(loop, trained(Passes(LIMIT), 2, SHARDED_S), late_s=0.02, lengths=Lengths((0.0, 1.0), (20, 90))))
    early = [replace(span, worker="policy[1]", start_s=span.start_s - 0.5) for span in both.spans if span.name == "update"]
    skewed = replace(both, spans=[*both.spans, *early])
    assert costs_of([skewed]) == costs_of([both])
    assert cost_of(costs_of([*ALONE, skewed]), "update") == cost_of(costs_of([*ALONE, both]), "update")


def decoding(loop: Loop) -> Trace:
    """Make the trace of a run in which all responses are equally long, and an engine takes a time for each of their tokens."""
    same = Lengths((0.0, 1.0), (50.0, 50.0))
    return Trace(*record_run(loop, lambda event, lengths: 0.1 + 1e-3 * len(lengths) if event == "rollout" else 0.01, lengths=same))


def test_an_engine_as_wide_tells_on_any_devices_what_decoding_takes() -> None:
    one, time_shared = decoding(Loop(depth=1)), decoding(Loop(depth=0, shared=True, rows=32))
    found = cost_of(costs_of([one, time_shared]), "rollout").decode
    assert found is not None
    told = [found.seconds(np.full((1, rows), 50.0), PROMPT_TOKENS, 1)[0, 0] for rows in (16, 32)]
    assert told == [pytest.approx(0.1 + 1e-3 * 16), pytest.approx(0.1 + 1e-3 * 32)]
    wide = decoding(Loop(depth=1, generators=2, rows=32))
    wide = replace(wide, plan=replace(wide.plan, pools=tuple(replace(pool, cpus=4) for pool in wide.plan.pools)))
    both, alone = costs_of([one, wide]), costs_of([one])
    assert [cost_of(both, node) for node in ("rollout", "update")] == [cost_of(alone, node) for node in ("rollout", "update")]


@pytest.mark.parametrize("rows", [16, 48])
def test_an_update_on_other_devices_is_predicted_by_its_passes(rows: int) -> None:
    loop = Loop(depth=1, rows=rows, trainers=2, micro_batch_tokens=LIMIT)
    costs = costs_of([*ALONE, SHARDED])
    assert costs.lengths is not None
    truth = trained(Passes(LIMIT), 2, SHARDED_S)
    drawn = costs.lengths.batches(400, rows).astype(int).tolist()
    told = rg.compile(loop.graph(), rg.Cluster(gpus=3), costs).node("update").seconds
    assert told == pytest.approx(np.mean([truth("update", lengths) for lengths in drawn]), rel=0.03)


def test_where_launching_takes_nothing_next_to_nothing_is_found() -> None:
    run = run_on_gpus(Loop(depth=1, micro_batch_tokens=LIMIT), (20, 90), 1e-6)
    assert cost_of(costs_of([run]), "update").pass_s < 0.1 * TOKEN_S * LIMIT
