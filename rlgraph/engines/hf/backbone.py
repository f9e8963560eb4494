"""A Hugging Face model as a trainer runs it: its hidden states where tokens are predicted, and their logits."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm

from rlgraph.batching.packing import MicroBatch
from rlgraph.engines.forward.packed_attention import padded_implementation
from rlgraph.engines.hf.folder_weights import FolderWeights, PartsByName
from rlgraph.engines.hf.image_tower import ImageTower
from rlgraph.engines.hf.model_files import VISION, FamilyOptions
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.engines.hf.unloaded import load_causal, load_headless, load_vision
from rlgraph.errors import DataError

# A Hugging Face model as a trainer runs it: built in float32, its hidden states where tokens are predicted, and their logits.

SHORT_SEQUENCE = 128  # tokens; the unfused kernel is 2.3 times as fast at 54 and its memory grows with the square


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


def vision_layers(tower: Any) -> list[Any]:
    """List the layers of what makes features of images."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in tower.modules() if isinstance(module, GradientCheckpointingLayer)]


@dataclass(frozen=True)
class LogitShape:
    """The transform of a head's output into logits: multiply by `scale`, then cap softly at `cap`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitShape":
        """Read it off a configuration: Cohere multiplies, Granite divides, Falcon-H1 has a multiplier, and Gemma caps."""
        options = FamilyOptions(config.get_text_config())
        scale = options.logit_scale or options.lm_head_multiplier or 1.0
        return cls(float(scale) / float(options.logits_scaling or 1.0), options.final_logit_softcapping)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def predicting_states(backbone: Any, micro_batch: MicroBatch, tower: ImageTower | None = None) -> torch.Tensor:
    """Compute the last hidden states `[N, H]` at the positions before the targets of a micro-batch.

    The `tower` makes features of its images, if it has some.
    """
    more: dict[str, Any] = {}
    if micro_batch.starts is not None:
        more = {"cu_seq_lens_q": micro_batch.starts, "max_length_q": micro_batch.longest, "prompt_lengths": micro_batch.prompts}
        more |= {"shared_prompts": micro_batch.shared} if micro_batch.shared is not None else {}
        more |= {"context_group": micro_batch.group} if micro_batch.group is not None else {}
        more |= {"context_ring": micro_batch.ring} if micro_batch.ring is not None else {}
    elif micro_batch.mask is not None:
        more = {"shared_positions": micro_batch.positions}
    given = {"input_ids": micro_batch.tokens, "position_ids": micro_batch.positions}
    if tower is not None and micro_batch.images is not None:
        given = tower.inputs(backbone.get_input_embeddings(), micro_batch.tokens, micro_batch.positions, micro_batch.images)
    with _attention(backbone, micro_batch):
        hidden = backbone(**given, attention_mask=micro_batch.mask, use_cache=False, **more).last_hidden_state
    states: torch.Tensor = hidden.flatten(0, 1)[micro_batch.predicts]
    return states


def _attention(backbone: Any, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    """Choose the attention kernel for an input: on a CPU the backward pass of the fused one is slow for short sequences."""
    short = micro_batch.starts is None and micro_batch.tokens.device.type == "cpu" and micro_batch.tokens.shape[1] <= SHORT_SEQUENCE
    again = getattr(backbone, "is_gradient_checkpointing", False)  # outside of this context, where each pass has to take the same kernel
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH) if short and not again else nullcontext()
    return context


# The text model of a folder: loaded with its weights in one process, and what its parameters are in the folder.


def load_text_model(path: str | Path, dtype: torch.dtype) -> Any:
    """Load the language model of a folder, also of a multimodal one, in `dtype`. Raises DataError as `skeleton` does."""
    from transformers import AutoModelForCausalLM

    if not check_model(path).nested:
        plain = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=padded_implementation(AutoModelForCausalLM, path)
        )
        tables = [(at, part) for at, part in plain.named_modules() if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None]
        if tables:  # some classes, as Youtu's, set the row of the padding token to 0 behind the loading
            weights = FolderWeights(path, plain)
            for at, table in tables:
                weights.fill(f"{at}.weight", (0, 0), table.weight.detach())
        return plain.eval()
    model = load_causal(path)
    FolderWeights(path, model).load(dtype)
    return model


def parts_of(path: str | Path, scores: Literal["log_probs", "values"], *, vision: bool = False) -> PartsByName:
    """Find the tensors of a folder that each parameter of a trained model is made of: of a policy or a critic, and of its tower."""
    own = FolderWeights(path, load_causal(path) if scores == "log_probs" else load_headless(path)).parts()
    return {**own, **(vision_parts(FolderWeights(path, load_vision(path), whole=True)) if vision else {})}


def vision_parts(folder: FolderWeights) -> PartsByName:
    """Name the parameters of a tower as a trained model does, which has it as `vision`."""
    return {VISION + name: parts for name, parts in folder.parts().items()}


# The RMS norms of a Hugging Face model as one kernel each, where its own code launches eight, and more in the backward pass.
#
# Where the host sets the pace of a pass, as with models of a few billion parameters, these are almost half of what it launches.

NEAR = 1e-5  # of float32, relative: two orders of the same operations


def install_fused_norms(model: torch.nn.Module, kernel: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> int:
    """Replace each norm of the model that equals `torch.nn.functional.rms_norm` by that kernel, or another one; return their number."""
    plain = [module for module in model.modules() if _is_plain(module)]
    for module in plain:
        module.forward = MethodType(kernel or _forward, module)
    return len(plain)


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute the norm `[..., D]`; the kernel sums in float32 and rounds once, at the end."""
    return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _is_plain(module: Any) -> bool:
    """Whether a module is a norm of this form, by its output: models give it their own class names."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)  # any module is asked
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return False
    probe = copy.deepcopy(module).to_empty(device="cpu").float()  # the model's own weights may be of no memory yet, or frozen in bfloat16
    with torch.no_grad():
        probe.weight.copy_(torch.linspace(0.5, 1.5, len(weight)))
        given = torch.linspace(-2.0, 3.0, 2 * len(weight)).view(2, -1)
        return torch.allclose(probe(given), _forward(probe, given), rtol=NEAR, atol=NEAR)
