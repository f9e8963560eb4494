"""The head of a trained model: the rows and tokens of a pass, their logits and log-probs, also of a vocabulary cut between ranks.

`ValueHead` is the head of a critic: one number for each token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlgraph.algorithms.masks import Totals
from rlgraph.batching.packing import MicroBatch, response_lengths
from rlgraph.columns import Column, Columns
from rlgraph.engines.api import ValueLossFn
from rlgraph.engines.forward.collectives import stack_ranks, sum_filled
from rlgraph.engines.hf.backbone import layers_of, load_headless, predicting_states
from rlgraph.engines.hf.folder_weights import FolderWeights
from rlgraph.engines.hf.pretrained import value_head
from rlgraph.engines.lora import InitialWeights, is_adapter
from rlgraph.errors import DataError
from rlgraph.plan.model_shapes import LOGITS_AT_ONCE

# The rows of a batch that a pass is of: picked from the batch, so many of their logits at once, and scores put back in their places.

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
                parts.append(checkpoint(_score_tokens, *given, self.ids[rows], shape, temperature, use_reentrant=False))
        own, second, third = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return own, second, third


def _log_probs(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape, temperature: float) -> torch.Tensor:
    return (shape(linear(states, weight, bias)).float() / temperature).log_softmax(-1)


def _score_tokens(
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
    parameters are on the meta device; None for a model that is in memory. `begins` makes the first matrices of an adapter.
    """

    prefix: ClassVar[str]
    loss_name: ClassVar[str]
    model: Any
    folder: FolderWeights | None = None
    begins: InitialWeights | None = None

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

    def fill(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> bool:
        """Copy the box at `offsets` of a parameter or buffer of this module from the folder to `out`; False if the folder lacks it."""
        own = name.removeprefix("model.")
        if self.begins is not None and is_adapter(own):
            shape = tuple(self.get_parameter(name).shape)
            out.copy_(self.begins(own, shape)[tuple(slice(at, at + size) for at, size in zip(offsets, out.shape, strict=True))])
            return True
        if self.folder is None or not self.folder.holds(own):
            return False
        self.folder.fill(own, offsets, out)
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


# A vocabulary that is cut between ranks: each has the logits of its words, and log-probs follow from few numbers a token of each rank.


@dataclass(frozen=True)
class VocabularyShard:
    """The words of this rank: `size` of them from `first` on. The ranks of `group` have the others; none has more than `most`."""

    group: Any
    first: int
    size: int
    most: int

    @classmethod
    def of(cls, group: Any, rank: int, ranks: int, vocab: int) -> "VocabularyShard":
        """Cut a vocabulary: all ranks have as many words, the last one fewer where they do not divide it.

        >>> VocabularyShard.of(None, 1, 2, vocab=5)
        VocabularyShard(group=None, first=3, size=2, most=3)
        """
        most = -(-vocab // ranks)
        return cls(group, rank * most, min(most, vocab - rank * most), most)

    def local_ids(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Number `tokens [N]` among the words of this rank, and tell which of them are here; those of other ranks count as word 0."""
        here = (tokens >= self.first) & (tokens < self.first + self.size)
        return torch.where(here, tokens - self.first, 0), here

    def scores(
        self, normalisers: torch.Tensor, log_probs: torch.Tensor, entropies: torch.Tensor, here: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Combine the normalisers `[2, N]`, log-probs and entropies `[N]` of each rank's words to those of the whole vocabulary.

        A log-prob counts where its token is `here [N]`.
        """
        whole, log_shares, (found, inner, is_here) = self.gather(normalisers, log_probs, entropies, here.float())
        # The entropy of the choice of a rank, and those within its words.
        return whole, (is_here * (found + log_shares)).sum(0), (log_shares.exp() * (inner - log_shares)).sum(0)

    def gather(self, normalisers: torch.Tensor, *of_shards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Gather what ranks know of `[N]` tokens: the normalisers `[2, N]` of each rank's words, and other numbers.

        A normaliser is the largest logit and the logarithm of the sum of `exp(logit - largest)`: added up, large logits would round it.
        Return the whole normalisers, the logarithm of each rank's share `[ranks, N]`, and the other numbers `[ranks, N]` each.
        """
        ranks = stack_ranks(torch.stack([*normalisers, *of_shards]), self.group)
        largest = ranks[:, 0].amax(0)
        sums = ranks[:, 1] + (ranks[:, 0] - largest)
        whole = sums.logsumexp(0)
        return torch.stack([largest, whole]), sums - whole, [*ranks[:, 2:].unbind(1)]


# The head of a critic: one number for each token.


class ValueHead(Head):
    """A model whose head is one linear map to a number: the return that is expected before a token is written, `[N]` float32.

    The map begins as what the folder holds as `score.weight` (a reward model's), else as 0: values begin at 0, whatever the seed.
    """

    prefix, loss_name = "critic", "critic/vf_loss"

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.model = load_headless(path)
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
        return (torch.mv(predicting_states(self.model, micro_batch).float(), self.score.weight.float()[0]),)

    def loss(
        self, loss: ValueLossFn, scores: tuple[torch.Tensor, ...], rows: Columns, totals: Totals
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return loss(scores[0], rows, totals)
