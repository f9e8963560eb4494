"""What a plan counts of the activations of a layer is what a layer keeps for the backward pass."""

import pytest
import torch
from tiny import WeightedLikelihood, batch_of
from transformers import Qwen3Config, Qwen3ForCausalLM

import rlgraph as rg
from rlgraph.costs.activations import kept_by_layer
from rlgraph.costs.model_shapes import ModelShape
from rlgraph.engines.forward import fused_norms
from rlgraph.engines.forward.policy_head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine

HIDDEN, HEADS, HEAD, INTERMEDIATE, VOCAB = 64, 4, 32, 256, 288  # as many heads of keys: with fewer a CPU repeats them
RESPONSE = 100


def kept(layers: int) -> tuple[int, int]:
    """The bytes of the tensors that a pass of an adapter keeps, and its tokens.

    Left out are matrices of weights, and the square of shares that attention keeps on a CPU. Norms of whole models keep more on a CPU.
    """
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
    fused_norms.install(head.model)
    engine = FsdpEngine(head, optimizer=rg.AdamW(), dtype=torch.float32, adapter=rg.LoRA(rank=1), flat=False)
    batch = batch_of([RESPONSE], group=1)
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        weights = tensor.dim() == 2 and tensor.shape[0] != tokens
        if weights or tensor.shape[-2:] == (tokens, tokens):
            return tensor
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = int(batch["prompt_mask"].sum()) + RESPONSE - 1  # the last one predicts none
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.update(batch, WeightedLikelihood())
    engine.close()
    return sum(found.values()), tokens


def test_a_layer_keeps_what_the_plan_counts() -> None:
    (two, tokens), (four, _) = kept(2), kept(4)
    shape = ModelShape(layers=1, hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, head_dim=HEAD, intermediate=INTERMEDIATE, vocab=VOCAB)
    assert (four - two) / 2 == pytest.approx(4 * tokens * kept_by_layer(shape), rel=0.05)


def test_norms_that_are_frozen_in_bfloat16_are_fused() -> None:
    config = Qwen3Config(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, intermediate_size=8
    )
    assert fused_norms.install(Qwen3ForCausalLM(config).bfloat16()) == 5
