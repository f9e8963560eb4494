"""A reward model: one number for a prompt and a response, from a Hugging Face sequence-classification model."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.forward.packed_attention import padded
from rlgraph.engines.hf_models.chat_template import render_answered
from rlgraph.engines.hf_models.encoding import prompt_tokens
from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.text_part import rotary_limit, text_config
from rlgraph.errors import DataError


class ScoreEngine:
    """Scores texts in batches of at most `batch_tokens` tokens, padding included, the longest first.

    Ranks get the same texts, score every `world`-th batch, and add up what they found: each score is computed as on one rank, bit for
    bit. `add_up(scores)` sums a tensor of the host over the ranks, in place.

    Raises DataError for a folder without such a model, or whose model gives several numbers and `label` chooses none.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str,
        dtype: torch.dtype,
        label: int | None,
        batch_tokens: int,
        rank: int = 0,
        world: int = 1,
        add_up: Callable[[torch.Tensor], None] = lambda scores: None,
    ) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        context = check_model(path).context_length
        self._context = min(context, rotary_limit(text_config(path)) or context)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        capped = getattr(AutoConfig.from_pretrained(path).get_text_config(), "attn_logit_softcapping", None) is not None
        attention = padded(AutoModelForSequenceClassification, path) if capped else None  # transformers' own default leaves the cap out
        self._model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, attn_implementation=attention)
        self._model = self._model.to(device).eval()
        labels = self._model.config.num_labels
        if label is None and labels > 1:
            raise DataError(f"model '{path}' gives {labels} numbers a text; choose the reward among them with label=0 to {labels - 1}")
        if label is not None and not 0 <= label < labels:
            raise DataError(f"model '{path}' gives {labels} number(s) a text, so there is no label={label}; choose 0 to {labels - 1}")
        self._device, self._label, self._batch_tokens = device, label or 0, batch_tokens
        self._rank, self._world, self._add_up = rank, world, add_up

    def scores(self, prompts: Sequence[str], responses: Sequence[str], conversations: Sequence[str] = ()) -> torch.Tensor:
        """Compute the rewards `[B]` float32. `conversations`, as JSON, are the prompts that are lists of messages.

        Raises DataError for a text longer than the model's context.
        """
        asked = conversations or [""] * len(prompts)
        rows = [self._encoded(*texts) for texts in zip(prompts, responses, asked, strict=True)]
        for row, tokens in enumerate(rows):
            if not 0 < len(tokens) <= self._context:
                raise DataError(
                    f"response {row} and its prompt have {len(tokens)} tokens, but the reward model reads 1 to {self._context}: "
                    "lower max_tokens, drop long prompts, or take a model of a longer context"
                )
        found = torch.zeros(len(rows))
        for number, places in enumerate(_batches([len(tokens) for tokens in rows], self._batch_tokens)):
            if number % self._world == self._rank:
                found[torch.tensor(places)] = self._forward([rows[place] for place in places])
        if self._world > 1:
            self._add_up(found)  # a score and zeros: no rounding
        return found

    def _encoded(self, prompt: str, response: str, conversation: str) -> list[int]:
        """Encode the text as the model was trained on it: by its chat template, if it has one, every message of a conversation as such."""
        tokenizer: Any = self._tokenizer
        if not tokenizer.chat_template:
            return prompt_tokens(tokenizer, [prompt + response])[0]
        if conversation:
            text = render_answered(tokenizer, conversation, response)
        else:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        # Decoder models score the last token that is not the padding token, so that must be one that no text ends with.
        ends = {row[-1] for row in rows}
        padding = next(token for token in range(len(ends) + 1) if token not in ends)
        self._model.config.pad_token_id = padding
        width = max(len(row) for row in rows)
        tokens = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        scores: torch.Tensor = self._model(input_ids=tokens, attention_mask=mask).logits[:, self._label].float().cpu()
        return scores

    def sleep(self) -> int | None:
        """Free the memory that no tensor uses; the weights stay on the device."""
        if self._device == "cuda":
            torch.cuda.empty_cache()
        return 0

    def wake(self) -> None:
        """Be ready to score again."""

    def close(self) -> None:
        """Free the model."""
        self._model = None


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the places of texts in batches of at most `most` tokens, the longest first; each has at least one text."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
