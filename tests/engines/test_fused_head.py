"""Scores of a few rows at a time equal those of all rows, and so do their gradients; no matrix of tokens by vocabulary is whole."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import folder_of
from support.tiny import LENGTHS, WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine
from torch.utils._python_dispatch import TorchDispatchMode

from rlgraph.engines.forward.head import PolicyHead, Scored, head_scores, sum_pi_squared, token_scores
from rlgraph.engines.hf.backbone import LogitShape
from rlgraph.values.optimizers import AdamW

ROWS, VOCAB, HIDDEN = 20, 33, 8
SHAPES = {"plain": LogitShape(), "scaled": LogitShape(0.5), "capped": LogitShape(1.0, 3.0)}


@pytest.fixture(autouse=True)
def three_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rlgraph.engines.forward.head.AT_ONCE", {"cpu": 3 * VOCAB})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def given(bias: bool = False) -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=bias)
    return head, (3 * torch.randn(ROWS, HIDDEN)).requires_grad_(), torch.randint(0, VOCAB, (ROWS,))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_scores_and_gradients_are_those_of_whole_logits(shape: str, bias: bool) -> None:
    head, states, tokens = given(bias)
    up = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))
    found = []
    for fused in (False, True):
        head.zero_grad()
        states.grad = None
        scores = head_scores(head, states, tokens, Scored(SHAPES[shape], 0.7, entropy=True), fused=fused)
        torch.autograd.backward(scores, list(up))
        found.append([*(score.detach() for score in scores), states.grad, *(p.grad.clone() for p in head.parameters())])
    logits = SHAPES[shape](head(states)) / 0.7
    torch.testing.assert_close(found[1][0], logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].detach(), atol=1e-6, rtol=1e-6)
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)  # of gradients up to 15


def test_log_probs_and_entropies_are_those_of_the_kernel_that_a_head_is_given() -> None:
    head, states, tokens = given()

    def kernel(logits: torch.Tensor, tokens: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_probs, entropies = token_scores(logits, tokens, **settings)
        return log_probs - 1, None if entropies is None else entropies + 1

    for entropy in (True, False):
        own, others = (
            head_scores(head, states, tokens, Scored(LogitShape(), 0.7, entropy, score_tokens=k), fused=True) for k in (None, kernel)
        )
        assert [float((other - one).detach().mean().round()) for one, other in zip(own, others, strict=True)] == [-1.0, 1.0][: 1 + entropy]


def test_without_gradients_logits_are_never_whole_either() -> None:
    head, states, tokens = given()
    with torch.no_grad(), Largest() as largest:
        found = head_scores(head, states, tokens, Scored(LogitShape(), 0.7, squares=True), fused=False)
    assert largest.numbers <= 3 * VOCAB
    expected = token_scores(head(states), tokens, temperature=0.7)[0], sum_pi_squared(head(states), temperature=0.7)
    for own, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(own, whole.detach(), atol=1e-6, rtol=1e-6)


class Largest(TorchDispatchMode):
    """Notes the most rows by vocabulary that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] == VOCAB and len(result) != HIDDEN:
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize("fused", [False, True])
def test_training_with_a_fused_head_never_has_whole_logits(fused: bool) -> None:
    head, states, tokens = given()
    with Largest() as largest:
        scores = head_scores(head, states, tokens, Scored(LogitShape(), entropy=True), fused=fused)
        (scores[0].sum() + scores[1].sum()).backward()
    assert largest.numbers == (3 if fused else ROWS) * VOCAB


def test_the_heads_gradient_is_added_up_in_float32() -> None:
    torch.manual_seed(0)
    head, states, tokens = torch.nn.Linear(HIDDEN, VOCAB, bias=False), torch.randn(600, HIDDEN), torch.zeros(600, dtype=torch.long)
    exact = torch.nn.Linear(HIDDEN, VOCAB, bias=False).double()
    head = head.bfloat16().float()  # weights that both hold exactly
    exact.weight.data.copy_(head.weight)
    half = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    half.weight.data = head.weight.data.clone()
    states = states.bfloat16().float()
    head_scores(half, states, tokens, Scored(LogitShape()), fused=True)[0].sum().backward()
    exact(states.double()).log_softmax(-1)[:, 0].sum().backward()
    assert half.weight.grad is not None
    torch.testing.assert_close(half.weight.grad.double(), exact.weight.grad, atol=0, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tied", "untied", "gemma2", "phi"])
def test_a_policy_with_a_fused_head_takes_the_same_steps(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A tied, an untied, a soft-capped head, and one with a bias; sharded by FSDP2."""
    folder = request.getfixturevalue(kind) if "tied" in kind else folder_of(kind, tmp_path)
    batch, found = batch_of(LENGTHS, holes=True), []
    batch["prompts"], batch["responses"] = batch["prompts"] % 90, batch["responses"] % 90  # the words of a small model
    for fused in (False, True):
        with closing(fsdp_engine(PolicyHead(folder, fused=fused), optimizer=AdamW(lr=1e-2, eps=1e-3), dtype=torch.float32)) as engine:
            scores = engine.scores(batch, temperature=0.8)
            metrics = [engine.update(batch, WeightedLikelihood(entropy=0.1), temperature=0.8) for _ in range(3)]
            found.append((scores, metrics, {name: weight.clone() for name, weight in engine.weights().items()}))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-6, rtol=0)
    for whole, fused_metrics in zip(found[0][1], found[1][1], strict=True):
        assert fused_metrics == pytest.approx(whole, rel=1e-4)
    for name, weight in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], weight, atol=1e-5, rtol=0)
