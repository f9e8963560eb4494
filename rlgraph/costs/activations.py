"""What a layer keeps of a token for the backward pass, and what it then computes again, by the setting `recompute`."""

from rlgraph.costs.model_shapes import ModelShape
from rlgraph.settings import Recompute


def kept_by_layer(shape: ModelShape, recompute: Recompute = False, tensor: int = 1, *, compiled: bool = False) -> int:
    """Count the numbers that a layer keeps of a token for the backward pass, with fused norms and FlashAttention, over all of `tensor`
    ranks that share its matrices.

    Input and output of both norms; queries and keys before and after the rotation (a norm of heads keeps them before), values, and the
    output of attention; of a gated MLP the gate, its activation, what it multiplies, and the product. An adapter keeps the same inputs.
    With "selective" it keeps its input, and the results of attention and of its products, but not of the last one where ranks sum that.
    With True it keeps its input. A layer that is `compiled` computes the activation of the gate again. Of what both norms give, ranks keep
    what they have gathered: each has it of all tokens.

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
    """Count the numbers that a layer keeps of a token which computes all of its feed-forward block again, and nothing else.

    >>> kept_beside_feed_forward(ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10))
    68
    """
    return 4 * shape.hidden + 3 * sum(_sizes(shape))


def operations_again(shape: ModelShape, attends: float, recompute: Recompute, tensor: int = 1) -> float:
    """Count the operations of a token that the backward pass does a second time, where attention takes `attends`.

    >>> shape = ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
    >>> [operations_again(shape, 100.0, way) for way in (False, "selective", True)]
    [0, 512, 1444.0]
    """
    if recompute == "selective":
        queries, _ = _sizes(shape)
        return shape.layers * 2 * shape.hidden * (2 * _inner(shape) + (tensor > 1) * queries)  # gate and up
    return 2 * shape.active_parameters + attends if recompute else 0


def _sizes(shape: ModelShape) -> tuple[int, int]:
    """The numbers of queries and of keys of a token."""
    return shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


def _inner(shape: ModelShape) -> int:
    """The inner width of what a token passes through: of all its experts."""
    return shape.intermediate * shape.experts_used


def _copies(shape: ModelShape) -> int:
    """Copies of a token, one for each of its experts."""
    return shape.experts_used if shape.experts > 1 else 0
