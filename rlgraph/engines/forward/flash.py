"""FlashAttention over rows packed flat: with sinks, and with prompts that several responses share.

It is FlashAttention 2, as PyTorch carries it, or 4 where `flash4` takes the heads.
The kernel gives its output and the logarithm of each row's sum. From these follow the output and the sum over more keys, be it a sink
or a prompt that another call attended to. Its backward pass wants both: given those over all keys, the gradients of each call are its
share of the whole's.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from rlgraph.batching.packing import SharedPrompts
from rlgraph.engines.forward import flash4


def takes(size: int) -> bool:
    """Whether the kernel supports heads of this size. By arithmetic alone: in a compiled layer the size can be a symbol."""
    return size <= 256 and size % 8 == 0


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
    shared: SharedPrompts | None = None,
) -> torch.Tensor:
    """Attend `[L, H, D]` by the kernel. Values that are narrower than keys, as in latent attention, are padded for it."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = pad(v, (0, q.shape[-1] - width))
    apply = _apply if sinks is None else _apply_untraced
    if shared is not None and (window is None or window >= shared.most_keys):
        prompts = (shared.prompts, shared.responses, *shared.tokens, *shared.longest)
        out = apply(FlashBehindPrompts, q, k, v, sinks, starts, longest, *prompts, scaling)
    elif shared is not None:  # which keys a window leaves follows from a token's place behind its prompt
        out = apply(FlashOfRow, q, k, v, sinks, starts, longest, shared.keys, shared.key_starts, shared.most_keys, scaling, window)
    elif sinks is not None:
        out = apply(FlashOfRow, q, k, v, sinks, starts, longest, None, starts, longest, scaling, window)
    else:
        out = forward(q, k, v, starts, starts, longest, longest, window is None, scaling, window)[0]
    return out[..., :width]


def _apply(function: Any, *given: Any) -> torch.Tensor:
    out: torch.Tensor = function.apply(*given)
    return out


# Keeps attention with sinks out of a compiled layer: torch 2.11 gives it gradients of 0 there, without a word.
_apply_untraced: Any = torch.compiler.disable(_apply)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the output `[L, H, D]`, the logarithmic sums `[H, L]`, and what the backward pass wants besides."""
    if flash4.takes(*q.shape[1:]):
        out, sums = flash4.forward(q, k, v, of_queries, of_keys, most_queries, most_keys, causal, scale, window)
        return out, sums, sums.new_empty(0), sums.new_empty(0)
    found: tuple[torch.Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q, k, v, of_queries, of_keys, most_queries, most_keys, 0.0, causal, False, scale=scale, **_window(window)
    )
    return (
        found[0],
        found[1],
        found[2],
        found[3],
    )  # by no names: where two calls give tensors one name, torch 2.11 compiles no backward pass


def backward(
    grad: torch.Tensor,
    given: tuple[torch.Tensor, ...],
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of queries, keys and values, `given` with the output, its sums, and what the forward pass gave besides."""
    if flash4.takes(*given[0].shape[1:]):
        return flash4.backward(grad, *given[:5], of_queries, of_keys, most_queries, most_keys, causal, scale, window)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
        *(grad, *given[:5], of_queries, of_keys, most_queries, most_keys, 0.0, causal, *given[5:]), scale=scale, **_window(window)
    )
    return found


def _window(window: int | None) -> dict[str, int]:
    """Convert a window to the kernel's, which does not count the token itself."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


class FlashOfRow(torch.autograd.Function):
    """FlashAttention over segments with a sink for each head, which is one more key with the score `sinks[h]` and a value of 0.

    `places` are those of the keys that the segments see, each segment being the last of its own; None: each sees itself. They are
    gathered once more in the backward pass, so that only one layer has them in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        starts: torch.Tensor,
        longest: int,
        places: torch.Tensor | None,
        key_starts: torch.Tensor,
        most_keys: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        seen_k, seen_v = (k, v) if places is None else (k[places], v[places])
        causal = window is None
        own = forward(q, seen_k, seen_v, starts, key_starts, longest, most_keys, causal, scale, window)
        found = own[:2] if sinks is None else with_sinks(own[0], own[1], sinks)
        ctx.save_for_backward(q, k, v, sinks, starts, places, key_starts, *found, *own[2:])
        ctx.longest, ctx.most_keys, ctx.scale, ctx.window = longest, most_keys, scale, window
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, starts, places, key_starts, out, sums, seed, unused = ctx.saved_tensors
        grad = grad.contiguous()
        seen_k, seen_v = (k, v) if places is None else (k[places], v[places])
        where = (starts, key_starts, ctx.longest, ctx.most_keys, ctx.window is None, ctx.scale, ctx.window)
        of_q, of_k, of_v = backward(grad, (q, seen_k, seen_v, out, sums, seed, unused), *where)
        if places is not None:  # in float32: many responses add to the gradient of one prompt
            of_k, of_v = (
                torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add(0, places, of_x.float()).to(x.dtype)
                for x, of_x in ((k, of_k), (v, of_v))
            )
        of_s = None if sinks is None else of_sinks(grad, out, sums, sinks)
        return of_q, of_k, of_v, of_s, None, None, None, None, None, None, None


class FlashBehindPrompts(torch.autograd.Function):
    """FlashAttention where responses share prompts: of all segments by themselves, and of responses to the prompts before them.

    The row begins with prompts of `prompt_tokens` in all, and their responses of `response_tokens`. The queries of all responses to a
    prompt see each of its keys, so the second call has no causal mask and reads a prompt once for all of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        starts: torch.Tensor,
        longest: int,
        prompts: torch.Tensor,
        responses: torch.Tensor,
        prompt_tokens: int,
        response_tokens: int,
        most_prompt: int,
        most_responses: int,
        scale: float | None,
    ) -> torch.Tensor:
        end = prompt_tokens + response_tokens
        own = forward(q, k, v, starts, starts, longest, longest, True, scale)
        behind = forward(
            *(q[prompt_tokens:end], k[:prompt_tokens], v[:prompt_tokens]), responses, prompts, most_responses, most_prompt, False, scale
        )
        both, both_sums = merge_attention(own[0][prompt_tokens:end], own[1][:, prompt_tokens:end], behind[0], behind[1])
        row = torch.cat([own[0][:prompt_tokens], both, own[0][end:]])
        row_sums = torch.cat([own[1][:, :prompt_tokens], both_sums, own[1][:, end:]], dim=1)
        found = (row, row_sums) if sinks is None else with_sinks(row, row_sums, sinks)
        ctx.save_for_backward(q, k, v, sinks, starts, prompts, responses, *found, *own[2:], *behind[2:])
        ctx.longest, ctx.scale, ctx.most_prompt, ctx.most_responses = longest, scale, most_prompt, most_responses
        ctx.prompt_tokens, ctx.end = prompt_tokens, end
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, starts, prompts, responses, out, sums, *rest = ctx.saved_tensors
        grad, tokens, end = grad.contiguous(), ctx.prompt_tokens, ctx.end
        given = (q, k, v, out, sums, rest[0], rest[1])
        of_q, of_k, of_v = backward(grad, given, starts, starts, ctx.longest, ctx.longest, True, ctx.scale)
        behind = (q[tokens:end], k[:tokens], v[:tokens], out[tokens:end], sums[:, tokens:end].contiguous(), rest[2], rest[3])
        more = backward(grad[tokens:end], behind, responses, prompts, ctx.most_responses, ctx.most_prompt, False, ctx.scale)
        of_q = torch.cat([of_q[:tokens], of_q[tokens:end] + more[0], of_q[end:]])
        of_k, of_v = (torch.cat([own[:tokens] + other, own[tokens:]]) for own, other in ((of_k, more[1]), (of_v, more[2])))
        of_s = None if sinks is None else of_sinks(grad, out, sums, sinks)
        return of_q, of_k, of_v, of_s, None, None, None, None, None, None, None, None, None


def merge_attention(out: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention `[L, H, D]` of the same queries over two sets of keys, by their logarithmic sums `[H, L]`; give both."""
    whole = torch.logaddexp(sums, others)
    shares = [(part - whole).exp().t()[..., None] for part in (sums, others)]
    return (out * shares[0] + other * shares[1]).to(out.dtype), whole


def with_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add sinks `[H]` to an attention `out [L, H, D]` whose rows have the logarithmic sums `[H, L]`; give both with them."""
    whole = torch.logaddexp(sums, sinks.float()[:, None])
    return (out * (sums - whole).exp().t()[..., None]).to(out.dtype), whole


def of_sinks(grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Compute the gradient `[H]` of the sinks from that of the output `[L, H, D]` and the results of `with_sinks`."""
    shares = (sinks.float()[:, None] - sums).exp()
    return -(shares * (grad.float() * out.float()).sum(-1).t()).sum(-1).to(sinks.dtype)
