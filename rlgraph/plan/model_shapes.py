"""The shapes of models and adapters, read from config.json: parameters, layers and bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rlgraph.errors import DataError
from rlgraph.graph.nodes import Graph, Model
from rlgraph.values.lora import ALL_LINEAR

# The shape of a model by its config.json, and the parameters and bytes that follow.


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


def has_shapes(graph: Graph, shapes: Shapes) -> bool:
    """Tell whether the graph has models and the shape of each is known."""
    paths = {node.model.path for node in graph.nodes if node.model is not None}
    return bool(paths) and paths <= shapes.keys()


# Read the shapes of a graph's models from their config.json, so that a plan knows them before the models load.


def shapes_of(graph: Graph) -> Mapping[str, ModelShape]:
    """Read the shapes of the graph's models that have a config.json on this machine; no other file of a model is read."""
    paths = {node.model.path for node in graph.nodes if node.model is not None}
    found = {path: _shape(path) for path in paths}
    return {path: shape for path, shape in found.items() if shape is not None}


def _shape(path: str) -> ModelShape | None:
    file = Path(path) / "config.json"
    try:
        return _shape_by(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (ValueError, OSError) as broken:
        raise DataError(f"'{file}' is not JSON ({broken!s:.80}); write the model folder again") from None


@lru_cache(maxsize=64)  # by what the file holds, not by its path: a folder may be written again
def _shape_by(text: str) -> ModelShape | None:
    config = json.loads(text)
    return ModelShape.from_config(config) if isinstance(config, dict) else None  # what is no config is refused where it loads


# The size of an adapter, by the shape of its model.

FLOAT32 = 4
NF4 = 1 / 2 + 4 / 64  # bytes of a number in 4 bits, with its part of the scale of 64
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a dense layer


@dataclass(frozen=True)
class AdapterSize:
    """The numbers of an adapter: its own `parameters`, and those of the `matrices` of the model that it changes.

    >>> shape = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
    >>> AdapterSize.of(shape, 4, ("q_proj", "down_proj"))
    AdapterSize(parameters=320, matrices=384)
    """

    parameters: int
    matrices: int

    @property
    def bytes(self) -> int:
        """The bytes of the adapter as it is trained and published."""
        return self.parameters * FLOAT32

    @classmethod
    def of(cls, shape: ModelShape, rank: int, targets: Literal["all-linear"] | tuple[str, ...]) -> "AdapterSize":
        """Count the numbers of an adapter of this rank; a projection that is no known one counts nothing."""
        found = [size for name, size in projections(shape).items() if targets == ALL_LINEAR or name in targets]
        return cls(shape.layers * sum(rank * (into + out) for into, out in found), shape.layers * sum(into * out for into, out in found))


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The projections of a dense layer: numbers that go in and come out."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    into_and_out = (
        (shape.hidden, queries),
        (shape.hidden, keys),
        (shape.hidden, keys),
        (queries, shape.hidden),
        (shape.hidden, shape.intermediate),
        (shape.hidden, shape.intermediate),
        (shape.intermediate, shape.hidden),
    )
    return dict(zip(PROJECTIONS, into_and_out, strict=True))


def frozen_bytes(model: Model, shape: ModelShape, size: AdapterSize, itemsize: int) -> int:
    """Count the bytes of the model beside an adapter: in the dtype of passes, or in 4 bits where adapters change it."""
    in_four_bits = size.matrices if model.traits.adapter is not None and model.traits.adapter.base is not None else 0
    return int((shape.parameters - in_four_bits) * itemsize + in_four_bits * NF4)


def adapter_size(model: Model | None, shape: ModelShape | None) -> AdapterSize | None:
    """Count the numbers of a model's adapter; None for a model without one, or of unknown shape."""
    adapter = model.traits.adapter if model is not None else None
    return None if adapter is None or shape is None else AdapterSize.of(shape, adapter.rank, adapter.targets)
