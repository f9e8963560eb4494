"""Every estimator, loss and correction that GRPO's graph can feed trains a tiny model for two steps, chosen by name."""

import math
import sys
from pathlib import Path

import pytest

import rlgraph as rg
from rlgraph.algorithms import ESTIMATORS, LOSSES
from rlgraph.algorithms.presets import DECOUPLED
from rlgraph.engines.pretrained import tiny_model
from rlgraph.errors import GraphError

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
import by_name

# What reads columns of nodes that this graph lacks, or has an option without a default; with what the error says.
OTHER_ESTIMATORS = {
    "gae": "reads column 'values'",
    "remax": "reads column 'baseline_rewards'",
    "optimal_token_baseline": "reads column 'old_log_probs'",
    "tir_optimal_token_baseline": "reads column 'old_log_probs'",
}
OTHER_LOSSES = {"proximal": "reads column 'current_version'", "dro": "beta"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def steps(model: str, **names: str) -> list[dict[str, float]]:
    cfg = by_name.Config(model=model, engine="transformers", prompts=4, group_size=4, lr=1e-3, **names)  # type: ignore[arg-type]
    with rg.compile(by_name.graph(cfg), rg.Cluster(cpus=2)).run_here() as job:
        return [dict(step.metrics) for step in job.steps(2)]


def check(found: list[dict[str, float]]) -> None:
    assert len(found) == 2
    assert all(math.isfinite(value) for step in found for value in step.values())


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in OTHER_ESTIMATORS])
def test_an_estimator_by_name_trains(model: str, name: str) -> None:
    check(steps(model, estimator=name))


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in OTHER_LOSSES])
def test_a_loss_by_name_trains(model: str, name: str) -> None:
    check(steps(model, loss=name))


@pytest.mark.parametrize("name", list(DECOUPLED))
def test_a_correction_by_name_trains(model: str, name: str) -> None:
    check(steps(model, correction=name))


@pytest.mark.parametrize("name", OTHER_ESTIMATORS)
def test_an_estimator_that_wants_another_graph_says_what_it_lacks(model: str, name: str) -> None:
    with pytest.raises(GraphError, match=OTHER_ESTIMATORS[name]):
        steps(model, estimator=name)


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_a_loss_that_wants_another_graph_says_what_it_lacks(model: str, name: str) -> None:
    with pytest.raises(GraphError, match=OTHER_LOSSES[name]):
        steps(model, loss=name)


def test_an_unknown_name_lists_those_there_are(model: str) -> None:
    with pytest.raises(GraphError, match=r"there is no estimator 'grop'; choose one of \['dr_grpo'"):
        steps(model, estimator="grop")
