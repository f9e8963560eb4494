"""Megatron-Core's parameters as boxes of Hugging Face parameters: the one table by which weights are loaded, published and saved.

A rank's queries, keys and values lie behind each other in one matrix (`attention`), and gate and up of an MLP in another. A piece is a view
of such a parameter, one range of its memory, so it is read and written in place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from rlgraph.engines.megatron.ranks import MegatronRanks

Piece: TypeAlias = tuple[str, tuple[int, ...], torch.Tensor]  # the Hugging Face parameter, offsets in it, and a view that is this box of it

NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
ROUTER = "mlp.router.weight"
EXPERTS = {"mlp.experts.gate_up": "mlp.experts.gate_up_proj", "mlp.experts.down": "mlp.experts.down_proj"}
BY_COLUMNS = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight", "mlp.linear_fc2.weight": "mlp.down_proj.weight"}
SCORE = "score.weight"


@dataclass(frozen=True)
class PieceTable:
    """The pieces of the parameters of one rank. `config` is Megatron-Core's. In the Hugging Face model the backbone's names begin with
    `prefix`, and `tied` embeddings are its head too; this rank's words begin at `first_word`."""

    config: Any
    ranks: MegatronRanks
    prefix: str
    tied: bool
    first_word: int = 0

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """Yield the pieces of a parameter, or of a tensor of its shape such as a moment."""
        if name in ("embedding.weight", "output.weight"):
            embeds = self.tied or name == "embedding.weight"
            yield f"{self.prefix}embed_tokens.weight" if embeds else "lm_head.weight", (self.first_word, 0), tensor
        elif name == "decoder.final_layernorm.weight":
            yield f"{self.prefix}norm.weight", (0,), tensor
        elif name == SCORE:
            yield name, (0, 0), tensor
        else:
            yield from self._of_layer(name, tensor)

    def _of_layer(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        number, _, rest = name.removeprefix("decoder.layers.").partition(".")
        layer = f"{self.prefix}layers.{int(number) + self.ranks.stage * self.config.num_layers // self.ranks.pipeline}."
        if rest in NORMS:
            yield layer + NORMS[rest], (0,), tensor
        elif rest == ROUTER:
            yield f"{layer}mlp.gate.weight", (0, 0), tensor
        elif rest in EXPERTS:
            yield layer + EXPERTS[rest], (self.ranks.expert_rank * tensor.shape[0], 0, 0), tensor
        elif rest in BY_COLUMNS:
            yield layer + BY_COLUMNS[rest], (0, self.ranks.tensor_rank * tensor.shape[1]), tensor
        elif rest == "mlp.linear_fc1.weight":
            for part, box in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{layer}mlp.{part}.weight", (self.ranks.tensor_rank * box.shape[0], 0), box
        elif rest.startswith("self_attention.linear_qkv."):
            yield from self._of_heads(f"{layer}self_attn.", rest.rpartition(".")[2], tensor)
        else:
            raise KeyError(f"Megatron-Core has a parameter '{name}', which the table of pieces lacks")

    def _of_heads(self, attention: str, kind: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """Yield the rows of this rank's queries, of its keys and of its values, of a weight or of a bias."""
        heads, groups = self.config.num_attention_heads, self.config.num_query_groups
        sizes = [count // self.ranks.tensor * self.config.kv_channels for count in (heads, groups, groups)]
        for part, rows in zip("qkv", tensor.split(sizes), strict=True):
            yield f"{attention}{part}_proj.{kind}", (self.ranks.tensor_rank * rows.shape[0], *(0,) * (tensor.dim() - 1)), rows

    def replica(self, name: str) -> int:
        """Number this rank, an owner of a parameter, among the owners of the same boxes; the first is 0."""
        whole = name == SCORE or sees_own(name)  # on each rank, where matrices are cut
        again = self.tied and name == "output.weight"  # the last stage has the embeddings once more
        return whole * self.ranks.tensor_rank + again * self.ranks.world


def is_expert(name: str) -> bool:
    """Whether a parameter is of experts."""
    return name.endswith(tuple(EXPERTS))


def sees_own(name: str) -> bool:
    """Whether each rank of those that share matrices holds all of a parameter, and the gradient of its own tokens or heads."""
    return name.endswith(("layernorm.weight", ROUTER))
