"""The sampler that takes the place of SGLang's: a token depends on its request's seed and its position, not on the batch.

SGLang draws by seed in its deterministic mode alone, which excludes most attention backends, and its log-probs leave out top-p and top-k.
"""

from collections import deque
from typing import Any

import torch

GREEDY = -1  # in place of a seed
# SplitMix64 (Steele, Lea and Flood, 2014), its constants as signed numbers.
GOLDEN, MIX_A, MIX_B = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class SeededSampler:
    """Samples each row by its seed, and keeps the log-probs of each step in `drawn`, on the host, until they are taken."""

    def __init__(self) -> None:
        self.drawn: deque[torch.Tensor] = deque()

    def __call__(
        self, output: Any, info: Any, return_logprob: bool, top_logprobs_nums: Any, token_ids_logprobs: Any, positions: torch.Tensor
    ) -> torch.Tensor:
        logits, warm = output.next_token_logits, info.temperatures.view(-1)
        filters = info.need_top_p_sampling or info.need_top_k_sampling  # known on the host
        tokens, log_probs = sample(logits, warm, info.top_ps, info.top_ks, info.sampling_seed, positions, filters=filters)
        # On a GPU the copy is under way when this returns; SGLang waits for the tokens, which leave after it.
        host = torch.empty(log_probs.shape, dtype=torch.float32, pin_memory=log_probs.is_cuda)
        self.drawn.append(host.copy_(log_probs, non_blocking=True))
        return tokens.to(torch.int32)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ps: torch.Tensor,
    top_ks: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    filters: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token `[B]` for each row of `logits [B, V]`, and return its log-prob `[B]` under the distribution it is drawn from.

    Temperature, top-p, top-k, seed and position are `[B]`. Greedy rows have the seed -1; their log-probs are those of temperature 1.
    Without `filters` every row keeps all tokens.

    >>> logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(2, 1)
    >>> one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    >>> sample(logits, one, one, zero + 1, torch.tensor([GREEDY, 5]), zero + 7)[0].tolist()
    [1, 1]
    """
    greedy = seeds == GREEDY
    warm = torch.where(greedy, 1.0, temperatures)[:, None]
    logits = logits.float() / warm
    if filters:
        logits = _filter_logits(logits, torch.where(greedy, 1.0, top_ps), torch.where(greedy, 0, top_ks))
    log_probs = logits.log_softmax(-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.minimum(uniform(seeds, positions)[:, None] * total, below)
    tokens = torch.searchsorted(cumulative, drawn, right=True)[:, 0]
    tokens = torch.where(greedy, log_probs.argmax(-1), tokens)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _filter_logits(logits: torch.Tensor, top_ps: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Set the logits of tokens that `top_k`, then `top_p` leave out to minus infinity; 0 or the vocabulary's size keeps all."""
    vocab = logits.shape[-1]
    count = torch.where((top_ks > 0) & (top_ks < vocab), top_ks, vocab).long()
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    least = ordered.gather(-1, count[:, None] - 1)
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # the likeliest token has nothing before it and always stays
    out = (before >= top_ps[:, None]) & (top_ps[:, None] < 1) | ordered.isinf()
    return logits.masked_fill(torch.zeros_like(out).scatter_(-1, order, out), -torch.inf)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute a number in [0, 1) `[B]`, float64, for each seed and position: one output of SplitMix64 seeded by another.

    >>> numbers = uniform(torch.tensor([3, 3, 4]), torch.tensor([0, 1, 0]))
    >>> len(set(numbers.tolist()))
    3
    """
    mixed = _mix_bits(_mix_bits(seeds.long() * GOLDEN) + (positions.long() + 1) * GOLDEN)
    return _shift_right(mixed, 11).double() / float(1 << 53)


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_A
    x = (x ^ _shift_right(x, 27)) * MIX_B
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
