"""KL estimators, and the KL in the reward."""

import pytest
import torch

import rlgraph.algorithms as alg
from rlgraph.errors import DataError, GraphError


@pytest.mark.parametrize(
    ("estimator", "difference", "value", "slope"),
    [
        ("k1", 0.5, 0.5, 1.0),
        ("abs", -0.5, 0.5, -1.0),
        ("k2", 0.5, 0.125, 0.5),
        ("k3", 0.5, 0.106531, 0.393469),
        ("k3", -5.0, 10.0, 0.0),
        ("k3", 5.0, 4.006738, 0.993262),
        ("k3", -500.0, 10.0, 0.0),
        ("k1+", 0.5, 0.5, 0.5),
        ("abs+", -0.5, 0.5, -0.5),
        ("k3+", 0.5, 0.106531, 0.5),
    ],
)
def test_value_and_slope_of_each_estimator(estimator: str, difference: float, value: float, slope: float) -> None:
    log_probs = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    kl = alg.kl_penalty(log_probs, torch.zeros(1, dtype=torch.float64), estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), log_probs)
    assert kl.item() == pytest.approx(value, abs=1e-5)
    assert gradient.item() == pytest.approx(slope, abs=1e-5)


def test_the_straight_through_gradient_is_that_of_the_kl() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    reference = torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((policy.exp().detach() * alg.kl_penalty(policy, reference, "k3+")).sum(), logits)
    assert torch.allclose(estimated, exact)


def test_an_adaptive_coefficient_follows_the_kl_by_a_fifth_at_most() -> None:
    first = alg.AdaptiveKL(coef=0.001).advance(kl=0.5, rows=256)
    assert first.coef == pytest.approx(0.00100512)
    assert first.advance(kl=0.0, rows=256).coef == pytest.approx(0.00099997, abs=1e-8)
    assert alg.FixedKL(0.01).advance(kl=9.0, rows=256) == alg.FixedKL(0.01)


def test_rewards_lose_the_kl_of_tokens_under_the_mask_alone() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    old, reference = torch.full((2, 3), -1.0), torch.full((2, 3), -1.5)
    old[0, 1] = float("nan")
    rewards, kl = alg.penalize_rewards(torch.ones(2, 3), old, reference, mask, coef=0.1)
    assert torch.allclose(rewards, torch.tensor([[0.95, 1, 0.95], [1, 1, 1]]))
    assert kl == pytest.approx(0.25)  # an empty row counts as a row of KL 0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(GraphError, match=r"one of .*'k1', 'abs', 'k2', 'k3'"):
        alg.kl_penalty(torch.zeros(1), torch.zeros(1), "full")
    with pytest.raises(GraphError, match="at least 1"):
        alg.AdaptiveKL(horizon=0)
    with pytest.raises(GraphError, match="at least 0"):
        alg.FixedKL(-1.0)
    with pytest.raises(DataError, match="mask is bool"):
        alg.penalize_rewards(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), coef=0.1)


def test_kl_penalty_does_not_broadcast() -> None:
    full, narrow, mask = torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(DataError, match=r"kl_penalty: .*\[2, 3\].*\[2, 1\]"):
        alg.kl_penalty(full, narrow)
    for columns, name in (
        ((narrow, full, full), "token_rewards"),
        ((full, narrow, full), "old_log_probs"),
        ((full, full, narrow), "ref_log_probs"),
    ):
        with pytest.raises(DataError, match=rf"penalize_rewards: column '{name}' is .*\[2, 1\]"):
            alg.penalize_rewards(*columns, mask, coef=0.1)
