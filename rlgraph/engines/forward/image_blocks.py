"""Attention in both directions within the images of prompts, as Gemma 3 has it, behind the causal attention of any layout.

The tokens of an image see all of it and what is before it in their sequence. So their rows of the causal attention's output are replaced
by a second attention, of these tokens only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rlgraph.engines.forward import flash


@dataclass(frozen=True)
class ImageBlocks:
    """The images of an input `[S, L]`, by the places of their tokens among its S x L tokens.

    Image i has the tokens `queries[starts[i]:starts[i + 1]]`, which see `keys[key_starts[i]:key_starts[i + 1]]`: all of their sequence up
    to the end of the image. The starts are [images + 1] each, int32. `longest` bounds the tokens of an image, and those that one sees.
    """

    queries: torch.Tensor
    starts: torch.Tensor
    keys: torch.Tensor
    key_starts: torch.Tensor
    longest: tuple[int, int]

    @classmethod
    def of(cls, places: torch.Tensor, row: torch.Tensor) -> "ImageBlocks":
        """Find the images of an input: runs of `places` [S, L], true on their tokens, each in the sequence whose number `row` [S, L] has.

        >>> blocks = ImageBlocks.of(torch.tensor([[False, True, True, False, True]]), torch.tensor([[0, 0, 0, 1, 1]]))
        >>> blocks.queries.tolist(), blocks.starts.tolist(), blocks.keys.tolist(), blocks.key_starts.tolist()
        ([1, 2, 4], [0, 2, 3], [0, 1, 2, 3, 4], [0, 3, 5])
        """
        at, of = places.flatten().nonzero()[:, 0].cpu(), row.flatten().cpu()
        runs = at.tensor_split((at.diff() != 1).nonzero()[:, 0] + 1)
        keys = [(of[: run[-1] + 1] == of[run[0]]).nonzero()[:, 0] for run in runs]
        sizes, seen = list(map(len, runs)), list(map(len, keys))
        starts, key_starts = (torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=places.device) for each in (sizes, seen))
        longest = max(2, *sizes), max(seen)  # at least 2, as of `SharedPrompts`
        return cls(at.to(places.device), starts, torch.cat(keys).to(places.device), key_starts, longest)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """Attend `[n, H, D]` from the tokens of the images, of `query [S, H, L, D]`, no further back than a window."""
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[at] for x, at in ((query, self.queries), (key, self.keys), (value, self.keys)))
        fast = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and flash.takes(q.shape[-1])
        return (attend_by_kernel if fast else attend_one_by_one)(self, q, k, v, scaling, window)


def attend_by_kernel(
    blocks: ImageBlocks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attend `[n, H, D]` from the tokens of images by one call of FlashAttention."""
    left = {} if window is None else {"window_size_left": window - 1, "window_size_right": -1}  # -1: no bound
    where = (blocks.starts, blocks.key_starts, *blocks.longest)
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(q, k, v, *where, 0.0, False, False, scale=scaling, **left)[0]
    return out


def attend_one_by_one(
    blocks: ImageBlocks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attend `[n, H, D]` from the tokens of one image after another in PyTorch."""
    parts = []
    for (begin, end), (first, last) in zip(pairwise(blocks.starts.tolist()), pairwise(blocks.key_starts.tolist()), strict=True):
        own, seen_k, seen_v = (x.transpose(0, 1)[None] for x in (q[begin:end], k[first:last], v[first:last]))
        of_query, of_key = (torch.arange(-size, 0, device=q.device) for size in (end - begin, last - first))
        mask = None if window is None else of_query[:, None] - of_key < window
        parts.append(scaled_dot_product_attention(own, seen_k, seen_v, mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])[0])
    return torch.cat(parts, dim=1).transpose(0, 1)


def sees_images(attention: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Let an attention of transformers' interface, `[S, L, H, D]` from `query [S, H, L, D]`, accept `image_blocks`."""

    @wraps(attention)
    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        image_blocks: ImageBlocks | None = None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        out, _ = attention(module, query, key, value, attention_mask, **given)
        if image_blocks is None:
            return out, None
        images = image_blocks.attend(query, key, value, given.get("scaling"), given.get("sliding_window"))
        return out.flatten(0, 1).index_copy(0, image_blocks.queries, images).view_as(out), None

    return attend
