"""What a plan counts of the activations of a layer is what a layer keeps for the backward pass."""

from typing import Any

import pytest
import torch
from support.tiny import WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.hf import backbone
from rlgraph.plan.model_shapes import ModelShape, kept_by_layer
from rlgraph.settings import Recompute

HIDDEN, HEADS, HEAD, INTERMEDIATE, VOCAB = 64, 4, 32, 256, 288  # as many heads of keys: with fewer a CPU repeats them
RESPONSE = 100


class Alive(TorchDispatchMode):
    """Knows the memory of results that are of `tokens`, but for the square of shares that attention has on a CPU."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.found: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operation(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and self.tokens in result.shape and result.shape[-2:] != (self.tokens, self.tokens):
                self.found[StorageWeakRef(result.untyped_storage())] = result.untyped_storage().nbytes()
        return results

    def bytes(self) -> int:
        return sum(size for storage, size in self.found.items() if not storage.expired())


class Measuring(WeightedLikelihood):
    """A loss that measures what is alive when the forward pass has ended."""

    alive: Alive
    kept = 0

    def __call__(self, *given: Any) -> Any:
        self.kept = self.alive.bytes()
        return super().__call__(*given)


def kept(layers: int, recompute: Recompute) -> tuple[int, int]:
    """The bytes that a pass of an adapter keeps, and its tokens. Norms of whole models keep more on a CPU."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        intermediate_size=INTERMEDIATE,
    )
    torch.manual_seed(0)
    head = PolicyHead(Qwen3ForCausalLM(config).eval())
    backbone.install_fused_norms(head.model)
    engine = fsdp_engine(head, optimizer=rg.AdamW(), dtype=torch.float32, adapter=rg.LoRA(rank=1), flat=False, recompute=recompute)
    batch = batch_of([RESPONSE], group=1)
    tokens = int(batch["prompt_mask"].sum()) + RESPONSE - 1  # the last one predicts none
    loss = Measuring()
    loss.alive = Alive(tokens)
    with loss.alive:
        engine.update(batch, loss)
    engine.close()
    return loss.kept, tokens


@pytest.mark.parametrize("recompute", [False, "selective", True])
def test_a_layer_keeps_what_the_plan_counts(recompute: Recompute) -> None:
    (two, tokens), (four, _) = kept(2, recompute), kept(4, recompute)
    shape = ModelShape(layers=1, hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, head_dim=HEAD, intermediate=INTERMEDIATE, vocab=VOCAB)
    assert (four - two) / 2 == pytest.approx(4 * tokens * kept_by_layer(shape, recompute), rel=0.05)


def test_norms_that_are_frozen_in_bfloat16_are_fused() -> None:
    config = Qwen3Config(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, intermediate_size=8
    )
    assert backbone.install_fused_norms(Qwen3ForCausalLM(config).bfloat16()) == 5
