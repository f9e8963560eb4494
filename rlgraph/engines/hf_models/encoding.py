"""Encode the texts of prompts as token ids."""

from collections.abc import Sequence
from typing import Any

from rlgraph.columns import Columns
from rlgraph.engines.hf_models.chat_template import chat_tokens


def encoded_prompts(tokenizer: Any, columns: Columns, most: int | None = None) -> list[list[int]]:
    """Encode the prompts of a batch: by the model's chat template where they are conversations, in `prompt_messages`; else as text.

    Of a prompt with more than `most` tokens the last ones stay.
    """
    if "prompt_messages" in columns:
        whole = chat_tokens(tokenizer, [str(text) for text in columns["prompt_messages"]])
    else:
        whole = prompt_tokens(tokenizer, [str(text) for text in columns["prompt_texts"]])
    return whole if most is None else [tokens[-most:] for tokens in whole]


def prompt_tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encode prompts. A text that already begins with the special tokens that the tokenizer adds in front does not get them twice.

    A chat template writes such tokens itself: Llama 3's begins with `<|begin_of_text|>`, which its tokenizer adds to any text.
    With it, "Hi" and "<|begin_of_text|>Hi" are both `[128000, 13347]`.
    """
    whole: list[list[int]] = tokenizer(list(texts))["input_ids"]
    added: list[int] = tokenizer([""])["input_ids"][0]
    if not added:
        return whole
    plain: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [own if _repeats(ids, own) else ids for ids, own in zip(whole, plain, strict=True)]


def _repeats(ids: list[int], own: list[int]) -> bool:
    """Whether the text already begins with the tokens that the tokenizer adds in front."""
    front = next((n for n in range(1, len(ids) - len(own) + 1) if ids[n : n + len(own)] == own), 0)
    return front > 0 and own[:front] == ids[:front]
