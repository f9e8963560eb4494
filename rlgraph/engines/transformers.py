"""Generate with transformers: plain batched sampling with a key-value cache. Slow and simple, the reference for vLLM."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.base import Response, Sampling, check_requests, check_weights
from rlgraph.engines.pretrained import check_model


class TransformersEngine:
    """A `GenerateEngine` on transformers, which may share its process with a trainer.

    A response depends on weights, prompt and seed, and in the last bits on the prompts that are sampled with it. Memory is
    that of the whole batch at once.

    Raises DataError for a folder that is no model.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        max_context: int | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self._summary = check_model(path)
        self._context = max_context or self._summary.context_length
        self._device = torch.device(device)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        self._model.to(self._device).eval()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Response]:
        """Return one response for each prompt, in the order given; see `GenerateEngine`."""
        check_requests(prompts, seeds, self._context, self._summary.vocab_size)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._summary.eos_token_ids)}
        limits = [min(sampling.max_tokens, self._context - len(prompt)) for prompt in prompts]
        responses = [Response([], []) for _ in prompts]
        # One number a token, drawn beforehand, so that what a prompt gets does not depend on the others.
        numbers = torch.stack([_uniform(seed, max(limits)) for seed in seeds]).to(self._device)
        tokens, mask = _left_padded(prompts, self._device)
        cache: Any = None
        for step in range(max(limits)):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = self._model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = out.past_key_values
            chosen, log_probs = sample(out.logits[:, -1], numbers[:, step], sampling)
            open_rows = False
            for response, limit, token, log_prob in zip(responses, limits, chosen.tolist(), log_probs.tolist(), strict=True):
                if len(response.tokens) == step < limit and (step == 0 or response.tokens[-1] not in stops):
                    response.tokens.append(token)
                    response.log_probs.append(log_prob)
                    open_rows |= token not in stops and step + 1 < limit
            if not open_rows:
                break
            tokens, mask = chosen[:, None], torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        return responses

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take new weights, copied into place. Raises DataError unless they are all and full."""
        parameters = dict(self._model.named_parameters())
        check_weights(weights, {name: tuple(p.shape) for name, p in parameters.items()})
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])

    def context_length(self) -> int:
        """Return how many tokens prompt and response may have together."""
        return self._context

    def close(self) -> None:
        """Free the model."""
        del self._model


def sample(logits: torch.Tensor, numbers: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token `[B]` for each row of `logits [B, V]` and its log-prob `[B]`, from `numbers [B]` in [0, 1).

    The distribution is turned over into its cumulative sum, in float64. Greedy tokens carry their log-prob at temperature 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        log_probs = logits.log_softmax(-1)
        tokens = log_probs.argmax(-1)
    else:
        log_probs = _kept(logits / sampling.temperature, sampling).log_softmax(-1)
        cumulative = log_probs.double().exp().cumsum(-1)
        total = cumulative[:, -1:]
        drawn = torch.minimum(numbers.double()[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, drawn, right=True)[:, 0]
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the logits with those of the tokens that `top_k`, then `top_p` leave out at minus infinity."""
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # the likeliest token has nothing before it and always stays
        logits = logits.masked_fill((before >= sampling.top_p).gather(-1, order.argsort(-1)), -torch.inf)
    return logits


def _uniform(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, mask
