"""Log-probs, entropies and their gradients on a GPU: each row of logits is read once forward, and once backward, where it is written once.

Sums are in float32, in the order of the vocabulary, so that a row's result depends on nothing but the row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import Any

import torch
import triton
import triton.language as tl

from rlgraph.engines.forward.collectives import VocabularyShard

BLOCK = 4096  # words that a program holds at once
LOWEST = tl.constexpr(-3.0e38)  # below every logit, and finite: the difference of two infinities is NaN


@triton.jit
def _scores(logits, tokens, log_probs, largest, sums, entropies, stride, vocab, temperature, entropy: tl.constexpr, block: tl.constexpr):
    """Compute the normaliser (`largest` logit and log of the sum over it), log-prob and entropy of this program's row."""
    row = tl.program_id(0).to(tl.int64)
    begin, lanes = logits + row * stride, tl.arange(0, block)
    most, total, weighted = LOWEST, 0.0, 0.0  # the largest logit so far, the sum of exp(logit - most), that of exp(…) * (logit - most)
    for start in range(0, vocab, block):
        here = start + lanes < vocab
        values = tl.load(begin + start + lanes, mask=here, other=LOWEST).to(tl.float32)
        values = tl.where(here, tl.div_rn(values, temperature), LOWEST)
        larger = tl.maximum(most, tl.max(values, 0))
        shrink = tl.exp(most - larger)
        shares = tl.exp(values - larger)
        if entropy:
            products = tl.where(shares > 0, shares * (values - larger), 0.0)
            weighted = shrink * (weighted + total * (most - larger)) + tl.sum(products, 0)
        total = shrink * total + tl.sum(shares, 0)
        most = larger
    chosen = tl.div_rn(tl.load(begin + tl.load(tokens + row)).to(tl.float32), temperature)
    tl.store(largest + row, most)
    tl.store(sums + row, tl.log(total))
    tl.store(log_probs + row, chosen - most - tl.log(total))
    if entropy:
        tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def _gradient(
    logits,
    tokens,
    largest,
    sums,
    entropies,
    of_log_probs,
    of_entropies,
    gradient,
    stride,
    vocab,
    temperature,
    entropy: tl.constexpr,
    block: tl.constexpr,
):
    """The gradient of a block of a row: d log p_k / d z_j = [j = k] - p_j;  d H / d z_j = -p_j (log p_j + H)."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    here = place < vocab
    values = tl.load(logits + row * stride + place, mask=here, other=0.0).to(tl.float32)
    log_p = tl.div_rn(values, temperature) - tl.load(largest + row) - tl.load(sums + row)
    p = tl.exp(log_p)
    given = tl.load(of_log_probs + row)
    found = tl.where(place == tl.load(tokens + row), given, 0.0) - p * given
    if entropy:
        found -= tl.where(p > 0, tl.load(of_entropies + row) * p * (log_p + tl.load(entropies + row)), 0.0)
    tl.store(gradient + row * vocab + place, tl.div_rn(found, temperature).to(gradient.dtype.element_ty), mask=here)


class TritonScores(torch.autograd.Function):
    """Log-probs `[N]` and entropies `[N]` (zeros unless asked for) of `tokens [N]` under `logits [N, V] / temperature`.

    Logits of the `words` of this rank alone, `[N, size]`, give what those of the whole vocabulary would.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy: bool, words: VocabularyShard | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        rows, vocab = logits.shape
        own, here = (tokens, None) if words is None else words.local_ids(tokens)
        log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
        normalisers, entropies = log_probs.new_empty(2, rows), torch.zeros_like(log_probs)
        if rows:
            sizes = (logits.stride(0), vocab, float(temperature))
            _scores[(rows,)](logits, own, log_probs, *normalisers, entropies, *sizes, entropy=entropy, block=BLOCK)
        if words is not None and here is not None:
            normalisers, log_probs, entropies = words.scores(normalisers, log_probs, entropies, here)
            own = torch.where(here, own, -1)  # no place: the gradient of another rank's word is that of the normaliser
        ctx.save_for_backward(logits, own, normalisers, entropies)
        ctx.temperature, ctx.entropy = float(temperature), entropy
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, tokens, normalisers, entropies = ctx.saved_tensors
        rows, vocab = logits.shape
        gradient = torch.empty(rows, vocab, dtype=logits.dtype, device=logits.device)
        if rows:
            given = [grad.contiguous() for grad in grads]
            sizes = (logits.stride(0), vocab, ctx.temperature)
            grid = (rows, triton.cdiv(vocab, BLOCK))
            _gradient[grid](logits, tokens, *normalisers, entropies, *given, gradient, *sizes, entropy=ctx.entropy, block=BLOCK)
        return gradient, None, None, None, None
