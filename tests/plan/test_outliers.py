"""A machine that stands still now and then does not change what a node is said to cost."""

import numpy as np
import pytest

from rlgraph.plan import calibrate
from rlgraph.plan.calibrate import Share, by_passes, fewest
from rlgraph.plan.cost_functions import NodeCost, Setting

draw = np.random.default_rng(3)
TOKENS = draw.uniform(500, 1500, 100)
SECONDS = 0.02 + 1e-4 * TOKENS + draw.normal(0, 5e-4, 100)
STALLED = SECONDS + np.where(np.arange(100) % 40 == 7, 0.5, 0.0)


def test_the_function_of_a_node_is_found_although_three_firings_of_a_hundred_stalled() -> None:
    found = by_passes(Setting(2, 1, 16), [Share(tokens / 2) for tokens in TOKENS], STALLED, NodeCost())
    assert found.serial_s == pytest.approx(0.02, rel=0.1)
    assert found.token_s == pytest.approx(2e-4, rel=0.05)


def test_stalls_stay_in_the_spread_where_they_are_seen_often_enough() -> None:
    assert max(by_passes(Setting(1, 1, 16), [Share(tokens) for tokens in TOKENS], STALLED, NodeCost()).spread) > 2


def test_a_constant_node_costs_what_it_usually_takes() -> None:
    assert calibrate.mean(np.array([0.1] * 30 + [0.9])) == pytest.approx(0.1)


def test_of_five_firings_one_may_be_a_stall_and_of_four_none() -> None:
    assert calibrate.mean(np.array([0.9, 0.1, 0.1, 0.1, 0.1])) == pytest.approx(0.1)
    assert calibrate.mean(np.array([0.9, 0.1, 0.1, 0.1])) == pytest.approx(0.3)


def test_slow_firings_that_are_one_in_ten_are_no_stalls() -> None:
    seconds = np.array([0.1] * 27 + [0.9] * 3)
    assert calibrate.mean(seconds) == pytest.approx(0.18)


def test_fast_firings_are_no_stalls() -> None:
    assert calibrate.steady(np.array([0.1] * 30 + [0.01])).all()


def test_without_stalls_the_fit_is_that_of_least_squares() -> None:
    columns = {"serial": np.ones_like(TOKENS), "token": TOKENS}
    table = np.stack(list(columns.values()), axis=1)
    assert list(fewest(columns, SECONDS).values()) == pytest.approx(np.linalg.lstsq(table, SECONDS, rcond=None)[0].tolist())
