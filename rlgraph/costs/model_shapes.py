"""The shape of a model by its config.json, and the parameters and bytes that follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlgraph.graph.nodes import Graph


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. `experts` and `experts_used` are 1 for a dense model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    experts: int = 1
    experts_used: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape | None":
        """Read the shape from a config.json in Hugging Face format; None for another kind of model."""
        nested = config.get("text_config")  # of a multimodal model
        config = {**config, **nested} if isinstance(nested, dict) else config
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            intermediate = config.get("moe_intermediate_size") or config["intermediate_size"]
            if not all(isinstance(size, int) for size in (heads, hidden, intermediate, config["num_hidden_layers"], config["vocab_size"])):
                return None  # as where layers have sizes of their own
            experts = config.get("num_experts") or config.get("num_local_experts") or 1
            return cls(
                layers=config["num_hidden_layers"],
                hidden=hidden,
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                intermediate=intermediate,
                vocab=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings")),
                experts=experts,
                experts_used=config.get("num_experts_per_tok") or 1,
            )
        except (KeyError, TypeError):
            return None

    @property
    def layer_parameters(self) -> int:
        return self._layer(self.experts)

    def own_layer(self, expert: int) -> int:
        """Count the parameters of a layer with the experts of one of `expert` ranks that share them."""
        return self.layer_parameters - self._of_experts * (expert - 1) // expert

    def own_parameters(self, tensor: int, pipeline: int, expert: int) -> int:
        """Count the parameters of a rank where `tensor` × `pipeline` ranks share a model, and `expert` ranks with the same layers its
        experts, whole ones."""
        inner = self.expert_parameters
        return (self.parameters - inner) // (tensor * pipeline) + inner // (pipeline * expert)

    @property
    def expert_parameters(self) -> int:
        """Count the parameters of all experts; none of a dense model's."""
        return self._of_experts * self.layers

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def active_parameters(self) -> int:
        """Count the parameters that one token passes through, the head included, also in a tied model."""
        return self.layers * self._layer(self.experts_used) + self.vocab * self.hidden

    def weight_bytes(self, itemsize: int, *, fp8: bool = False) -> int:
        """The bytes of the weights; with `fp8` the layers have one byte a parameter. Scales are below a thousandth of that."""
        return self.parameters * itemsize - (self.layers * self.layer_parameters * (itemsize - 1) if fp8 else 0)

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    @property
    def _of_experts(self) -> int:
        return 3 * self.hidden * self.intermediate * self.experts if self.experts > 1 else 0

    def _layer(self, experts: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + 3 * self.hidden * self.intermediate * experts + router + 2 * self.hidden


Shapes = Mapping[str, ModelShape]  # by the path of the model


def known(graph: Graph, shapes: Shapes) -> bool:
    """Tell whether the graph has models and the shape of each is known."""
    paths = {node.model.path for node in graph.nodes if node.model is not None}
    return bool(paths) and paths <= shapes.keys()
