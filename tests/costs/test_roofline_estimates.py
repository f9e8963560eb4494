"""Estimates where nothing was measured: against runs on H200s that the table of host times was not fitted to, and its derivation."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import a_priori
import peer_job

import rlgraph as rg
from rlgraph.costs import host_times


def test_a_step_that_nothing_measured_is_estimated_within_half_of_what_it_took(tmp_path: Path) -> None:
    rows = list(a_priori.compared(tmp_path))
    assert {name.split(",")[0] for name in (row.name for row in rows)} >= {"135M", "0.6B", "4B"}  # and 8B where it was measured
    far = {row.name: row.ratio for row in rows if not 1 / 1.5 <= row.ratio <= 1.5}
    assert not far
    assert sum(row.held_out for row in rows) >= 12


def test_the_table_holds_what_its_sources_give() -> None:
    for name, value in a_priori.fit().items():
        assert getattr(host_times, name).value == pytest.approx(value, rel=0.1), name


def test_an_estimate_of_a_small_model_counts_the_host_that_no_gpu_shortens(tmp_path: Path) -> None:
    cfg = peer_job.Config(model=a_priori.folder("smollm2", tmp_path), engines_per_gpu=1)
    graph = peer_job.graph(cfg)
    plan = rg.compile(graph, a_priori.cluster(2))
    floor = 1024 * (host_times.DECODE_STEP_S.value + 1024 * host_times.DECODE_SEQUENCE_S.value)
    assert plan.node("rollout").seconds > floor
    assert plan.prediction.cost == "roofline"
    assert "nothing was measured" in str(plan)


def test_prompts_and_lengths_that_are_known_are_estimated_as_they_are(tmp_path: Path) -> None:
    graph = peer_job.graph(peer_job.Config(model=a_priori.folder("smollm2", tmp_path)))
    found = a_priori.priced_for(graph, a_priori.cluster(2), None, a_priori.shapes_of(graph)).lengths
    assert found is not None
    assert (found.mean, found.longest) == (1024, 1024)
    assert 5 < found.prompt_tokens < 22
