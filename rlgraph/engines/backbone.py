"""A Hugging Face model as a trainer runs it: loaded in float32, and its hidden states where tokens are predicted."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlgraph.engines.packing import MicroBatch
from rlgraph.engines.pretrained import check_model
from rlgraph.errors import DataError

SHORT_SEQUENCE = 128  # tokens; the unfused kernel is 2.3 times as fast at 54 and its memory grows with the square


def load_causal(path: str | Path) -> Any:
    """Return a language model. Raises DataError for a folder without one, or one whose logits are not its head's alone."""
    from transformers import AutoModelForCausalLM

    check_model(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()  # no dropout: the log-probs of a response are one number
    tokens = torch.arange(2)[None]
    with torch.no_grad():
        head = model.get_output_embeddings()(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
        if not torch.equal(head, model(input_ids=tokens, use_cache=False).logits):
            raise DataError(f"model '{path}': its logits are more than its head over its last hidden state; rlgraph cannot train it")
    return model


def load_headless(path: str | Path) -> Any:
    """Return a model without its language head. Raises DataError for a folder that holds none."""
    from transformers import AutoModel

    check_model(path)
    return AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


def predicting_states(backbone: Any, part: MicroBatch) -> torch.Tensor:
    """Return the last hidden states `[N, H]` at the positions before the targets of a micro-batch."""
    packed = {} if part.starts is None else {"cu_seq_lens_q": part.starts, "max_length_q": part.longest}
    with _attention(part):
        hidden = backbone(
            input_ids=part.tokens, attention_mask=part.mask, position_ids=part.positions, use_cache=False, **packed
        ).last_hidden_state
    states: torch.Tensor = hidden.flatten(0, 1)[part.predicts]
    return states


def _attention(part: MicroBatch) -> AbstractContextManager[None]:
    """Return the attention kernel for an input: on a CPU the backward pass of the fused one is slow for short sequences."""
    short = part.starts is None and part.tokens.device.type == "cpu" and part.tokens.shape[1] <= SHORT_SEQUENCE
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH) if short else nullcontext()
    return context
