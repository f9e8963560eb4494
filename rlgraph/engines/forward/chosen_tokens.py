"""Log-probs of several tokens at each position: given ones, or the most probable. The logits of a few rows are in memory at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlgraph.engines.forward.rows import rows_at_once

Shape = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens whose log-probs are computed at each position: `ids` `[N, K]`, or without them the `top_k` most probable, None for all."""

    ids: torch.Tensor | None = None
    top_k: int | None = None

    def scores(
        self, head: Any, states: torch.Tensor, tokens: torch.Tensor, shape: Shape, *, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Score by the linear map `head` of `states [N, H]`, in float32: the log-probs `[N]` of `tokens [N]`, and two more.

        Of given tokens these are the entropies `[N]` and the log-probs `[N, K]`, with gradients; the backward pass computes the logits
        again. Of the most probable ones, and of all, they are the ids and the log-probs `[N, K]`.
        """
        size, parts = rows_at_once(head.weight.device, head.weight.shape[0]), []
        for first in range(0, max(len(states), 1), size):
            rows = slice(first, first + size)
            given = (states[rows], head.weight, head.bias, tokens[rows])
            if self.ids is None:
                parts.append(_most(*given, self.top_k, shape, temperature))
            else:
                parts.append(checkpoint(_chosen, *given, self.ids[rows], shape, temperature, use_reentrant=False))
        own, second, third = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return own, second, third


def _log_probs(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape, temperature: float) -> torch.Tensor:
    return (shape(linear(states, weight, bias)).float() / temperature).log_softmax(-1)


def _chosen(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    shape: Shape,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = _log_probs(states, weight, bias, shape, temperature)
    return found.gather(-1, tokens[:, None])[:, 0], -(found.exp() * found).sum(-1), found.gather(-1, ids.long())


def _most(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    top_k: int | None,
    shape: Shape,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = _log_probs(states, weight, bias, shape, temperature)
    own, words = found.gather(-1, tokens[:, None])[:, 0], found.shape[-1]
    if top_k is None:
        return own, torch.arange(words, device=found.device).expand(found.shape), found
    most, ids = found.topk(min(top_k, words), -1)
    return own, ids, most
