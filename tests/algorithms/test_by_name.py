"""Every estimator, loss and correction trains a tiny model for two steps, chosen by name."""

import math
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import rlgraph as rg
from rlgraph.algorithms import ESTIMATORS, LOSSES
from rlgraph.algorithms.correction import DECOUPLED
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import GraphError

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
import by_name

OPTIONS = {"dro": {"beta": 0.1}}  # what has no default
OF_REWARDS = [name for name in ESTIMATORS if "step_rewards" not in ESTIMATORS[name]().reads]  # the others want a judge of steps
OF_ADVANTAGES = [name for name in LOSSES if "advantages" in LOSSES[name](**OPTIONS.get(name, {})).reads]
OF_EXAMPLES = [name for name in LOSSES if name not in OF_ADVANTAGES]  # and of pairs


def varied(responses: list[str], answers: list[str]) -> list[float]:
    """A reward that a random model's responses differ in."""
    return [len(set(response)) / 10 + (response < answer) for response, answer in zip(responses, answers, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(autouse=True)
def rewards_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_name, "right_number", varied)


def steps(model: str, **settings: Any) -> list[dict[str, float]]:
    cfg = by_name.Config(model=model, engine="transformers", prompts=2, group_size=4, max_tokens=4, lr=1e-3, **settings)
    with rg.compile(by_name.graph(cfg), rg.Cluster(cpus=2)).run_here() as job:
        found = [dict(step.metrics) for step in job.steps(2)]
    assert len(found) == 2
    assert all(math.isfinite(value) for step in found for value in step.values())
    return found


def test_an_estimator_of_rewards_of_steps_says_who_gives_them(model: str) -> None:
    assert [name for name in ESTIMATORS if name not in OF_REWARDS] == ["grpo_process"]
    with pytest.raises(GraphError, match=r"reads column 'step_rewards', which none .* pass the output of 'learned_reward.step_rewards'"):
        steps(model, estimator="grpo_process")


CORRECTED = ("proximal", *(name for name in LOSSES if name.startswith("bypass")))  # losses that weigh against the engine themselves
CORRECTIONS = cycle(["disabled", *DECOUPLED])  # so that pass@k, which teaches one response of a group, meets one that rejects none
TOGETHER = [
    (estimator, loss, "" if loss in CORRECTED else next(CORRECTIONS))
    for estimator, loss in zip(cycle(OF_REWARDS), OF_ADVANTAGES, strict=False)
]


def test_names_that_train_together_are_all_of_them() -> None:
    estimators, losses, corrections = map(set, zip(*TOGETHER, strict=True))
    assert (estimators, losses, corrections) == ({*OF_REWARDS}, {*OF_ADVANTAGES}, {*DECOUPLED, ""})


@pytest.mark.stage("families")
@pytest.mark.parametrize(("estimator", "loss", "correction"), TOGETHER)
def test_an_estimator_a_loss_and_a_correction_by_name_train(model: str, estimator: str, loss: str, correction: str) -> None:
    found = steps(model, estimator=estimator, loss=loss, loss_options=OPTIONS.get(loss, {}), correction=correction)
    assert_trained(found)
    names = {"rollout_corr/kl", "rollout_corr/chi2_token", "rollout_corr/training_ppl"}
    assert all(names <= set(step) for step in found) or not correction


@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_a_loss_of_examples_refuses_advantages(model: str, name: str) -> None:
    with pytest.raises(
        GraphError,
        match=r"reads nothing of its input 'advantages'.*leave that input out|reads column 'preferences'.*pass the output of 'pairs'",
    ):
        steps(model, loss=name)


@pytest.mark.parametrize("loss", OF_ADVANTAGES)
def test_every_loss_works_with_every_estimator_and_every_correction_except_weights_it_already_has(model: str, loss: str) -> None:
    def declared(**settings: str) -> rg.Graph:
        return by_name.graph(by_name.Config(model=model, loss=loss, loss_options=OPTIONS.get(loss, {}), **settings))

    for name in OF_REWARDS:
        declared(estimator=name)
    for name, correction in DECOUPLED.items():
        if loss in CORRECTED and not correction.rejections:
            with pytest.raises(GraphError, match="reads nothing of its input 'correction'"):
                declared(correction=name)
        else:
            declared(correction=name)


SETTINGS = {
    "a loss without ratios behind a correction": {"loss": "reinforce", "correction": "decoupled_seq_is"},
    "a token baseline weighted by a correction": {
        "estimator": "optimal_token_baseline",
        "estimator_options": {"weighted": True},
        "correction": "decoupled_token_is",
        "loss": "reinforce",
    },
    "a KL to the reference and an entropy bonus": {"loss": "gspo", "loss_options": {"kl_coef": 0.1, "entropy_coef": 0.01}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_need_each_others_nodes_train(model: str, name: str) -> None:
    found = steps(model, **SETTINGS[name])
    assert_trained(found)
    if "kl_coef" in SETTINGS[name].get("loss_options", {}):
        assert found[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
        assert found[1]["actor/kl_loss"] > 0
        assert all(step["actor/entropy"] > 0 for step in found)


def assert_trained(found: list[dict[str, float]]) -> None:
    """Every step has a gradient, but one of which each token is rejected: the update skips it."""
    for step in found:
        assert (step.get("actor/grad_norm", 0) > 0) == (step.get("rollout_corr/rollout_rs_masked_fraction", 0) < 1)


def test_the_greedy_baseline_is_generated_beside_the_responses_and_repeated_for_the_group(model: str) -> None:
    cfg = by_name.Config(model=model, engine="transformers", estimator="remax", prompts=2, group_size=4)
    plan = rg.compile(by_name.graph(cfg), rg.Cluster(cpus=2))
    assert (plan.node("greedy").rows, plan.node("rollout").rows) == (2, 8)
    assert plan.node("greedy").workers == plan.node("rollout").workers
    assert plan.certificate.staleness_bound == 1
