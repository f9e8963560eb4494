"""The kernels of an exact trainer and its engine on an NVIDIA GPU in bfloat16: their rows do not depend on the batch."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as kernels
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
from vllm.vllm_flash_attn import flash_attn_varlen_func

from rlgraph.engines.exact.gpu_norm import norm_forward
from rlgraph.engines.exact.gpu_products import forbid_split_sums, pad_single_rows
from rlgraph.engines.exact.rules import check_machine, check_model, check_plain, table_of
from rlgraph.engines.forward import packed_attention
from rlgraph.engines.forward.triton_scores import TritonScores
from rlgraph.engines.hf.backbone import backbone_of, install_fused_norms, layers_of
from rlgraph.errors import DataError

# Attention on a GPU by the engine's kernel, FlashAttention 3 with keys in one piece and one shape of tiles.
#
# The backward pass is that of any trainer, with FlashAttention 2 forward once more.
#
# The kernel takes tiles of 128 keys where it masks causally and is told of queries that fill a tile. Told of one query, as in a decode
# step, it takes others for heads of 64. So both sides tell it of `TOLD` at least for these; how many there are it reads on the GPU.

NAME = "rlgraph_exact_gpu"
TOLD = 128  # queries of the longest sequence, as the kernel is told for narrow heads
NARROW = 64  # numbers of a head


def kernel_seqlen(size: int, longest: int) -> int:
    """The number of queries of the longest sequence that the kernel is told of, for heads of a size."""
    return max(longest, TOLD) if size <= NARROW else longest


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of a flat row: `[1, L, H, D]` from `query [1, H, L, D]`, keys and values of as many or fewer heads.

    Raises DataError for a setting that is not proven to be exact.
    """
    check_plain(module, sliding_window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: torch.Tensor = _FlashAttention.apply(q, k, v, cu_seq_lens_q.int(), max_length_q, scaling)
    return out[None], None


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, starts)
        ctx.longest, ctx.scale = longest, scale
        out: torch.Tensor = flash_attn_varlen_func(
            query.detach(),
            key.detach(),
            value.detach(),
            max_seqlen_q=kernel_seqlen(query.shape[-1], longest),
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            cu_seqlens_k=starts,
            softmax_scale=scale,
            causal=True,
            fa_version=3,
            num_splits=1,
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *given, starts = ctx.saved_tensors
        with torch.enable_grad():
            own = [states.detach().requires_grad_() for states in given]
            query, key, value = (states.transpose(0, 1)[None] for states in own)
            out, _ = packed_attention.attend(
                None, query, key, value, None, cu_seq_lens_q=starts, max_length_q=ctx.longest, scaling=ctx.scale
            )
        return (*torch.autograd.grad(out, own, grads[0][None]), None, None, None)


# Rotation of queries and keys on a GPU by vLLM's kernel, with a table that engine and trainer compute by the same lines.
#
# vLLM's kernel rounds once, where separate products and sums in bfloat16 round three times.


class TableRotation(torch.nn.Module):
    """Stands for a model's rotary embedding: hands on the table and the positions, for `rotate` to use."""

    def __init__(self, own: Any, config: Any) -> None:
        super().__init__()
        self.own, self.config = own, config
        self.tables: dict[torch.device, torch.Tensor] = {}  # forth and back: [2, positions, D]

    @torch.no_grad()
    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if states.device not in self.tables:
            table = table_of(self.config, states.dtype, states.device)
            cos, sin = table.chunk(2, dim=-1)
            self.tables[states.device] = torch.stack([table, torch.cat([cos, -sin], dim=-1)])
        return self.tables[states.device], position_ids.flatten()


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(tables, positions)
        return rotate_heads(query, key, tables[0], positions)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tables, positions = ctx.saved_tensors
        return *rotate_heads(grads[0], grads[1], tables[1], positions), None, None


def rotate_heads(query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `[1, H, L, D]` queries and keys at `positions [L]`, as the engine does."""
    q, k = (x.detach()[0].transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in (query, key))
    kernels.rotary_embedding(positions, q.view(len(q), -1), k.view(len(k), -1), q.shape[-1], table, True)
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None]


def install_rotation(attention: Any) -> None:
    """Have the attention modules of a family rotate by the kernel where they are handed a table; else as before."""
    module = sys.modules[type(attention).__module__]
    own = module.apply_rotary_pos_emb
    if not isinstance(own, RotateByTable):
        vars(module)["apply_rotary_pos_emb"] = RotateByTable(own)


@dataclass(frozen=True)
class RotateByTable:
    """Rotates by the kernel where it is handed a table, and else by `own`, the family's function."""

    own: Callable[..., Any]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        if sin.is_floating_point():
            return self.own(query, key, cos, sin, unsqueeze_dim)
        return _Rotation.apply(query, key, cos, sin)


# A trainer's model that computes on an NVIDIA GPU in bfloat16 what vLLM computes there, bit for bit.
#
# Embeddings, SiLU and the products in between are equal as they are. Both sides have one kernel of norms, one attention, one rotation, one
# log-softmax, and products of matrices that are summed in one piece: `gpu_worker` gives vLLM those that it lacks.


def exchange(head: Any) -> None:
    """Give the model of a policy's `head` the kernels. Raises DataError for a model or a machine without proof."""
    from transformers import AttentionInterface

    check_machine()
    check_model(head.model.config.get_text_config())
    forbid_split_sums()
    head.score_tokens = token_scores
    model = head.model
    pad_single_rows(model)
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    backbone = backbone_of(model)
    layers = layers_of(backbone)
    if install_fused_norms(model, norm_forward) < 2 * len(layers) + 1:
        raise DataError(f"{type(model).__name__} has norms other than plain RMS norms, which exact=True does not support; leave it out")
    install_rotation(layers[0].self_attn)
    backbone.rotary_emb = TableRotation(backbone.rotary_emb, model.config.get_text_config())


# Log-probs on a GPU by the kernels of vLLM's sampler: logits in bfloat16, divided by the temperature and rounded, then one sum a row.


def token_scores(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float, entropy: bool, words: None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probs `[N]` of `tokens [N]` under `logits [N, V] / temperature`, and the entropies `[N]` if asked for: float32.

    The vocabulary is whole: an exact policy's is not shared between ranks.
    """
    scaled: torch.Tensor = _Scaled.apply(logits, temperature)
    found, entropies = TritonScores.apply(scaled, tokens, 1.0, entropy)
    return _Exact.apply(found, scaled.detach(), tokens), entropies if entropy else None


class _Scaled(torch.autograd.Function):
    """Logits divided as the engine does before it samples."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        ctx.temperature = temperature
        if temperature == 1 or len(logits) == 0:
            return logits.view_as(logits)
        out, device = logits.detach().clone(memory_format=torch.contiguous_format), logits.device
        apply_temperature(out, torch.zeros(len(out), dtype=torch.int32, device=device), torch.full((1,), temperature, device=device))
        return out

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
