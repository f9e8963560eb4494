"""A batch is cut into passes as the trainer does it, and what the host takes for each pass is found in a run and foretold."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import law, run_of
from simulated import PROMPT_TOKENS, Loop
from tiny import batch_of

import rlgraph as rg
from rlgraph.engines.packing import plan_micro_batches
from rlgraph.planning.fit import Record, costs_of
from rlgraph.planning.laws import NodeCost, Setting
from rlgraph.planning.lengths import Lengths
from rlgraph.planning.passes import Passes

LIMIT, TOKEN_S, ALONE_S, SHARDED_S = 500, 1e-4, 0.02, 0.03


@given(st.lists(st.integers(1, 40), min_size=2, max_size=24), st.integers(10, 200), st.integers(1, 3))
def test_passes_are_those_of_the_trainer(lengths: list[int], limit: int, ranks: int) -> None:
    batch = batch_of(lengths, group=1)
    batch["prompt_mask"] = torch.ones_like(batch["prompt_mask"])
    plans = plan_micro_batches(batch, ranks, limit, flat=True)
    trained = [[sum(s.tokens for s in part) for part in plan] for plan in plans]
    passes = Passes(limit).of_a_rank(np.array([lengths, lengths], dtype=float), batch["prompts"].shape[1], ranks)
    assert (passes[0] == passes[1]).all()
    foretold = passes[0][passes[0] > 0].tolist()
    if ranks == 1:
        assert foretold == trained[0]
    else:  # dealt there and back, where the trainer gives each sequence to the rank that has least
        longest = max(lengths) + batch["prompts"].shape[1]
        assert abs(sum(foretold) - max(map(sum, trained))) <= longest
        assert abs(len(foretold) - len(trained[0])) <= 1 or longest > limit / 2


def test_steps_of_fewer_passes_have_none_in_the_place_of_more() -> None:
    found = Passes(10).of_a_rank(np.array([[5.0, 5.0, 5.0], [2.0, 2.0, 2.0], [50.0, 1.0, 1.0]]), 1.0, 1)
    assert found.tolist() == [[10, 5], [6, 0], [50, 2]]


def test_each_mini_batch_is_cut_by_itself() -> None:
    assert Passes(10, parts=2).of_a_rank(np.array([[4.0, 4.0, 4.0, 4.0]]), 1.0, 1).tolist() == [[8, 8]]


def seconds(cost: NodeCost, setting: Setting, tokens: float) -> float:
    return rg.Costs({"node": cost}, lengths=Lengths((0.0, 1.0), (tokens, tokens))).mean("node", setting)


def test_a_pass_takes_as_long_as_its_tokens_but_no_less_than_its_launch() -> None:
    cost = NodeCost(serial_s=1.0, token_s=0.1, pass_s=2.0, sharded_pass_s=3.0)
    assert seconds(cost, Setting(rows=5, passes=Passes(40)), 10) == pytest.approx(1.0 + 4.0 + 2.0)
    assert seconds(cost, Setting(2, 2, 10, Passes(40)), 10) == pytest.approx(1.0 + 4.0 + 3.0), "each rank has half of the rows"
    assert seconds(cost, Setting(2, 1, 5, Passes(40)), 10) == pytest.approx(1.0 + 2.0 + 2.0), "one rank with two devices"
    assert seconds(cost, Setting(rows=5), 10) == pytest.approx(1.0 + 5.0), "where passes are not known tokens count"


def trained(passes: Passes, ranks: int, least_s: float) -> Callable[[str, list[int]], float]:
    """Return the law of an update whose passes take that long at least."""

    def taken(event: str, lengths: list[int]) -> float:
        if event != "update":
            return 0.01
        each = passes.of_a_rank(np.array([lengths], dtype=float), PROMPT_TOKENS, ranks)
        return float(np.maximum(each[each > 0] * TOKEN_S, least_s).sum())

    return taken


def run_on_gpus(loop: Loop, tokens: tuple[float, float], least_s: float) -> Record:
    """Return the record of a run on GPUs."""
    run = run_of(loop, trained(Passes(LIMIT), loop.trainers, least_s), lengths=Lengths((0.0, 1.0), tokens))
    return Record(*run)


ALONE = [run_on_gpus(Loop(depth=1, micro_batch_tokens=LIMIT), tokens, ALONE_S) for tokens in ((20, 90), (60, 200))]
SHARDED = run_on_gpus(Loop(depth=1, trainers=2, micro_batch_tokens=LIMIT), (20, 90), SHARDED_S)


def test_what_the_host_takes_for_a_pass_is_found() -> None:
    update = law(costs_of(ALONE), "update")
    assert update.token_s == pytest.approx(TOKEN_S, rel=0.01)
    assert update.pass_s == pytest.approx(ALONE_S, rel=0.03)
    assert (update.serial_s, update.sharded_pass_s) == (pytest.approx(0.0, abs=1e-6), 0.0)


def test_a_run_on_more_devices_tells_what_a_sharded_pass_takes_and_nothing_else() -> None:
    both, alone = costs_of([*ALONE, SHARDED]), costs_of(ALONE)
    assert law(both, "update").sharded_pass_s == pytest.approx(SHARDED_S, rel=0.02)
    assert replace(law(both, "update"), sharded_pass_s=0.0) == law(alone, "update")
    assert replace(both, nodes=alone.nodes) == alone
    assert costs_of([SHARDED, *ALONE]).on != alone.on, "the devices are those of the first"


@pytest.mark.parametrize("rows", [16, 48])
def test_an_update_on_other_devices_is_foretold_by_its_passes(rows: int) -> None:
    loop = Loop(depth=1, rows=rows, trainers=2, micro_batch_tokens=LIMIT)
    costs = costs_of([*ALONE, SHARDED])
    assert costs.lengths is not None
    truth = trained(Passes(LIMIT), 2, SHARDED_S)
    drawn = costs.lengths.batches(400, rows).astype(int).tolist()
    told = rg.compile(loop.graph(), rg.Cluster(gpus=3), costs).node("update").seconds
    assert told == pytest.approx(np.mean([truth("update", lengths) for lengths in drawn]), rel=0.03)


def test_where_launching_takes_nothing_next_to_nothing_is_found() -> None:
    run = run_on_gpus(Loop(depth=1, micro_batch_tokens=LIMIT), (20, 90), 1e-6)
    assert law(costs_of([run]), "update").pass_s < 0.1 * TOKEN_S * LIMIT
