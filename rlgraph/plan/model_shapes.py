"""The shapes of models and adapters, read from config.json, and their bytes on a device.

A device holds the parts of a model, the memory of each instant of an update, and the activations of each layer for the backward pass.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rlgraph.errors import DataError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Node
from rlgraph.graph.traits import ImageSizes, ModelTraits
from rlgraph.settings import Recompute
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
                return None  # e.g. if layers differ in size
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
        """Count the parameters of a layer, with the share of one of `expert` ranks in its experts."""
        return self.layer_parameters - self._of_experts * (expert - 1) // expert

    def own_parameters(self, tensor: int, pipeline: int, expert: int) -> int:
        """Count the parameters of a rank if `tensor` × `pipeline` ranks share a model, and `expert` ranks with the same layers share its
        experts, each of them whole."""
        inner = self.expert_parameters
        return (self.parameters - inner) // (tensor * pipeline) + inner // (pipeline * expert)

    @property
    def expert_parameters(self) -> int:
        """Count the parameters of all experts; 0 for a dense model."""
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
        """The bytes of the weights; with `fp8` the layers have one byte per parameter. Scales are below a thousandth of that."""
        return self.parameters * itemsize - (self.layers * self.layer_parameters * (itemsize - 1) if fp8 else 0)

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    @property
    def layer_widths(self) -> int:
        """Count the numbers per token in a layer: hidden, queries, keys, values, and the inner ones of its experts."""
        return self.hidden + self.head_dim * (self.heads + 2 * self.kv_heads) + self.intermediate * self.experts_used

    @property
    def _of_experts(self) -> int:
        return 3 * self.hidden * self.intermediate * self.experts if self.experts > 1 else 0

    def _layer(self, experts: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + 3 * self.hidden * self.intermediate * experts + router + 2 * self.hidden


Shapes = Mapping[str, ModelShape]  # by the path of the model


def has_shapes(graph: Graph, shapes: Shapes) -> bool:
    """Whether the graph has models and the shape of each is known."""
    return bool(graph.models) and all(model.path in shapes for model in graph.models)


# Read the shapes of a graph's models from their config.json, so that a plan knows them before the models load.


def shapes_of(graph: Graph) -> Mapping[str, ModelShape]:
    """Read the shapes of the graph's models that have a config.json on this machine; no other file of a model is read."""
    found = {model.path: _shape(model.path) for model in graph.models}
    return {path: shape for path, shape in found.items() if shape is not None}


def _shape(path: str) -> ModelShape | None:
    file = Path(path) / "config.json"
    try:
        return _shape_by(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (ValueError, OSError) as broken:
        raise DataError(f"'{file}' is not JSON ({broken!s:.80}); write the model folder again") from None


@lru_cache(maxsize=64)  # cached by content, not by path: a folder may be written again
def _shape_by(text: str) -> ModelShape | None:
    config = json.loads(text)
    return ModelShape.from_config(config) if isinstance(config, dict) else None  # the load refuses anything but a config


# The tower of a model: the part that reads images. A frozen one is whole in each worker.


@dataclass(frozen=True)
class Tower:
    """Its `parameters`, the `operations` for the images of a prompt, on average, their `tokens` and `patches`, and the elements of features
    that a worker keeps, of as many prompts as it keeps. Its layers are those of `shape`, which has no vocabulary."""

    parameters: int
    operations: float
    tokens: float
    kept: int
    patches: float
    shape: ModelShape

    def activations(self, recompute: Recompute) -> float:
        """Count the elements that a pass keeps of the images of a prompt for the backward pass."""
        whole = kept_by_layer(self.shape)
        by_layers = self.shape.layers * kept_by_layer(self.shape, recompute) + (whole if recompute else 0)
        return self.patches * by_layers

    def repeated_work(self, recompute: Recompute) -> float:
        """Count the operations that the backward pass repeats for the images of a prompt."""
        return self.operations if recompute is True else self.patches * recomputed_operations(self.shape, recompute)


def tower_of(node: Node) -> Tower | None:
    """Count the tower of a node's model, and its work with the images that the node is given; None for a node without images."""
    count = node.model.traits.tower if node.model is not None else None
    return None if count is None or "images" not in (*node.reads, *node.writes) else count(_sizes_of_images(node))


def generators_tower(graph: Graph, model: Model) -> int:
    """Count the parameters of the tower that an engine loads with the rest of its model; trainers load theirs at their first step."""
    found = [tower_of(node) for node in graph.nodes if node.model is model and node.traits.work == "generate"]
    return max((tower.parameters for tower in found if tower is not None), default=0)


def trained_tower(graph: Graph, model: Model | None) -> int:
    """Count the parameters of the tower that a model trains, and publishes with the rest."""
    if model is None or not model.traits.train_vision or model.traits.adapter is not None:
        return 0
    return max((tower.parameters for node in graph.nodes if node.model is model and (tower := tower_of(node)) is not None), default=0)


def _sizes_of_images(node: Node) -> ImageSizes:
    """Find the sizes of images of a node's prompts, at the source that they come from."""
    return node.operation.image_sizes or next((found for output in node.inputs if (found := _sizes_of_images(output.node))), ())


# The size of an adapter, by the shape of its model.

FLOAT32 = 4
NF4 = 1 / 2 + 4 / 64  # bytes of an element in 4 bits, with its part of the scale of 64 elements
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a dense layer


@dataclass(frozen=True)
class AdapterSize:
    """The elements of an adapter: its own `parameters`, and the elements of the `matrices` of the model that it changes.

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
        """Count the elements of an adapter of this rank; an unknown projection counts nothing."""
        found = [size for name, size in projections(shape).items() if targets == ALL_LINEAR or name in targets]
        return cls(shape.layers * sum(rank * (into + out) for into, out in found), shape.layers * sum(into * out for into, out in found))


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The projections of a dense layer: input and output sizes."""
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
    """Count the bytes of the model without its adapter: in the dtype of passes, or in 4 bits for the matrices that adapters change."""
    in_four_bits = size.matrices if model.traits.adapter is not None and model.traits.adapter.base is not None else 0
    return int((shape.parameters - in_four_bits) * itemsize + in_four_bits * NF4)


def adapter_size(model: Model | None, shape: ModelShape | None) -> AdapterSize | None:
    """Count the elements of a model's adapter; None for a model without one, or of unknown shape."""
    adapter = model.traits.adapter if model is not None else None
    return None if adapter is None or shape is None else AdapterSize.of(shape, adapter.rank, adapter.targets)


# A model as it is to run, and the memory that it needs on a device.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model of a graph at run time: `workers` engines or ranks, each on `width` devices.

    `itemsize` is the bytes per element in passes, `rows` the responses per step over all workers. Prompt and response together have at most
    `longest` tokens, and `usual` on average. A generating engine has `copies` of the weights on its devices. `traits` are the traits of the
    model, with the settings of its trainer. In a model that trains an adapter, only the `adapter` elements have gradients and moments. The
    model itself has `frozen_bytes`; if its matrices are `remade`, one of them at a time exists in the dtype of passes. An engine that
    merges adapters keeps the `merged` elements of the matrices that they change, and its further copies have `version_bytes` (None: full
    weights). With `packed` each rank has all matrices twice, in the layouts of its kernels.
    """

    shape: ModelShape
    itemsize: int
    workers: int
    width: float
    rows: int
    longest: float
    usual: float
    copies: int = 1
    trained: bool = False
    traits: ModelTraits = field(default_factory=ModelTraits)
    adapter: int | None = None
    frozen_bytes: int = 0
    remade: bool = False
    merged: int = 0
    version_bytes: int | None = None
    packed: bool = False


@dataclass(frozen=True)
class Need:
    """Bytes of one model on one device: resident memory, and the peak of temporary memory while its own nodes run.

    It needs at least `least`. `instants` has the parts of each instant, if known.
    """

    stays: Mapping[str, int]
    runs: Mapping[str, int]
    least: int
    instants: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, stays: Mapping[str, int], instants: Mapping[str, Mapping[str, int]]) -> "Need":
        """Make a need with the peak of its largest instant.

        >>> Need.of({"weights": 8}, {"head": {"logits": 4}, "a layer": {"activations": 3}}).runs
        {'logits': 4}
        """
        runs = max(instants.values(), key=lambda parts: sum(parts.values()))
        return cls(stays, runs, sum(runs.values()), instants)

    def while_it_runs(self, part: str) -> "Need":
        """Make the need of a model whose `part` is temporary: it exists only while its nodes run."""
        size = self.stays.get(part, 0)
        if not size:
            return self
        stays = {what: held for what, held in self.stays.items() if what != part}
        instants = {instant: {part: size, **parts} for instant, parts in self.instants.items()}
        return Need(stays, {part: size, **self.runs}, self.least + size, instants)


# The activations that a layer keeps per token for the backward pass, and what it then recomputes, by the setting `recompute`.


def kept_by_layer(shape: ModelShape, recompute: Recompute = False, tensor: int = 1, *, compiled: bool = False) -> int:
    """Count the elements that a layer keeps per token for the backward pass, with fused norms and FlashAttention, over all of `tensor`
    ranks that share its matrices.

    Input and output of both norms; queries and keys before and after the rotation (a norm of heads keeps them before), values, and the
    output of attention; of a gated MLP the gate, its activation, what it multiplies, and the product. An adapter keeps the same inputs.
    With "selective" it keeps its input, and the results of attention and of its matmuls, except the last result if ranks sum it. With True
    it keeps its input. A layer that is `compiled` computes the activation of the gate again. Ranks keep the gathered outputs of both norms:
    each has them for all tokens.

    >>> shape = ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
    >>> kept_by_layer(shape), kept_by_layer(shape, "selective"), kept_by_layer(shape, True)
    (132, 40, 8)
    >>> kept_by_layer(shape, tensor=2)
    148
    """
    queries, keys = _sizes(shape)
    if recompute == "selective":
        return (1 + (tensor == 1)) * shape.hidden + 2 * (queries + keys)
    if recompute:
        return shape.hidden
    return (2 + 2 * tensor + _copies(shape)) * shape.hidden + 3 * (queries + keys) + (4 - compiled) * _inner(shape)


def kept_beside_feed_forward(shape: ModelShape) -> int:
    """Count the elements that a layer keeps per token if it recomputes all of its feed-forward block and nothing else.

    >>> kept_beside_feed_forward(ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10))
    68
    """
    return 4 * shape.hidden + 3 * sum(_sizes(shape))


def recomputed_operations(shape: ModelShape, recompute: Recompute, tensor: int = 1) -> float:
    """Count the operations per token that the backward pass repeats in products with weights.

    >>> shape = ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
    >>> [recomputed_operations(shape, way) for way in (False, "selective", True)]
    [0, 512, 1344]
    """
    if recompute == "selective":
        queries, _ = _sizes(shape)
        return shape.layers * 2 * shape.hidden * (2 * _inner(shape) + (tensor > 1) * queries)  # gate and up
    return 2 * shape.active_parameters if recompute else 0


def _sizes(shape: ModelShape) -> tuple[int, int]:
    """The sizes of queries and of keys per token."""
    return shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


def _inner(shape: ModelShape) -> int:
    """The inner width that a token passes through: the sum over its experts."""
    return shape.intermediate * shape.experts_used


def _copies(shape: ModelShape) -> int:
    """Copies of a token, one for each of its experts."""
    return shape.experts_used if shape.experts > 1 else 0


# The temporary memory at each instant of an update: the peak is the largest instant, not the sum of all parts.
#
# * "head": all layers keep what their backward pass needs, and the head computes with logits and their gradient. With a fused head they
# cover a few rows, next to the gradient of the head in float32 and its cast copy, or what some rows add to it. * "backward of a layer": a
# layer that kept a part of its activations has recomputed the rest. Its unit has gradients in the dtype of passes, and a float32 copy that
# is summed over ranks; the head has its gradient. * "backward of the embedding": the gradients of the vocabulary, and their copy in
# float32. * "optimizer step": moments in host memory move to the device and back, for one parameter at a time.
#
# Gradients of earlier passes are in memory all the time. `tests/plan/test_recorded_peaks.py` holds these against recorded peaks.

MASTER, OPTIMIZER, GRADIENT = 4, 8, 4  # bytes per parameter: float32 weights and gradients, AdamW's two moments
MOMENTS = {"32bit": OPTIMIZER, "16bit": 4, "8bit": 2 * (1 + 4 / 256)}  # of two moments; those of 8 bits have a float32 scale for each block
LOGITS_AT_ONCE = 1 << 28  # of a GPU's fused head: 1767 rows of a vocabulary of 151936
SCORED_AT_ONCE, SCORE_COPIES = 1 << 27, 5  # logits that plain operations score at once, and the float32 copies that they need
# The least size of an FSDP unit: the host needs as long to gather, cast and scatter a small unit as a large one, and in a model below some
# billion parameters longer than the GPU computes.
UNIT_PARAMETERS = 200_000_000
HEAD, LAYER, EMBEDDING, STEP = "head", "backward of a layer", "backward of the embedding", "optimizer step"

Instants = Mapping[str, Mapping[str, int]]


def update(work: Workload, *, cast: bool) -> Instants:
    """Estimate the temporary memory of a rank at each instant of an update; passes `cast` its share of the weights.

    >>> from rlgraph.plan.model_shapes import ModelShape
    >>> shape = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10, tied=True)
    >>> work = Workload(shape=shape, itemsize=2, workers=1, width=1, rows=1, longest=4, usual=4, trained=True,
    ...     traits=ModelTraits(micro_batch_tokens=4))
    >>> {instant: parts["activations"] for instant, parts in update(work, cast=True).items() if "activations" in parts}
    {'head': 2112, 'backward of a layer': 2112}
    """
    shape, traits, tokens, gathered = work.shape, work.traits, tokens_of(work), _cast_weights_memory(work, cast)
    kept = kept_by_layer(shape, traits.recompute, traits.tensor_parallel, compiled=traits.compiled)
    layers, rest = _activations(work, tokens, kept, kept_by_layer(shape, tensor=traits.tensor_parallel, compiled=traits.compiled))
    of_unit, of_vocabulary = (_with_copy(work, count) for count in (_unit(work), _vocabulary(work)))
    no_head = work.adapter is not None or traits.fused_head is None
    of_head = 0 if no_head else work.itemsize * shape.vocab * shape.hidden // traits.tensor_parallel
    found = {
        HEAD: {"activations": layers, "gathered layers": gathered},
        LAYER: {"activations": layers + rest, "gathered layers": gathered, "gradients of layers": of_unit + of_head},
        EMBEDDING: {"gathered layers": _gathered_at_the_end(work, cast), "gradients of layers": of_vocabulary},
    }
    if work.traits.fused_head is not None:
        found[HEAD]["logits"] = _logits(work, tokens)
    if work.traits.host_moments:
        learnt = shape.vocab * shape.hidden if work.adapter is None else work.adapter
        found[STEP] = {"moments of a parameter": int(MOMENTS[work.traits.optimizer.moments] * learnt) // work.workers}
    return found


def update_in_place(work: Workload) -> Instants:
    """Estimate the temporary memory of a rank of Megatron-Core at each instant of an update: it gathers and casts nothing, and accumulates
    gradients in place."""
    tokens, recompute, whole = tokens_of(work), work.traits.recompute, kept_by_layer(work.shape)
    kept = kept_beside_feed_forward(work.shape) if recompute == "selective" else kept_by_layer(work.shape, recompute)
    layers, rest = _activations(work, tokens, min(kept, whole), whole)
    head = {"activations": layers} if work.traits.fused_head is None else {"activations": layers, "logits": _logits(work, tokens)}
    return {HEAD: head, LAYER: {"activations": layers + rest}}


def scoring_memory(work: Workload, *, cast: bool, gathers: bool = True) -> Instants:
    """Estimate the temporary memory of a rank that scores: the states of one layer, weights that it `gathers`, and some rows of logits."""
    tokens = tokens_of(work)
    parts = {"activations": tokens * work.shape.hidden * work.itemsize // work.traits.tensor_parallel}
    if gathers:
        parts["gathered layers"] = _cast_weights_memory(work, cast)
    if work.traits.fused_head is not None:
        numbers = tokens * work.shape.vocab // work.traits.tensor_parallel
        parts["logits"] = min(numbers, LOGITS_AT_ONCE) * work.itemsize + _score_copies(numbers)
    return {HEAD: parts}


def tokens_of(work: Workload) -> int:
    """Bound the tokens of a rank in a pass."""
    groups = max(work.workers // work.traits.ranks_per_pass, 1)
    return min(work.traits.micro_batch_tokens or 0, int(-(-work.rows // groups) * work.longest) // work.traits.context_parallel)


def _activations(work: Workload, tokens: int, kept: float, whole: int) -> tuple[int, int]:
    """Estimate what all layers keep, and what one layer adds in its backward pass: the `whole` activations that it recomputes."""
    each = work.itemsize / work.traits.tensor_parallel * tokens
    return int(work.shape.layers * kept * each), max(0, int((whole - kept) * each)) if work.traits.recompute else 0


def _vocabulary(work: Workload) -> int:
    """Count the parameters outside of the layers: the embedding, and a separate head."""
    shape = work.shape
    return shape.vocab * shape.hidden if work.traits.fused_head is None else shape.embedding_parameters


def _unit(work: Workload) -> int:
    """Count the parameters of a unit of layers, with a rank's own experts."""
    shape = work.shape
    return min(shape.layers, -(-UNIT_PARAMETERS // shape.layer_parameters)) * shape.own_layer(work.traits.expert_parallel)


def _with_copy(work: Workload, parameters: int) -> int:
    """The bytes of the gradients of this many parameters, which an adapter has for a part, and of their copy in float32."""
    learnt = parameters if work.adapter is None else parameters * work.adapter // work.shape.parameters
    return (work.itemsize + GRADIENT) * learnt // work.traits.tensor_parallel


def _cast_weights_memory(work: Workload, cast: bool) -> int:
    """Estimate the memory of weights that are cast to the dtype of passes: of two units and the vocabulary, or, if no ranks share them, of
    all trained weights, which are then cast once per update."""
    shape, alone = work.shape, work.workers == work.traits.tensor_parallel
    if alone and work.adapter is not None:  # frozen weights are used without a cast
        return (work.adapter + (shape.hidden * max(shape.intermediate, shape.heads * shape.head_dim) if work.remade else 0)) * work.itemsize
    if alone and cast:
        return shape.parameters * work.itemsize // work.traits.tensor_parallel
    layers = min(2 * _unit(work), shape.layers * shape.own_layer(work.traits.expert_parallel))
    return (layers + _vocabulary(work)) * work.itemsize // work.traits.tensor_parallel


def _gathered_at_the_end(work: Workload, cast: bool) -> int:
    """Estimate the memory of weights that are still cast after the backward pass of all layers: the vocabulary, or everything if no ranks
    share it."""
    if work.workers == work.traits.tensor_parallel:
        return _cast_weights_memory(work, cast)
    return _vocabulary(work) * work.itemsize // work.traits.tensor_parallel


def _logits(work: Workload, tokens: int) -> int:
    """Estimate the memory of the logits of a pass: all of them with their gradient, or some rows and the head's gradient in float32."""
    words = work.shape.vocab // work.traits.tensor_parallel
    numbers = tokens * words
    plain = work.traits.exact or work.traits.tensor_parallel > 1  # scored without a custom kernel, in float32 copies
    copies = _score_copies(numbers) if plain else 0
    if work.traits.fused_head and numbers > LOGITS_AT_ONCE:
        head = words * work.shape.hidden if work.adapter is None else 0  # its gradient in float32, and what some rows add to it
        return 2 * LOGITS_AT_ONCE * work.itemsize + copies + (GRADIENT + work.itemsize) * head
    return 2 * numbers * work.itemsize + copies


def _score_copies(numbers: int) -> int:
    return SCORE_COPIES * 4 * min(numbers, SCORED_AT_ONCE)
