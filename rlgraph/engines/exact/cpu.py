"""The kernels of vLLM on a CPU for an exact trainer: attention, linear maps and rotation; backward by PyTorch."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from vllm import _custom_ops as kernels
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from rlgraph.engines.exact.rules import check_plain
from rlgraph.engines.forward import packed_attention
from rlgraph.engines.hf.backbone import backbone_of, layers_of
from rlgraph.engines.precision import in_company

# Rotation of queries and keys by the kernel of vLLM on a CPU. With AVX-512 it rounds once where separate products and sums round twice.


class LateRotation(torch.nn.Module):
    """Stands for a model's rotary embedding: gives cos = 1 and sin = 0, so that the exact attention can rotate by itself."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, _ = self.own(states[:, :1], position_ids[:, :1])
        one = cos.new_ones(1, 1, 1).expand(*position_ids.shape, cos.shape[-1])
        return one, torch.zeros_like(one)

    @torch.no_grad()
    def table(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """The cosines, then the sines, of the positions up to a length: `[length, D]` for heads of D numbers."""
        cos, sin = self.own(like, torch.arange(length)[None])
        half = cos.shape[-1] // 2
        return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


def rotate_heads(states: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate heads `[L, H, D]` at these positions `[L]`, as the engine does."""
    out = states.clone()
    kernels.rotary_embedding(positions, out.view(len(out), -1), None, states.shape[-1], table, True)
    return out


def rotated_plainly(states: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate heads `[1, H, L, D]` in PyTorch, for their gradient."""
    cos, sin = table[positions].chunk(2, dim=-1)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# Attention by the kernel of vLLM on a CPU, in the engine's order: the prompt at once, then each token by itself; backward by PyTorch.

NAME = "rlgraph_exact"
BLOCK = 32  # tokens of a block of keys and values: results do not depend on it
SPLIT = True  # as vLLM's default; with one thread it has no effect


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    cu_seq_lens_q: torch.Tensor,
    prompt_lengths: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of a flat row: `[1, L, H, D]` from `query [1, H, L, D]`, keys and values of as many or fewer heads.

    Queries and keys come as they were projected; `module.rotation` turns them.

    Sequence i begins at `cu_seq_lens_q[i]` with a prompt of `prompt_lengths[i]` tokens. Raises DataError for a setting that is not
    proven to be exact.
    """
    check_plain(module, sliding_window, softcap, s_aux)
    starts = cu_seq_lens_q.tolist()
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(starts)])
    table = module.rotation.table(int(positions.max()) + 1, query)
    out: torch.Tensor = _Attention.apply(query, key, value, (positions, table), starts, prompt_lengths.tolist(), scaling)
    return out, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        turn: tuple[torch.Tensor, torch.Tensor],
        starts: list[int],
        prompts: list[int],
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.turn, ctx.starts, ctx.scale = turn, starts, scale
        q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return attend_in_order(rotate_heads(q, *turn), rotate_heads(k, *turn), v, starts, prompts, scale)[None]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            q, k, v = rotated_plainly(given[0], *ctx.turn), rotated_plainly(given[1], *ctx.turn), given[2]
            found, _ = packed_attention.attend(None, q, k, v, None, cu_seq_lens_q=torch.tensor(ctx.starts), scaling=ctx.scale)
        return (*torch.autograd.grad(found, given, grads), None, None, None, None)


@dataclass(frozen=True)
class _Call:
    """One call of the kernel: the `rows` of the queries, where each sequence begins among them, the keys that it sees, and its blocks."""

    rows: torch.Tensor
    begins: torch.Tensor
    seen: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True)
class _Order:
    """The order of a pass: the place of each token in `blocks` blocks of keys and values, and the calls."""

    slots: torch.Tensor
    blocks: int
    calls: tuple[_Call, ...]


@lru_cache(maxsize=1)  # the layers of a pass have one order
def _order(starts: tuple[int, ...], prompts: tuple[int, ...]) -> _Order:
    """One call for all prompts, and one in which each later token is a sequence of its own over the same keys."""
    lengths = [end - start for start, end in pairwise(starts)]
    counts = [-(-length // BLOCK) for length in lengths]
    table, slots, first = torch.zeros(len(lengths), max(counts), dtype=torch.int32), list[int](), 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[index, :count] = torch.arange(first, first + count)
        slots += range(first * BLOCK, first * BLOCK + length)
        first += count
    decoded = [range(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    of_prompts = [start + at for start, prompt in zip(starts, prompts, strict=False) for at in range(prompt)]
    of_tokens = [start + at for start, ats in zip(starts, decoded, strict=False) for at in ats]
    owner = [index for index, ats in enumerate(decoded) for _ in ats]
    calls = (
        (of_prompts, torch.tensor([0, *prompts]).cumsum(0), torch.tensor(prompts), table),
        (of_tokens, torch.arange(len(of_tokens) + 1), torch.tensor([at + 1 for ats in decoded for at in ats]), table[owner]),
    )
    made = tuple(_Call(torch.tensor(rows), begins.int(), seen.int(), own.contiguous()) for rows, begins, seen, own in calls if rows)
    return _Order(torch.tensor(slots), first, made)


def attend_in_order(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: list[int], prompts: list[int], scale: float
) -> torch.Tensor:
    """Attend `[L, H, D]` in the engine's order."""
    order, (_, heads, size) = _order(tuple(starts), tuple(prompts)), key.shape
    kind = _get_attn_isa(key.dtype, BLOCK, size, "auto")
    keys, values = torch.zeros(order.blocks, heads, 2 * BLOCK, size).chunk(2, dim=2)
    kernels.cpu_attn_reshape_and_cache(key, value, keys, values, order.slots, kind)
    out = torch.empty_like(query)
    for call in order.calls:
        out[call.rows] = _call_kernel(query[call.rows], keys, values, call, scale, kind)
    return out


def _call_kernel(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: _Call, scale: float, kind: str) -> torch.Tensor:
    plan = kernels.cpu_attn_get_scheduler_metadata(
        num_reqs=len(call.seen),
        num_heads=query.shape[1],
        num_kv_heads=keys.shape[1],
        head_dim=query.shape[2],
        seq_lens=call.seen,
        dtype=query.dtype,
        query_start_loc=call.begins,
        causal=True,
        sliding_window_size=-1,
        isa=kind,
        enable_kv_split=SPLIT,
    )
    out = torch.empty_like(query)
    kernels.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=out,
        query_start_loc=call.begins,
        seq_lens=call.seen,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=call.table,
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return out


# Linear maps by the kernel of vLLM on a CPU, whose results do not depend on the number of rows; backward by PyTorch.

PRIMITIVES = 32  # that a kernel keeps, one for each number of rows: as many as the engine's


class ExactLinear(torch.nn.Linear):
    """A linear map that computes each row as the engine does. Its weights are packed at the first pass after `forget`."""

    packed: Any = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            self.packed = kernels.create_onednn_mm(self.weight.detach().t(), PRIMITIVES)
        out: torch.Tensor = _Product.apply(states, self.weight, self.bias, self.packed)
        return out

    def forget(self) -> None:
        """Let go of the packed weights: the kernel would go on with them after the weights have changed."""
        self.packed = None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packed: Any) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        given = None if bias is None else bias.detach()
        return in_company(lambda rows: kernels.onednn_mm(packed, rows, given), states.detach())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (states, weight) = grads, ctx.saved_tensors
        rows, of_rows = states.flatten(0, -2), grad.flatten(0, -2)
        of_weight = of_rows.t() @ rows if ctx.needs_input_grad[1] else None
        return grad @ weight if ctx.needs_input_grad[0] else None, of_weight, of_rows.sum(0) if ctx.has_bias else None, None


def exchange(head: Any) -> list[Any]:
    """Give the model of a policy's `head` the kernels. Returns its linear maps."""
    from transformers import AttentionInterface

    model = head.model
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    backbone = backbone_of(model)
    backbone.rotary_emb = LateRotation(backbone.rotary_emb)
    for layer in layers_of(backbone):
        object.__setattr__(layer.self_attn, "rotation", backbone.rotary_emb)  # no second parent of the module
    found = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for module in found:
        module.__class__ = ExactLinear  # in place: another module in its stead would change the names of parameters, and what holds it
    return found
