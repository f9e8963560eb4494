"""A Hugging Face model as a trainer runs it: built in float32, its hidden states where tokens are predicted, and their logits."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlgraph.batching.packing import MicroBatch
from rlgraph.engines.hf_models.skeleton import skeleton
from rlgraph.errors import DataError

SHORT_SEQUENCE = 128  # tokens; the unfused kernel is 2.3 times as fast at 54 and its memory grows with the square


def load_causal(path: str | Path) -> Any:
    """Build the language model of a folder without its weights, as `skeleton` does. Raises DataError for a folder without one."""
    from transformers import AutoModelForCausalLM

    return skeleton(AutoModelForCausalLM, path)


def load_headless(path: str | Path) -> Any:
    """Build the model of a folder without its language head and its weights. Raises DataError for a folder that holds none."""
    from transformers import AutoModel

    return skeleton(AutoModel, path)


def backbone_of(model: Any) -> Any:
    """A language model without its head."""
    return model.model if model.base_model is model else model.base_model


def layers_of(backbone: Any) -> Any:
    """Find the layers of a model without its head. Raises DataError if no module list has the configuration's number of layers."""
    count = backbone.config.get_text_config().num_hidden_layers
    for module in backbone.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise DataError(f"{type(backbone).__name__} has no list of {count} layers, by which a trainer shards a model; rlgraph cannot train it")


@dataclass(frozen=True)
class LogitShape:
    """The transform of a head's output into logits: multiply by `scale`, then cap softly at `cap`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitShape":
        """Read it off a configuration: Cohere multiplies, Granite divides, Falcon-H1 has a multiplier, and Gemma caps."""
        text = config.get_text_config()
        scale = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0
        return cls(float(scale) / float(getattr(text, "logits_scaling", None) or 1.0), getattr(text, "final_logit_softcapping", None))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def predicting_states(backbone: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Compute the last hidden states `[N, H]` at the positions before the targets of a micro-batch."""
    more: dict[str, Any] = {}
    if micro_batch.starts is not None:
        more = {"cu_seq_lens_q": micro_batch.starts, "max_length_q": micro_batch.longest, "prompt_lengths": micro_batch.prompts}
        more |= {"shared_prompts": micro_batch.shared} if micro_batch.shared is not None else {}
        more |= {"context_group": micro_batch.group} if micro_batch.group is not None else {}
        more |= {"context_ring": micro_batch.ring} if micro_batch.ring is not None else {}
    elif micro_batch.mask is not None:
        more = {"shared_positions": micro_batch.positions}
    with _attention(backbone, micro_batch):
        hidden = backbone(
            input_ids=micro_batch.tokens, attention_mask=micro_batch.mask, position_ids=micro_batch.positions, use_cache=False, **more
        ).last_hidden_state
    states: torch.Tensor = hidden.flatten(0, 1)[micro_batch.predicts]
    return states


def _attention(backbone: Any, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    """Choose the attention kernel for an input: on a CPU the backward pass of the fused one is slow for short sequences."""
    short = micro_batch.starts is None and micro_batch.tokens.device.type == "cpu" and micro_batch.tokens.shape[1] <= SHORT_SEQUENCE
    again = getattr(backbone, "is_gradient_checkpointing", False)  # outside of this context, where each pass has to take the same kernel
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH) if short and not again else nullcontext()
    return context
