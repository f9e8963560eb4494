"""The head of a trained model: the rows and tokens of a pass, and what it gives of them: log-probs of a policy, values of a critic."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlgraph.algorithms.masks import Totals
from rlgraph.batching.packing import MicroBatch, response_lengths
from rlgraph.columns import Column, Columns
from rlgraph.engines.api import PolicyLossFn, ValueLossFn
from rlgraph.engines.forward.collectives import VocabularyShard, sum_filled
from rlgraph.engines.hf.backbone import LogitShape, backbone_of, layers_of, predicting_states
from rlgraph.engines.hf.folder_weights import FolderWeights
from rlgraph.engines.hf.image_tower import ImageTower
from rlgraph.engines.hf.model_files import VISION
from rlgraph.engines.hf.pretrained import value_head
from rlgraph.engines.hf.unloaded import load_causal, load_headless, load_vision
from rlgraph.engines.lora import InitialWeights, is_adapter
from rlgraph.errors import DataError
from rlgraph.plan.model_shapes import LOGITS_AT_ONCE

# The rows of a batch that a pass is of: picked from the batch, so many of their logits at once, and scores put back in their places.

TokenScores: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # as `token_scores` takes and gives them
AT_ONCE = {"cpu": 1 << 24, "cuda": LOGITS_AT_ONCE}  # logits: on a GPU enough rows for a product at its full speed


def check_lengths(batch: Columns, most: int | None) -> None:
    """Raise DataError for a row of more tokens than `most`, the `rotary_limit` of the model that reads it."""
    if most is None:
        return
    longest = int((tensor_of(batch, "prompt_mask").sum(-1) + response_lengths(tensor_of(batch, "response_mask"))).max())
    if longest > most:
        raise DataError(
            f"a row has {longest} tokens, but beyond {most} the model's rotary factors depend on the longest row of a micro-batch, so that "
            f"log-probs would depend on micro_batch_tokens; cut rows to {most} tokens (max_tokens=, max_context=)"
        )


def unpack_values(values: torch.Tensor, micro_batch: MicroBatch, width: int) -> torch.Tensor:
    """Put the values at their places in `[rows, T]`, with 0 elsewhere."""
    own = values.new_zeros(len(micro_batch.rows), width, *values.shape[1:]).index_put((micro_batch.row, micro_batch.column), values)
    return own if micro_batch.group is None else sum_filled(own, micro_batch.group)


def rows_of(batch: Columns, rows: torch.Tensor, device: torch.device) -> Columns:
    """Pick rows of every column, on a device."""

    def pick(column: Column) -> Column:
        return column[rows.to(column.device)].to(device) if isinstance(column, torch.Tensor) else [column[i] for i in rows.tolist()]

    return {name: pick(column) for name, column in batch.items()}


def tensor_of(batch: Columns, name: str) -> torch.Tensor:
    """A column that is a tensor."""
    column = batch[name]
    assert isinstance(column, torch.Tensor)
    return column


def shape_of(batch: Columns) -> tuple[int, int]:
    """The number of responses of a batch, and of the tokens of the longest."""
    rows, width = tensor_of(batch, "responses").shape
    return rows, width


def rows_per_chunk(device: torch.device, words: int) -> int:
    """Count the rows whose logits are in memory at once, for a head of so many words."""
    return max(1, AT_ONCE[device.type] // words)


# Log-probs of several tokens at each position: given ones, or the most probable. The logits of a few rows are in memory at a time.

Shape = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens whose log-probs are computed at each position: `ids` `[N, K]`, or without them the `top_k` most probable, None for all."""

    ids: torch.Tensor | None = None
    top_k: int | None = None

    def scores(
        self, head: Any, states: torch.Tensor, tokens: torch.Tensor, shape: Shape, *, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Score by the linear map `head` of `states [N, H]`, in float32: the log-probs `[N]` of `tokens [N]`, and two more.

        Of given tokens these are the entropies `[N]` and the log-probs `[N, K]`, with gradients; the backward pass computes the logits
        again. Of the most probable ones, and of all, they are the ids and the log-probs `[N, K]`.
        """
        size, parts = rows_per_chunk(head.weight.device, head.weight.shape[0]), []
        for first in range(0, max(len(states), 1), size):
            rows = slice(first, first + size)
            given = (states[rows], head.weight, head.bias, tokens[rows])
            if self.ids is None:
                parts.append(_most(*given, self.top_k, shape, temperature))
            else:
                parts.append(checkpoint(_score_chosen, *given, self.ids[rows], shape, temperature, use_reentrant=False))
        own, second, third = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return own, second, third


def _log_probs(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape, temperature: float) -> torch.Tensor:
    return (shape(linear(states, weight, bias)).float() / temperature).log_softmax(-1)


def _score_chosen(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    shape: Shape,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = _log_probs(states, weight, bias, shape, temperature)
    return found.gather(-1, tokens[:, None])[:, 0], -(found.exp() * found).sum(-1), found.gather(-1, ids.long())


def _most(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    top_k: int | None,
    shape: Shape,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = _log_probs(states, weight, bias, shape, temperature)
    own, words = found.gather(-1, tokens[:, None])[:, 0], found.shape[-1]
    if top_k is None:
        return own, torch.arange(words, device=found.device).expand(found.shape), found
    most, ids = found.topk(min(top_k, words), -1)
    return own, ids, most


# The head of a trained model: what gives each response token its score, log-probs of a policy or values of a critic.


class Head(torch.nn.Module, ABC):
    """A model and its head as one module, so that FSDP gathers all that lies outside of the layers around a whole pass.

    `prefix` begins the names of its metrics; `loss_name` is the name of the whole loss. `folder` has the weights of a model whose
    parameters are on the meta device; None for a model that is in memory. `begins` makes the first matrices of an adapter. `vision` makes
    features of images where it is trained too, and `vision_folder` has its weights.
    """

    prefix: ClassVar[str]
    loss_name: ClassVar[str]
    model: Any
    path: str | Path
    tower: ImageTower | None = None  # a frozen one is whole on each rank
    folder: FolderWeights | None = None
    vision_folder: FolderWeights | None = None
    begins: InitialWeights | None = None

    def __init__(self) -> None:
        super().__init__()
        self.vision: torch.nn.Module | None = None

    @property
    @abstractmethod
    def backbone(self) -> Any:
        """The model without its head."""

    @property
    def layers(self) -> Any:
        """The layers, each of which is gathered by itself."""
        return layers_of(self.backbone)

    @property
    def unadapted_modules(self) -> tuple[torch.nn.Module, ...]:
        """The modules that are trained beside an adapter, and not frozen: none of a language model."""
        return ()

    def train_vision(self) -> None:
        """Make the tower a part of this module, so that it is trained."""
        self.vision = load_vision(self.path)
        self.vision_folder = FolderWeights(self.path, self.vision, whole=True)

    def load_tower(self, device: torch.device, dtype: torch.dtype) -> None:
        """Load what makes features of images, once, when the first batch has some."""
        self.tower = self.tower or ImageTower(self.path, device, dtype, self.vision)

    def fill(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> bool:
        """Copy the box at `offsets` of a parameter or buffer of this module from the folder to `out`; False if the folder lacks it."""
        own = name.removeprefix("model.")
        if self.begins is not None and is_adapter(own):
            shape = tuple(self.get_parameter(name).shape)
            out.copy_(self.begins(own, shape)[tuple(slice(at, at + size) for at, size in zip(offsets, out.shape, strict=True))])
            return True
        folder, own = (self.vision_folder, own.removeprefix(VISION)) if own.startswith(VISION) else (self.folder, own)
        if folder is None or not folder.holds(own):
            return False
        folder.fill(own, offsets, out)
        return True

    def source(self, name: str) -> str | None:
        """The name in the folder of the tensor that a parameter of this module is; None for one that the folder has otherwise, or lacks."""
        return None if self.folder is None else self.folder.source(name.removeprefix("model."))

    @abstractmethod
    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        squares: bool = False,
        tokens: ChosenTokens | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Compute a score `[N]` for each target of a micro-batch, then entropies or sums of squares `[N]` if asked for.

        With `tokens`, of a model with a vocabulary, it computes their log-probs instead, as `ChosenTokens.scores` says.
        """

    @abstractmethod
    def loss(self, loss: Any, scores: tuple[torch.Tensor, ...], rows: Columns, totals: Totals) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss and its metrics from the results of `forward`, as `[b, T]`."""


class PolicyHead(Head):
    """A language model: the log-probs of the distribution that a response was sampled from, at the `temperature` of its sampling.

    `path` is a folder, or a model that is in memory already. `fused` keeps the logits of all tokens out of memory while it trains: see
    `head_scores`. `words` are those that this rank's head gives logits of; None for all. `score_tokens` computes log-probs and entropies in
    place of `token_scores`.
    """

    prefix, loss_name = "actor", "actor/pg_loss"
    words: VocabularyShard | None = None
    score_tokens: TokenScores | None = None

    def __init__(self, path: str | Path | torch.nn.Module, *, fused: bool = False) -> None:
        super().__init__()
        self._fused = fused
        if isinstance(path, torch.nn.Module):
            self.model = path
        else:
            self.path, self.model = path, load_causal(path)
            self.folder = FolderWeights(path, self.model)
        self._shape = LogitShape.of(self.model.config)

    @property
    def backbone(self) -> Any:
        return backbone_of(self.model)

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        squares: bool = False,
        tokens: ChosenTokens | None = None,
    ) -> tuple[torch.Tensor, ...]:
        states = predicting_states(self.backbone, micro_batch, self.tower)
        if tokens is not None:
            return tokens.scores(self.model.get_output_embeddings(), states, micro_batch.targets, self._shape, temperature=temperature)
        scored = Scored(self._shape, temperature, entropy, squares, self.words, self.score_tokens)
        return head_scores(self.model.get_output_embeddings(), states, micro_batch.targets, scored, fused=self._fused)

    def loss(
        self, loss: PolicyLossFn, scores: tuple[torch.Tensor, ...], rows: Columns, totals: Totals
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return loss(scores[0], rows, totals, scores[1] if len(scores) > 1 else None)


class ValueHead(Head):
    """A model whose head is one linear map to a number: the return that is expected before a token is written, `[N]` float32.

    The map begins as what the folder holds as `score.weight` (a reward model's), else as 0: values begin at 0, whatever the seed.
    """

    prefix, loss_name = "critic", "critic/vf_loss"

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path, self.model = path, load_headless(path)
        self.folder = FolderWeights(path, self.model)
        weight = value_head(path)
        size = self.model.config.hidden_size
        if weight is None:
            weight = torch.zeros(1, size)
        if tuple(weight.shape) != (1, size):
            raise DataError(f"model '{path}': score.weight has shape {tuple(weight.shape)}; a critic's head is one number over {size}")
        self.score = torch.nn.Linear(size, 1, bias=False, device="meta")
        self._begins = weight

    @property
    def backbone(self) -> Any:
        return self.model

    @property
    def unadapted_modules(self) -> tuple[torch.nn.Module, ...]:
        return (self.score,)

    def fill(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> bool:
        if name != "score.weight":
            return super().fill(name, offsets, out)
        out.copy_(self._begins[tuple(slice(at, at + size) for at, size in zip(offsets, out.shape, strict=True))])
        return True

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        squares: bool = False,
        tokens: ChosenTokens | None = None,
    ) -> tuple[torch.Tensor, ...]:
        # In float32: a sum over hidden units that is rounded to bfloat16 is a return to two digits.
        return (torch.mv(predicting_states(self.model, micro_batch, self.tower).float(), self.score.weight.float()[0]),)

    def loss(
        self, loss: ValueLossFn, scores: tuple[torch.Tensor, ...], rows: Columns, totals: Totals
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return loss(scores[0], rows, totals)


# Log-probs of tokens, entropies and sums of squared probabilities, in float32, a few rows at a time.
#
# No matrix of tokens by vocabulary is ever whole in float32, and with a fused head none of logits either. The head's product, the
# log-probs and the entropies of some rows are then computed and let go. The backward pass computes these rows again, which is one more
# product of the head, and adds their share of the head's gradient up in float32. On two cores, for 2,048 tokens of 49,152 words and 576
# hidden units with entropies, that takes 308 MB instead of 942 MB and 1.6 times the time of the head.
#
# On a GPU one kernel computes log-probs and entropies, and one their gradient: `triton_scores`.

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # 16 MiB of float32 stay in the cache of a CPU; a GPU wants few launches


@dataclass(frozen=True)
class Scored:
    """What is computed of the logits: `shape` makes them of the head's output, `temperature` is that of the sampling.

    `words` are those whose logits the head of this rank gives; None for the whole vocabulary. `score_tokens` is that of the
    `PolicyHead`.
    """

    shape: Callable[[torch.Tensor], torch.Tensor]
    temperature: float = 1.0
    entropy: bool = False
    squares: bool = False
    words: VocabularyShard | None = None
    score_tokens: TokenScores | None = None

    def __call__(self, output: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give the log-probs `[N]` of `tokens [N]`, then entropies or sums of squares `[N]` if asked for, of a head's output `[N, V]`."""
        logits = self.shape(output)
        score = self.score_tokens or token_scores
        log_probs, entropies = score(logits, tokens, temperature=self.temperature, entropy=self.entropy, words=self.words)
        more = sum_pi_squared(logits, temperature=self.temperature, words=self.words) if self.squares else entropies
        return (log_probs,) if more is None else (log_probs, more)


def head_scores(head: Any, states: torch.Tensor, tokens: torch.Tensor, scored: Scored, *, fused: bool) -> tuple[torch.Tensor, ...]:
    """Score `tokens [N]` by the linear map `head` of `states [N, H]`.

    Without gradients it takes a few rows at a time. With them it does so only if `fused`, since the backward pass then computes the logits
    again. With gradients, a head that is not a plain linear map is computed whole.
    """
    if not isinstance(head, torch.nn.Linear):
        return scored(head(states), tokens)
    learns = torch.is_grad_enabled() and (states.requires_grad or head.weight.requires_grad)
    weight, bias = head.weight, head.bias
    words = weight.shape[0] if scored.words is None else scored.words.most  # ranks take as many rows at a time
    at_once, plain = rows_per_chunk(weight.device, words), type(head) is torch.nn.Linear
    product: Callable[[torch.Tensor], torch.Tensor] = partial(linear, weight=weight, bias=bias) if plain else head
    if len(states) <= at_once or (learns and not (fused and plain)):
        return scored(product(states), tokens)
    if not learns:
        parts = [scored(product(states[rows]), tokens[rows]) for rows in _chunks(len(states), at_once)]
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
    found: tuple[torch.Tensor, ...] = _FusedScores.apply(states, weight, bias, tokens, scored, at_once)
    return found


class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor, scored: Scored, at_once: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(states, weight, bias, tokens)
        ctx.scored, ctx.at_once = scored, at_once
        parts = [scored(linear(states[rows], weight, bias), tokens[rows]) for rows in _chunks(len(states), at_once)]
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, tokens = ctx.saved_tensors
        of_states = torch.empty_like(states)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # not of a frozen head
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _chunks(len(states), ctx.at_once):
            output = linear(states[rows], weight, bias).requires_grad_()
            with torch.enable_grad():
                found = ctx.scored(output, tokens[rows])
            used = [(part, grad[rows]) for part, grad in zip(found, grads, strict=True) if part.requires_grad]
            (of_output,) = torch.autograd.grad([part for part, _ in used], output, [grad for _, grad in used])
            torch.mm(of_output, weight, out=of_states[rows])
            if of_weight is not None:
                of_weight += of_output.t() @ states[rows]
            if of_bias is not None:
                of_bias += of_output.sum(0, dtype=torch.float32)
        return (
            of_states,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def token_scores(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    words: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probs `[N]` of `tokens [N]` under `logits [N, V] / temperature`, and the entropies `[N]` if asked for.

    Both are float32, whatever the logits are; the full `[N, V]` in float32 is never built, not in the backward pass either. Logits of
    the `words` of this rank alone, `[N, size]`, give what those of the whole vocabulary would.
    """
    log_probs, entropies = _scores_on(logits.device.type).apply(logits, tokens, temperature, entropy, words)
    return log_probs, entropies if entropy else None


def _scores_on(device: str) -> Any:
    if device != "cuda":
        return _TokenScores
    from rlgraph.engines.forward.triton_scores import TritonScores  # only torch for GPUs brings Triton

    return TritonScores


@torch.no_grad()
def sum_pi_squared(logits: torch.Tensor, *, temperature: float = 1.0, words: VocabularyShard | None = None) -> torch.Tensor:
    """Compute the sum `[N]` of the squared probabilities of each distribution `logits [N, V] / temperature`, float32."""
    sums = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    normalisers = sums.new_empty(2, len(sums))
    for rows in _row_slices(logits):
        scaled = logits[rows].float() / temperature
        if words is not None:
            normalisers[:, rows] = _normalisers(scaled, scaled.log_softmax(-1))
        sums[rows] = scaled.softmax(-1).square_().sum(-1)
    if words is None:
        return sums
    _, log_shares, (of_ranks,) = words.gather(normalisers, sums)
    return ((2 * log_shares).exp() * of_ranks).sum(0)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy: bool, words: VocabularyShard | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, here = (tokens, torch.ones_like(tokens, dtype=torch.bool)) if words is None else words.local_ids(tokens)
        log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        normalisers, entropies = log_probs.new_empty(2, len(log_probs)), torch.zeros_like(log_probs)
        for rows in _row_slices(logits):
            scaled = logits[rows].float() / temperature
            table = scaled.log_softmax(-1)  # as engines do, to the bit
            log_probs[rows] = table.gather(-1, own[rows, None])[:, 0]
            normalisers[:, rows] = _normalisers(scaled, table)
            if entropy:
                entropies[rows] = -(table.exp() * table).sum(-1)
        if words is not None:
            normalisers, log_probs, entropies = words.scores(normalisers, log_probs, entropies, here)
        ctx.save_for_backward(logits, own, here, normalisers, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, own, here, normalisers, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = grads
        of_own = torch.where(here, of_log_probs, 0)
        grad = torch.empty_like(logits)
        for rows in _row_slices(logits):
            log_p = logits[rows].float() / ctx.temperature - normalisers[0, rows, None] - normalisers[1, rows, None]
            p = log_p.exp()
            # d log p_k / d z_j = [j = k] - p_j;  dH / d z_j = -p_j (log p_j + H)
            chunk = p * -of_log_probs[rows, None]
            chunk.scatter_add_(-1, own[rows, None], of_own[rows, None])
            if ctx.entropy:
                chunk -= of_entropies[rows, None] * p * (log_p + entropies[rows, None])
            grad[rows] = (chunk / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None


def _normalisers(scaled: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Read the normaliser of each row `[2, N]` off its log-softmax, as `VocabularyShard.gather` describes it."""
    return torch.stack([scaled.amax(-1), -table.amax(-1)])


def _row_slices(logits: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
