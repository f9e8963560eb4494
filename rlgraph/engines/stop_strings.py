"""Find the token at which a response completes one of its stop strings."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlgraph.engines.hf.model_files import check_tokenizer
from rlgraph.values.sampling import Sampling


class StopStrings:
    """Finds texts in the tokens of a response, decoded with their special tokens.

    A token is decoded only if its own text can complete one, together with as many tokens before it as the longest text can cover.

    >>> from rlgraph.engines.hf.pretrained import byte_tokenizer
    >>> tokenizer = byte_tokenizer()
    >>> StopStrings(tokenizer, ("</a>",)).find_end(tokenizer.encode("<a>4</a> so"), 0)
    8
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._most = 1 + max(len(text.encode()) for text in texts)  # a tokenizer may strip the first token's space
        self._lasts = {text[-1] for text in texts}
        self._completing: dict[int, bool] = {}  # by token, as they come

    def find_end(self, tokens: Sequence[int], known: int) -> int | None:
        """Count the tokens up to the first one that completes a text; None if none does. The first `known` tokens complete none."""
        for end in range(known + 1, len(tokens) + 1):
            if self._may_complete(tokens[end - 1]):
                text = self._decode(tokens[max(end - self._most, 0) : end])
                if any(each in text for each in self._texts):
                    return end
        return None

    def _may_complete(self, token: int) -> bool:
        if token not in self._completing:
            own = self._decode([token])  # of a part of a character, or of a space, it says nothing
            told = own and "\ufffd" not in own and not any(last.isspace() for last in self._lasts)
            self._completing[token] = not told or not self._lasts.isdisjoint(own)
        return self._completing[token]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def stop_strings(path: str | Path, sampling: Sampling) -> StopStrings | None:
    """Make what finds the stop strings of a sampling, with the tokenizer of a model folder; None if it has none."""
    return _stop_strings(str(path), sampling.stop) if sampling.stop else None


@lru_cache(maxsize=8)
def _stop_strings(path: str, texts: tuple[str, ...]) -> StopStrings:
    return StopStrings(check_tokenizer(path), texts)
