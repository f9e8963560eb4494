"""Algorithms by name."""

from pathlib import Path

import pytest

import rlgraph.algorithms as alg
from rlgraph.algorithms.correction import BYPASS
from rlgraph.algorithms.correction import DECOUPLED as PRESETS
from rlgraph.errors import GraphError


def test_a_name_and_options_make_an_object() -> None:
    assert alg.estimator("dr_grpo") == alg.GRPO(normalize_std=False)
    assert alg.estimator("gae", lam=0.95) == alg.GAE(lam=0.95)
    assert alg.loss("dapo") == alg.ClippedLoss(clip_low=0.2, clip_high=0.28)
    assert alg.loss("dppo_kl", high=0.1) == alg.DPPO("kl", high=0.1)
    assert alg.correction("decoupled_token_is") == alg.RolloutCorrection(alg.TruncatedIS(level="token", threshold=2.0))
    assert alg.loss("bypass_ppo_clip", clip_high=0.28) == alg.Bypass(alg.ClippedLoss(clip_high=0.28))


def test_an_unknown_option_is_an_error_of_the_graph() -> None:
    with pytest.raises(GraphError, match=r"there is no setting 'clip_ratio'; did you mean"):
        alg.loss("clipped", clip_ratio=0.2)


def test_a_bypass_preset_is_a_loss_and_says_so() -> None:
    with pytest.raises(GraphError, match="loss='bypass_pg_is'"):
        alg.correction("bypass_pg_is")


def described(correction: alg.RolloutCorrection) -> str:
    weights = correction.weights
    bounds = f"{weights.low:g} to {weights.high:g}" if isinstance(weights, alg.IcePop) else f"{getattr(weights, 'threshold', 0):g}"
    rejections = [
        f"{r.statistic}, {r.high:g}" if r.low is None else f"{r.statistic}, {r.low:.3g} to {r.high:.4g}" for r in correction.rejections
    ]
    return " | ".join([f"{weights.level}, {bounds}" if weights else "", *(rejections or [""])])


def test_the_documentation_describes_each_preset() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert [
        name for name, preset in {**PRESETS, **BYPASS}.items() if " ".join(f"| `{name}` | {described(preset)} |".split()) not in rows
    ] == []


def test_the_documentation_names_all_of_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    named = [*alg.ESTIMATORS, *alg.LOSSES, *PRESETS, *alg.AGGREGATIONS, *alg.KL_ESTIMATORS]
    assert [name for name in named if f"`{name}`" not in text] == []
