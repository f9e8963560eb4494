"""Costs: functions of devices, rows and lengths; the YAML file; what is measured and what is scaled; bad input."""

from pathlib import Path

import numpy as np
import pytest

import rlgraph as rg
from rlgraph.errors import PlanError
from rlgraph.plan.cost_functions import Decode, NodeCost, Passes, Setting
from rlgraph.plan.lengths import Lengths

FIXED = Lengths((0.0, 1.0), (10.0, 10.0), prompt_tokens=4.0)
TAIL = Lengths((0.0, 0.5, 0.9, 1.0), (5.0, 20.0, 60.0, 400.0), prompt_tokens=8.0)


def mean(cost: NodeCost, setting: Setting, lengths: Lengths | None = FIXED) -> float:
    return rg.planning.Costs({"node": cost}, lengths=lengths).mean("node", setting)


def test_parallel_seconds_are_shared_by_devices_and_serial_ones_are_not() -> None:
    assert mean(NodeCost(serial_s=1.0, parallel_s=8.0), Setting(devices=4)) == pytest.approx(3.0)


def test_a_cost_by_tokens_counts_prompts_and_responses() -> None:
    assert mean(NodeCost(token_s=0.5), Setting(devices=2, rows=3)) == pytest.approx(0.5 * 3 * (10 + 4) / 2)


def test_decoding_takes_the_longest_response_and_a_part_for_each_token() -> None:
    decode = Decode(step_s=0.1, sequence_s=0.01, prefill_s=0.001, start_s=2.0)
    assert mean(NodeCost(decode=decode), Setting(rows=6)) == pytest.approx(2.0 + 0.001 * 4 * 6 + 0.1 * 10 + 0.01 * 60)


def test_more_engines_share_the_tokens_but_not_the_longest_response() -> None:
    decode = NodeCost(decode=Decode(step_s=0.1, sequence_s=0.01))
    assert mean(decode, Setting(devices=3, engines=3, rows=6)) == pytest.approx(0.1 * 10 + 0.01 * 20)


def test_an_engine_with_few_slots_decodes_its_sequences_one_after_another() -> None:
    lengths = np.array([[4.0, 2.0, 2.0, 3.0, 1.0]])
    decode = Decode(step_s=1.0, slots=2)
    assert decode.seconds(lengths, 0.0, 1)[0] == 7  # 4 then 3 on one slot, 2 + 2 + 1 on the other


def test_a_wider_engine_is_faster_by_less_than_its_devices() -> None:
    cost = NodeCost(decode=Decode(step_s=0.1, doubling=0.8), measured=Setting(devices=1, engines=1, rows=4))
    one, four = (mean(cost, Setting(devices=n, engines=1, rows=4)) for n in (1, 4))
    assert one / four == pytest.approx(4 * 0.8**2)


def test_costs_measured_at_other_rows_are_scaled_by_rows() -> None:
    cost = NodeCost(parallel_s=2.0, measured=Setting(rows=4))
    assert mean(cost, Setting(rows=12)) == pytest.approx(6.0)
    costs = rg.planning.Costs({"node": cost}, source="measured")
    assert [costs.source_at("node", Setting(rows=rows)) for rows in (4, 12)] == ["measured", "scaled"]


def test_drawn_batches_have_the_distributions_mean_and_never_exceed_its_longest() -> None:
    batches = TAIL.batches(400, 64)
    assert batches.mean() == pytest.approx(TAIL.mean, rel=0.02)
    assert batches.max() <= 400
    assert batches.min() >= 5


def test_lengths_measured_from_responses_give_their_quantiles_back() -> None:
    sample = np.random.default_rng(1).integers(1, 500, 5000).tolist()
    found = Lengths.fit(sample, 12.0)
    assert found.mean == pytest.approx(np.mean(sample), rel=0.01)
    assert found.longest == max(sample)


def test_the_spread_of_firings_is_kept_and_does_not_move_the_mean() -> None:
    costs = rg.planning.Costs({"node": NodeCost(parallel_s=2.0, spread=(0.5, 1.0, 1.5))})
    drawn = costs.seconds("node", Setting(), 300)
    assert drawn.mean() == pytest.approx(2.0)
    assert sorted(set(drawn.round(6))) == [1.0, 2.0, 3.0]


def test_costs_come_back_from_their_file_equal(tmp_path: Path) -> None:
    nodes = {
        "rollout": NodeCost(decode=Decode(0.1, 0.01, slots=8), spread=(0.9, 1.1), measured=Setting(4, 2, 16)),
        "update": NodeCost(serial_s=0.25, token_s=1e-4, measured=Setting(2, 2, 16)),
        "reward": 0.5,
    }
    costs = rg.planning.Costs(nodes, publish_s=0.01, publish_bytes=1 << 20, source="measured", lengths=TAIL, on="2 cores")
    costs.to_file(tmp_path / "costs.yaml")
    assert rg.planning.Costs.from_file(tmp_path / "costs.yaml") == costs


def test_a_costs_file_that_an_older_version_wrote_is_read(tmp_path: Path) -> None:
    costs = rg.planning.Costs({"update": NodeCost(serial_s=1.0, measured=Setting(2, 2, 16, Passes(8192, mini_batches=4)))})
    costs.to_file(tmp_path / "costs.yaml")
    text = (tmp_path / "costs.yaml").read_text()
    (tmp_path / "old.yaml").write_text(text.replace("mini_batches: 4", "parts: 4"))
    assert "parts: 4" in (tmp_path / "old.yaml").read_text()
    assert rg.planning.Costs.from_file(tmp_path / "old.yaml") == costs


BAD_FILES = {
    "no file": (None, "there is no such file"),
    "no YAML": ("nodes: [", "costs file"),
    "a word for a number": ("nodes: {rollout: fast}", r"\$.nodes"),
    "a key that is none": ("nodes: {rollout: {serial: 1}}", r"nodes.rollout has no 'serial'; did you mean 'serial_s'"),
    "a negative cost": ("nodes: {rollout: -1.0}", "the cost of 'rollout' is -1.0"),
    "lengths that fall": ("nodes: {a: 1}\nlengths: {at: [0, 1], tokens: [5, 3]}", "non-decreasing"),
    "tokens without lengths": ("nodes: {a: {token_s: 1}}", "have no lengths"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_costs_file_is_refused_with_the_place(name: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[name]
    path = tmp_path / "costs.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=message):
        rg.planning.Costs.from_file(path)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), True, "1", {}, {"1": 2.0}, {0: 2.0}, {1: -2.0}])
def test_a_cost_that_is_no_time_is_refused(wrong: object) -> None:
    with pytest.raises(PlanError, match="the cost of 'node'"):
        rg.planning.Costs({"node": wrong}, lengths=FIXED)  # type: ignore[dict-item]


def test_the_old_name_of_a_costs_function_works_and_warns() -> None:
    costs = rg.planning.Costs({"update": 2.0})
    with pytest.warns(DeprecationWarning, match=r"is now Costs\.cost_of"):
        assert costs.law("update") == costs.cost_of("update")
