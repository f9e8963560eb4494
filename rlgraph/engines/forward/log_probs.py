"""Log-probs of chosen tokens, entropies and sums of squares from logits, in float32 but a few rows at a time.

On a GPU one kernel computes log-probs and entropies, and one their gradient: `triton_scores`.
"""

from typing import Any

import torch

from rlgraph.engines.forward.vocabulary import VocabularyShard

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # 16 MiB of float32 stay in the cache of a CPU; a GPU wants few launches


def token_scores(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    words: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probs `[N]` of `tokens [N]` under `logits [N, V] / temperature`, and the entropies `[N]` if asked for.

    Both are float32, whatever the logits are; the full `[N, V]` in float32 is never built, not in the backward pass either. Logits of
    the `words` of this rank alone, `[N, size]`, give what those of the whole vocabulary would.
    """
    if words is None:
        log_probs, entropies = _scores_on(logits.device.type).apply(logits, tokens, temperature, entropy)
    else:
        log_probs, entropies = _TokenScores.apply(logits, tokens, temperature, entropy, words)
    return log_probs, entropies if entropy else None


def _scores_on(device: str) -> Any:
    if device != "cuda":
        return _TokenScores
    from rlgraph.engines.forward.triton_scores import TritonScores  # only torch for GPUs brings Triton

    return TritonScores


@torch.no_grad()
def sum_pi_squared(logits: torch.Tensor, *, temperature: float = 1.0, words: VocabularyShard | None = None) -> torch.Tensor:
    """Compute the sum `[N]` of the squared probabilities of each distribution `logits [N, V] / temperature`, float32."""
    sums = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    normalisers = torch.empty_like(sums)
    for rows in _chunks(logits):
        scaled = logits[rows].float() / temperature
        if words is not None:
            normalisers[rows] = scaled.logsumexp(-1)
        sums[rows] = scaled.softmax(-1).square_().sum(-1)
    if words is None:
        return sums
    _, log_shares, (of_ranks,) = words.joined(normalisers, sums)
    return ((2 * log_shares).exp() * of_ranks).sum(0)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy: bool, words: VocabularyShard | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, here = (tokens, torch.ones_like(tokens, dtype=torch.bool)) if words is None else words.own(tokens)
        log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        normalisers, entropies = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        for rows in _chunks(logits):
            scaled = logits[rows].float() / temperature
            normalisers[rows] = scaled.logsumexp(-1)
            log_probs[rows] = scaled.gather(-1, own[rows, None])[:, 0] - normalisers[rows]
            if entropy:
                scaled -= normalisers[rows, None]
                entropies[rows] = -(scaled.exp() * scaled).sum(-1)
        if words is not None:
            normalisers, log_shares, (found, inner, is_here) = words.joined(normalisers, log_probs, entropies, here.float())
            log_probs = (is_here * (found + log_shares)).sum(0)
            entropies = (log_shares.exp() * (inner - log_shares)).sum(0)  # that of the choice of a rank, and within its words
        ctx.save_for_backward(logits, own, here, normalisers, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, own, here, normalisers, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = grads
        of_own = torch.where(here, of_log_probs, 0)
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            log_p = logits[rows].float() / ctx.temperature - normalisers[rows, None]
            p = log_p.exp()
            # d log p_k / d z_j = [j = k] - p_j;  dH / d z_j = -p_j (log p_j + H)
            chunk = p * -of_log_probs[rows, None]
            chunk.scatter_add_(-1, own[rows, None], of_own[rows, None])
            if ctx.entropy:
                chunk -= of_entropies[rows, None] * p * (log_p + entropies[rows, None])
            grad[rows] = (chunk / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
