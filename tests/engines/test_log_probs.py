"""Chunked log-probs and entropies equal the plain ones, and so do their gradients."""

import pytest
import torch

from rlgraph.engines.forward import collectives
from rlgraph.engines.forward.collectives import VocabularyShard
from rlgraph.engines.forward.head import token_scores


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_gradients_equal_the_plain_softmax(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setattr("rlgraph.engines.forward.head.CHUNK_ELEMENTS", {"cpu": 3 * 11})  # 3 rows at a time of 8
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


@pytest.mark.parametrize("words", [None, VocabularyShard(None, 0, 200, 200)], ids=["whole", "shard"])
def test_large_logits_have_gradients_as_exact_as_those_of_torch(words: VocabularyShard | None, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(64, 200, generator=draw) * 3 + 106, torch.randint(0, 200, (64,), generator=draw)
    if words is not None:  # another rank has the second half: here the first one's logits again, 5 lower
        logits = torch.cat([logits, logits - 5], -1)
        other = logits[:, 200:].log_softmax(-1)
        entropies = -(other.exp() * other).sum(-1)
        sent = torch.stack([logits[:, 200:].amax(-1), -other.amax(-1), entropies, entropies, torch.zeros(64)])
        monkeypatch.setattr(collectives, "stack_ranks", lambda own, group: torch.stack([own, sent[: len(own)]]))
    found, grads = [], []
    for dtype in (torch.float32, torch.float64):
        plain = logits.detach().to(dtype, copy=True).requires_grad_()
        table = plain.log_softmax(-1)
        found.append((table.gather(-1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)))
        torch.autograd.backward(found[-1], [torch.ones(64, dtype=dtype)] * 2)
        grads.append(plain.grad[:, :200])  # type: ignore[index]
    own = logits[:, :200].clone().requires_grad_()
    scores = token_scores(own, tokens, entropy=True, words=words)
    assert scores[1] is not None
    torch.autograd.backward(scores, [torch.ones(64)] * 2)  # type: ignore[arg-type]
    assert own.grad is not None
    for mine, torchs, exact in zip((*scores, own.grad), (*found[0], grads[0]), (*found[1], grads[1]), strict=True):
        assert mine is not None
        assert (mine - exact).abs().max() <= 2 * (torchs - exact).abs().max()


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
