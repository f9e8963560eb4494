"""Log-probs on a GPU by the kernels of vLLM's sampler: logits in bfloat16, divided by the temperature and rounded, then one sum a row."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

from rlgraph.engines.forward.triton_scores import TritonScores


def token_scores(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probs `[N]` of `tokens [N]` under `logits [N, V] / temperature`, and the entropies `[N]` if asked for: float32."""
    scaled: torch.Tensor = _Scaled.apply(logits, temperature)
    found, entropies = TritonScores.apply(scaled, tokens, 1.0, entropy)
    return _Exact.apply(found, scaled.detach(), tokens), entropies if entropy else None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        ctx.temperature = temperature
        return divided(logits, temperature)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] if ctx.temperature == 1 else grads[0] / ctx.temperature, None


class _Exact(torch.autograd.Function):
    """The engine's log-probs, with the gradient of the trainer's."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, scaled: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return compute_token_logprobs(scaled, tokens[:, None]).view(-1).clone() if len(tokens) else found.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


def divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits `[N, V]` as the engine does before it samples."""
    if temperature == 1 or len(logits) == 0:
        return logits.view_as(logits)
    out, device = logits.detach().clone(memory_format=torch.contiguous_format), logits.device
    apply_temperature(out, torch.zeros(len(out), dtype=torch.int32, device=device), torch.full((1,), temperature, device=device))
    return out
