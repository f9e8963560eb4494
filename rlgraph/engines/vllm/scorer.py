"""Score given texts with vLLM: the log-probs of a prompt's own tokens, and of the most probable ones at each place."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from rlgraph.batching.packing import response_lengths
from rlgraph.channels.weights.shards import WeightShard
from rlgraph.columns import Columns
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.errors import GraphError


class VllmScorer:
    """A `TrainEngine` that only scores: a teacher or a reference on vLLM, which reads each row as a prompt.

    `context` bounds the tokens of a row (None: the model's). vLLM gives the log-probs of a prompt before any temperature, so that rows are
    scored at temperature 1 alone. `on_progress` is called with the rows that are scored, and all rows.

    Raises DataError for a folder that is no model.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str,
        threads: int | None = None,
        context: int | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        **machine: Any,
    ) -> None:
        unlimited = {"max_logprobs": -1, "enable_prefix_caching": False}  # a prompt that is scored is read whole
        model = check_model(path)
        most = None if context is None else min(context + 1, model.context_length)  # vLLM always samples a token
        self._engine = VllmEngine(path, dtype=dtype, threads=threads, max_model_len=most, engine_args=unlimited, **machine)
        self._on_progress, self._vocabulary = on_progress, model.vocab_size

    def scores(self, batch: Columns, *, temperature: float = 1.0) -> torch.Tensor:
        """Give `[B, T]` float32: 0 where `response_mask` is false. Raises GraphError for another temperature than 1."""
        return self._score_batch(batch, 0, temperature)[0]

    def top_scores(self, batch: Columns, top_k: int | None, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give `scores`, and of the `top_k` most probable tokens ids (int32) and log-probs `[B, T, K]`, the most probable first."""
        if top_k is None:
            raise GraphError("a teacher on vLLM returns the log-probs of some tokens, not of the vocabulary; set top_k, e.g. top_k=64")
        return self._score_batch(batch, min(top_k, self._vocabulary), temperature)

    def _score_batch(self, batch: Columns, top_k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if temperature != 1.0:
            raise GraphError(
                f"a model on vLLM scores at temperature 1, but the responses were sampled at {temperature}; leave out trainer="
            )
        prompts, prompt_mask, responses, mask = (
            torch.as_tensor(batch[name]) for name in ("prompts", "prompt_mask", "responses", "response_mask")
        )
        scores, ids = torch.zeros(mask.shape), torch.zeros(*mask.shape, top_k, dtype=torch.int32)
        top = torch.zeros(*mask.shape, top_k)
        lengths = {row: length for row, length in enumerate(response_lengths(mask).tolist()) if length}
        read = {row: prompts[row][prompt_mask[row]].tolist() for row in lengths}
        texts = {row: [*read[row], *responses[row, :length].tolist()] for row, length in lengths.items()}
        longest, room = max(map(len, texts.values()), default=0), self._engine.context_length() - 1
        if longest > room:
            raise GraphError(f"a row has {longest} tokens, and the model on vLLM has room for {room}; raise max_context=, or shorten rows")
        for done, (row, tokens, values) in enumerate(self._engine.prompt_log_probs(texts, top_k), start=1):
            at = mask[row].nonzero()[:, 0]
            behind = at + len(read[row]) - 1  # of a text's first token nothing is known
            scores[row, at] = values[behind, 0]
            ids[row, at], top[row, at] = tokens[behind, 1:].to(ids.dtype), values[behind, 1:]
            self._on_progress(done, len(texts))
        return scores, ids, top

    def base_scores(self, batch: Columns, *, temperature: float = 1.0) -> NoReturn:
        """Not given."""
        _only_scores()

    def scores_and_squares(self, batch: Columns, *, temperature: float = 1.0) -> NoReturn:
        """Not given."""
        _only_scores()

    def update(self, *given: Any, **settings: Any) -> NoReturn:
        """Not given."""
        _only_scores()

    def weight_shards(self) -> Iterator[WeightShard]:
        """Not given."""
        _only_scores()

    def save(self, folder: Path, deadline_s: float) -> NoReturn:
        """Not given."""
        _only_scores()

    def load(self, folder: Path) -> NoReturn:
        """Not given."""
        _only_scores()

    def sleep(self) -> int | None:
        """Free the device's memory until `wake`."""
        return self._engine.sleep()

    def wake(self) -> None:
        """Take the memory back."""
        self._engine.wake()

    def close(self) -> None:
        """Free the model."""
        self._engine.close()


def _only_scores() -> NoReturn:
    raise GraphError("trainer='vllm' only scores: it is for rg.Teacher, and for rg.Reference with log_probs; leave it out elsewhere")
