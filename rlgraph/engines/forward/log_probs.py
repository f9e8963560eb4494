"""Log-probs of chosen tokens, entropies and sums of squares from logits, in float32 but a few rows at a time.

On a GPU one kernel computes log-probs and entropies, and one their gradient: `triton_scores`.
"""

from typing import Any

import torch

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # 16 MiB of float32 stay in the cache of a CPU; a GPU wants few launches


def token_scores(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probs `[N]` of `tokens [N]` under `logits [N, V] / temperature`, and the entropies `[N]` if asked for.

    Both are float32, whatever the logits are; the full `[N, V]` in float32 is never built, not in the backward pass either.
    """
    log_probs, entropies = _scores_on(logits.device.type).apply(logits, tokens, temperature, entropy)
    return log_probs, entropies if entropy else None


def _scores_on(device: str) -> Any:
    if device != "cuda":
        return _TokenScores
    from rlgraph.engines.forward.triton_scores import TritonScores  # only torch for GPUs brings Triton

    return TritonScores


@torch.no_grad()
def sum_pi_squared(logits: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """Compute the sum `[N]` of the squared probabilities of each distribution `logits [N, V] / temperature`, float32."""
    sums = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for rows in _chunks(logits):
        sums[rows] = (logits[rows].float() / temperature).softmax(-1).square_().sum(-1)
    return sums


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        normalisers, entropies = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        for rows in _chunks(logits):
            scaled = logits[rows].float() / temperature
            normalisers[rows] = scaled.logsumexp(-1)
            log_probs[rows] = scaled.gather(-1, tokens[rows, None])[:, 0] - normalisers[rows]
            if entropy:
                scaled -= normalisers[rows, None]
                entropies[rows] = -(scaled.exp() * scaled).sum(-1)
        ctx.save_for_backward(logits, tokens, normalisers, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, tokens, normalisers, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = grads
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            log_p = logits[rows].float() / ctx.temperature - normalisers[rows, None]
            p = log_p.exp()
            # d log p_k / d z_j = [j = k] - p_j;  dH / d z_j = -p_j (log p_j + H)
            chunk = p * -of_log_probs[rows, None]
            chunk.scatter_add_(-1, tokens[rows, None], of_log_probs[rows, None])
            if ctx.entropy:
                chunk -= of_entropies[rows, None] * p * (log_p + entropies[rows, None])
            grad[rows] = (chunk / ctx.temperature).to(grad.dtype)
        return grad, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
