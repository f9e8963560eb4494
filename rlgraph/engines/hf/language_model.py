"""Language models that transformers has only as a part of a multimodal model: made one with a head of its own."""

from typing import Any

import torch

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
