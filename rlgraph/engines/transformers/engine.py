"""Generate with transformers: plain batched sampling with a key-value cache. Slow and simple, the reference for vLLM."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlgraph.batching.packing import IGNORED, InputImages
from rlgraph.engines.api import GenerateEngine, Request, Response, check_request, check_weights
from rlgraph.engines.forward.experts import TELLING, routers_of, tells
from rlgraph.engines.forward.packed_attention import padded_implementation
from rlgraph.engines.hf.backbone import load_text_model
from rlgraph.engines.hf.chat_template import prompt_tokens, render_with_response
from rlgraph.engines.hf.folder_weights import FolderWeights, copy_parts, whole_part
from rlgraph.engines.hf.image_tower import ImageTower
from rlgraph.engines.hf.model_files import FamilyOptions, rotary_limit, text_config
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.engines.lora import describe_weights
from rlgraph.engines.stop_strings import StopStrings, stop_strings
from rlgraph.errors import DataError, GraphError
from rlgraph.values.sampling import Running, Sampling


class TransformersEngine(GenerateEngine):
    """A `GenerateEngine` on transformers, which may share its process with a trainer.

    A response depends on weights, prompt and seed, and in the last bits on the prompts that are sampled with it. Every request
    is taken at once, whatever memory that needs. With `routes` responses tell which experts were chosen for each token. With
    `images` prompts may have some.

    Raises DataError for a folder without a model, GraphError for routes of a model without experts.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        max_context: int | None = None,
        routes: bool = False,
        images: bool = False,
    ) -> None:
        super().__init__()
        self._summary = check_model(path)
        self._context = max_context or self._summary.context_length
        self._device = torch.device(device)
        self._model = load_text_model(path, dtype).to(self._device)
        self._tower = ImageTower(path, self._device, dtype) if images else None
        self._chosen = ChosenExperts(self._model) if routes else None
        self._parts = FolderWeights(path, self._model).parts()
        self._waiting: list[Request] = []
        self._batches: list[_Batch] = []

    def submit(self, request: Request) -> None:
        """Queue a request; see `GenerateEngine`. Those submitted between two steps are decoded side by side from then on."""
        check_request(request, self.count_tokens(), self._context, self._summary.vocab_size)
        self._waiting.append(request)

    @torch.no_grad()
    def decode(self) -> dict[str, Response]:
        """Run one decode step; see `GenerateEngine`."""
        alike: dict[Sampling, list[Request]] = {}
        for request in self._waiting:
            alike.setdefault(_drawing_fields(request.sampling), []).append(request)
        self._waiting = []
        for drawing, requests in alike.items():
            self._batches.append(_Batch(drawing, requests, self._rows(requests), self._device, self._chosen, self._tower))
        finished: dict[str, Response] = {}
        for batch in self._batches:
            finished |= batch.decode(self._model)
        self._batches = [batch for batch in self._batches if batch.rows]
        return finished

    def _rows(self, requests: Sequence[Request]) -> list["_Row"]:
        eos = frozenset(self._summary.eos_token_ids)
        return [
            _Row(
                place,
                request.id,
                min(request.sampling.max_tokens, self._context - len(request.prompt)),
                frozenset(request.sampling.stop_token_ids) | (frozenset() if request.sampling.ignore_eos else eos),
                len(request.prompt),
                stop_strings(self._summary.path, request.sampling),
            )
            for place, request in enumerate(requests)
        ]

    def count_requests(self) -> int:
        """Count the requests that the engine holds."""
        return len(self._waiting) + sum(len(batch.rows) for batch in self._batches)

    def count_tokens(self) -> dict[str, int]:
        """Count the tokens that each unfinished request has so far."""
        found = {row.id: len(row.response.tokens) for batch in self._batches for row in batch.rows}
        return found | {request.id: 0 for request in self._waiting}

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        """End these requests and return their responses so far."""
        ended = {request.id: Response([], []) for request in self._waiting if request.id in ids}
        self._waiting = [request for request in self._waiting if request.id not in ids]
        for batch in self._batches:
            ended |= {row.id: batch.response_of(row) for row in batch.rows if row.id in ids}
            batch.rows = [row for row in batch.rows if row.id not in ids]
        self._batches = [batch for batch in self._batches if batch.rows]
        return ended

    @torch.no_grad()
    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None:
        """Copy new weights into place; see `GenerateEngine`."""
        parameters = dict(self._model.named_parameters())
        parts = {name: self._parts[name] or (whole_part(name, tuple(p.shape)),) for name, p in parameters.items()}
        described, tower = describe_weights(weights), {} if self._tower is None else self._tower.shapes
        sees_anew = not tower.keys().isdisjoint(described)
        check_weights(described, {part.name: part.shape for of in parts.values() for part in of} | (tower if sees_anew else {}))
        if self._tower is not None and sees_anew:
            self._tower.replace_weights(weights)
        copy_parts(parameters, parts, weights)
        if running == "recompute":
            for batch in self._batches:
                batch.cache = None

    def context_length(self) -> int:
        """The number of tokens that prompt and response may have together."""
        return self._context

    def close(self) -> None:
        """Free the model."""
        del self._model


@dataclass
class _Row:
    """A request at its place in a batch: when it ends, and what it has so far."""

    place: int
    id: str
    limit: int
    stops: frozenset[int]
    prompt: int = 0
    texts: StopStrings | None = None
    response: Response = field(default_factory=lambda: Response([], []))

    def is_stopped(self) -> bool:
        """Whether the last token is a stop token or completes a stop string."""
        tokens = self.response.tokens
        return tokens[-1] in self.stops or (self.texts is not None and self.texts.find_end(tokens, len(tokens) - 1) is not None)


class _Batch:
    """Requests that began at the same step and draw alike. `rows` are those not yet finished; their places stay the same."""

    def __init__(
        self,
        drawing: Sampling,
        requests: Sequence[Request],
        rows: list[_Row],
        device: torch.device,
        chosen: "ChosenExperts | None",
        tower: ImageTower | None,
    ) -> None:
        self.drawing, self.rows = drawing, rows
        self._tower, self._images = tower, [request.images.urls if request.images else "[]" for request in requests]
        self._chosen, self._routes = chosen, list[torch.Tensor]()  # [B, n, layers, k] of the tokens that were read first
        self.cache: Any = None
        self._steps = 0
        self._tokens, self._mask = _pad_left([request.prompt for request in requests], device)
        self._width = self._tokens.shape[1]  # of the prompts
        self._given = torch.zeros_like(self._mask, dtype=torch.bool)  # true on the tokens of images
        for own, request in zip(self._given, requests, strict=True):
            for begin, end in request.images.places if request.images else ():
                own[self._width - len(request.prompt) :][begin:end] = True
        # One number a token, drawn beforehand, so that what a prompt gets does not depend on the others.
        longest = max(row.limit for row in rows)
        self._numbers = torch.stack([_uniform(request.seed, longest) for request in requests]).to(device)

    def decode(self, model: Any) -> dict[str, Response]:
        logits, self.cache = next_logits(model, self._tokens, self._mask, self.cache, self._read if self._tower else None)
        if self._chosen is not None:
            fresh = self._tokens.shape[1] - sum(part.shape[1] for part in self._routes)  # what is read again keeps its routes
            self._routes.append(self._chosen.take(len(self._tokens))[:, -fresh:])
        chosen, log_probs = sample(logits, self._numbers[:, self._steps], self.drawing)
        self._steps += 1
        self._tokens = torch.cat([self._tokens, chosen[:, None]], dim=1)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(chosen), 1)], dim=1)
        return self._append_tokens(chosen.tolist(), log_probs.tolist())

    def _read(self, embed: Any, tokens: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """Make what a pass reads of the last tokens, or of all, from the `positions` of all, with the images of the prompts among them."""
        assert self._tower is not None
        row = torch.arange(len(tokens), device=tokens.device)[:, None].masked_fill(self._mask == 0, IGNORED)
        given = torch.nn.functional.pad(self._given, (0, self._mask.shape[1] - self._width))
        shown = InputImages(tuple(self._images), given, row)
        if tokens.shape[1] == self._mask.shape[1]:
            return self._tower.inputs(embed, tokens, positions, shown)
        last = self._tower.positions(self._tokens, positions, shown)[..., -tokens.shape[1] :]
        return {"inputs_embeds": embed(tokens), "position_ids": last}

    def _append_tokens(self, chosen: list[int], log_probs: list[float]) -> dict[str, Response]:
        """Append each unfinished row's token, and return the responses that end with it."""
        finished = {}
        for row in self.rows:
            row.response.tokens.append(chosen[row.place])
            row.response.log_probs.append(log_probs[row.place])
            stopped = row.is_stopped()
            if stopped or self._steps == row.limit:
                finished[row.id] = replace(self.response_of(row), finish="stop" if stopped else "length")
        self.rows = [row for row in self.rows if row.id not in finished]
        return finished

    def response_of(self, row: _Row) -> Response:
        """The response of a row so far, with its routes if the engine tells them."""
        if self._chosen is None:
            return row.response
        read = torch.cat([part[row.place] for part in self._routes])[self._width - row.prompt :]
        routes = read.new_full((row.prompt + len(row.response.tokens), *read.shape[1:]), -1)
        routes[: min(len(read), len(routes) - 1)] = read[: len(routes) - 1]
        return replace(row.response, routes=routes)


class ChosenExperts:
    """The experts that the routers of a model chose in its last forward pass. Raises GraphError for a model without routers."""

    def __init__(self, model: Any) -> None:
        routers = routers_of(model)
        if not routers:
            raise GraphError("Generator(routes=True): the model has no routers of experts; leave out routes")
        self._layers: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._take)

    def _take(self, router: Any, given: Any, output: Any) -> None:
        if not tells(output):
            raise GraphError(
                f"Generator(routes=True): {type(router).__name__} does not report which experts it chose; {TELLING}: leave out routes"
            )
        self._layers.append(output[2].to("cpu", torch.int16))

    def take(self, rows: int) -> torch.Tensor:
        """Take the choice `[rows, n, layers, k]` of a pass over so many rows."""
        layers, self._layers = self._layers, []
        return torch.stack(layers, dim=1).unflatten(0, (rows, -1))


def next_logits(
    model: Any,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    cache: Any,
    read: Callable[[Any, torch.Tensor, torch.Tensor], dict[str, Any]] | None = None,
) -> tuple[torch.Tensor, Any]:
    """Compute the next logits `[B, V]` after `tokens [B, L]`, and the new cache. Without a cache it reads all tokens, else the last.

    `read` makes the model's arguments of its embedding, these tokens and the positions `[B, L]` of all; None: as text.
    """
    fresh = tokens if cache is None else tokens[:, -1:]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    text = {"input_ids": fresh, "position_ids": positions[:, -fresh.shape[1] :]}
    given = text if read is None else read(model.get_input_embeddings(), fresh, positions)
    out = model(**given, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1], out.past_key_values


def score_by_decoding(model: Any, prompts: Sequence[Sequence[int]], responses: torch.Tensor) -> torch.Tensor:
    """Compute the log-probs `[B, T]` of given responses as in decoding: prompts padded on the left, one token at a time."""
    tokens, mask = _pad_left(prompts, model.device)
    cache: Any = None
    found = []
    for chosen in responses.to(model.device).T:
        logits, cache = next_logits(model, tokens, mask, cache)
        found.append(logits.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0])
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(chosen), 1)], dim=1)
    return torch.stack(found, dim=1).cpu()


def _drawing_fields(sampling: Sampling) -> Sampling:
    """Keep the fields of a sampling that say how a token is drawn, without those that end a response."""
    return Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)


def sample(logits: torch.Tensor, numbers: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token `[B]` for each row of `logits [B, V]` by `numbers [B]` in [0, 1), and return its log-prob `[B]` too.

    It inverts the cumulative distribution, in float64. Greedy tokens carry their log-prob at temperature 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        log_probs = logits.log_softmax(-1)
        tokens = log_probs.argmax(-1)
    else:
        log_probs = _filter_logits(logits / sampling.temperature, sampling).log_softmax(-1)
        cumulative = log_probs.double().exp().cumsum(-1)
        total = cumulative[:, -1:]
        drawn = torch.minimum(numbers.double()[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        # NaN weights have no distribution: like vLLM it returns some token and NaN, at which the trainer's guard stops.
        tokens = torch.searchsorted(cumulative, drawn, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _filter_logits(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Set the logits of tokens that `min_p`, `top_k`, then `top_p` leave out to minus infinity."""
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # the likeliest token has nothing before it and always stays
        logits = logits.masked_fill((before >= sampling.top_p).gather(-1, order.argsort(-1)), -torch.inf)
    return logits


def _uniform(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, mask


# A reward model: one number for a prompt and a response, from a Hugging Face sequence-classification model.


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
        capped = FamilyOptions(AutoConfig.from_pretrained(path).get_text_config()).attn_logit_softcapping is not None
        attention = (
            padded_implementation(AutoModelForSequenceClassification, path) if capped else None
        )  # transformers' own default leaves the cap out
        self._model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, attn_implementation=attention)
        self._model = self._model.to(device).eval()
        labels = self._model.config.num_labels
        if label is None and labels > 1:
            raise DataError(f"model '{path}' returns {labels} numbers per text; choose the reward among them with label=0 to {labels - 1}")
        if label is not None and not 0 <= label < labels:
            raise DataError(f"model '{path}' returns {labels} number(s) per text, so there is no label={label}; choose 0 to {labels - 1}")
        self._device, self._label, self._batch_tokens = device, label or 0, batch_tokens
        self._rank, self._world, self._add_up = rank, world, add_up

    def scores(self, prompts: Sequence[str], responses: Sequence[str], conversations: Sequence[str] = ()) -> torch.Tensor:
        """Compute the rewards `[B]` float32. `conversations`, as JSON, are the prompts that are lists of messages.

        Raises DataError for a text longer than the model's context.
        """
        asked = conversations or [""] * len(prompts)
        rows = [self._encode(*texts) for texts in zip(prompts, responses, asked, strict=True)]
        for row, tokens in enumerate(rows):
            if not 0 < len(tokens) <= self._context:
                raise DataError(
                    f"response {row} and its prompt have {len(tokens)} tokens, but the reward model reads 1 to {self._context}: "
                    "lower max_tokens, drop long prompts, or use a model with a longer context"
                )
        found = torch.zeros(len(rows))
        for number, places in enumerate(_batches([len(tokens) for tokens in rows], self._batch_tokens)):
            if number % self._world == self._rank:
                found[torch.tensor(places)] = self._forward([rows[place] for place in places])
        if self._world > 1:
            self._add_up(found)  # a score and zeros: no rounding
        return found

    def _encode(self, prompt: str, response: str, conversation: str) -> list[int]:
        """Encode the text as the model was trained on it: by its chat template, if it has one, every message of a conversation as such."""
        tokenizer: Any = self._tokenizer
        if not tokenizer.chat_template:
            return prompt_tokens(tokenizer, [prompt + response])[0]
        if conversation:
            text = render_with_response(tokenizer, conversation, response)
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
