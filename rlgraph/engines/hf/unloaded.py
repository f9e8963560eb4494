"""Models of a folder without the memory of their weights: the language model, with a head or without, and the part that reads images.

transformers has some language models only as a part of a multimodal one: these get a class with a head of its own.
"""

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlgraph.engines.forward.packed_attention import padded_implementation
from rlgraph.engines.hf.model_files import FamilyOptions, text_config
from rlgraph.engines.hf.pretrained import check_model, quiet
from rlgraph.errors import DataError

# Types of configurations, with the causal class that computes the same of text, where an image's axes of rotation are those of a position.
PARTS = {"qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen3_vl_text": "Qwen3ForCausalLM"}
AXES = ("mrope_section", "mrope_interleaved")


def causal_class(config: Any) -> Any:
    """The class that makes a language model of a configuration: `AutoModelForCausalLM`, which knows the part from now on."""
    from transformers import AutoModel, AutoModelForCausalLM

    if config.model_type in PARTS and type(config) not in AutoModelForCausalLM._model_mapping:
        part = AutoModel._model_mapping[type(config)]
        # What `register` does, but not in every version for a configuration of transformers' own.
        AutoModelForCausalLM._model_mapping._extra_content[type(config)] = _with_head(part)
    return AutoModelForCausalLM


def _with_head(part: Any) -> Any:
    """Make a class of causal models of a class of models without a head."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    family = part.__base__

    def begin(self: Any, config: Any) -> None:
        family.__init__(self, config)
        self.model = part(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, logits_to_keep: int = 0, **given: Any) -> Any:
        """Compute the logits `[B, L, V]` of the last tokens, all for 0; see transformers' own causal models for what is given."""
        out = self.model(**given)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)

    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    own = {"__init__": begin, "forward": forward, "config_class": part.config_class, "_tied_weights_keys": tied}
    return type("LanguageModel", (family,), {**own, "__module__": part.__module__})  # whose code says which attention it has


def skeleton(auto: Any, path: str | Path) -> Any:
    """Build the text model of a folder by a class like `AutoModelForCausalLM`, in float32 and without dropout.

    Its parameters are on the meta device. Tables that are computed and in no file, such as rotary frequencies, are in host memory.

    Raises DataError for a folder without a model, or with quantised weights, which cannot be trained.
    """
    check_model(path)
    config = text_config(path)
    if FamilyOptions(config).quantization_config is not None:
        raise DataError(
            f"model '{path}': config.json has a quantization_config; a trainer requires weights in bfloat16, float16 or float32"
        )
    with _EmptyOnMeta():
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=padded_implementation(auto, path))
    return _without_memory(model)


def _without_memory(model: Any) -> Any:
    kept: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied parameters stay one
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                kept.setdefault(parameter, torch.nn.Parameter(parameter.detach().to("meta")))
                module.register_parameter(name, kept[parameter])
    return model.eval()


class _EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty`, which modules of torch make their parameters of, give tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), "device": "meta"}) if func is torch.empty else func(*args, **(kwargs or {}))


def load_causal(path: str | Path) -> Any:
    """Build the language model of a folder without its weights, as `skeleton` does. Raises DataError for a folder without one."""
    return skeleton(causal_class(text_config(path)), path)


def load_headless(path: str | Path) -> Any:
    """Build the model of a folder without its language head and its weights. Raises DataError for a folder that holds none."""
    from transformers import AutoModel

    return skeleton(AutoModel, path)


LANGUAGE = ("language_model", "text_model")  # the module of a multimodal model that is its language model


def load_vision(path: str | Path) -> Any:
    """Build what makes features of images, tower and projector, without its weights: the whole model without its language model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with quiet():
        config = AutoConfig.from_pretrained(path)
        config.get_text_config().num_hidden_layers = 0
        with _EmptyOnMeta():
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name in {*LANGUAGE} & dict(model.model.named_children()).keys():
        setattr(model.model, name, torch.nn.Identity())
    model.lm_head = torch.nn.Identity()
    return _without_memory(model)
