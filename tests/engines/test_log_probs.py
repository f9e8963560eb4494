"""Chunked log-probs and entropies equal the plain ones, and so do their gradients."""

import pytest
import torch

from rlgraph.engines.forward.policy_head import token_scores


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_gradients_equal_the_plain_softmax(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setattr("rlgraph.engines.forward.policy_head.CHUNK_ELEMENTS", {"cpu": 3 * 11})  # 3 rows at a time of 8
    draw = torch.Generator().manual_seed(0)
    logits, plain = (torch.randn(8, 11, generator=draw.manual_seed(0)).mul(4).requires_grad_() for _ in range(2))
    tokens, weights = torch.randint(0, 11, (8,), generator=draw), torch.randn(2, 8, generator=draw)

    scores, entropies = token_scores(logits, tokens, temperature=temperature, entropy=True)
    assert entropies is not None
    (scores * weights[0] + entropies * weights[1]).sum().backward()

    table = (plain / temperature).log_softmax(-1)
    expected = table.gather(-1, tokens[:, None])[:, 0]
    expected_entropies = -(table.exp() * table).sum(-1)
    (expected * weights[0] + expected_entropies * weights[1]).sum().backward()
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(entropies, expected_entropies)
    torch.testing.assert_close(logits.grad, plain.grad)


def test_scores_of_bfloat16_logits_are_float32() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores, entropies = token_scores(logits, torch.arange(4))
    assert entropies is None
    torch.testing.assert_close(scores, logits.float().log_softmax(-1).diagonal())


def test_no_tokens_give_no_scores() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    scores, _ = token_scores(logits, torch.zeros(0, dtype=torch.long))
    scores.sum().backward()
    assert scores.shape == (0,)
