"""The heads of trained models: a policy gives each response token its log-prob, a critic a value; each knows its kind of loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from rlgraph.algorithms.aggregation import Totals
from rlgraph.batching.packing import MicroBatch
from rlgraph.columns import Columns
from rlgraph.engines.api import PolicyLossFn, ValueLossFn
from rlgraph.engines.forward.chosen_tokens import ChosenTokens
from rlgraph.engines.forward.collectives import own_part
from rlgraph.engines.forward.scores import Scored, head_scores
from rlgraph.engines.forward.vocabulary import VocabularyShard
from rlgraph.engines.hf_models.backbone import LogitShape, backbone_of, layers_of, load_causal, load_headless, predicting_states
from rlgraph.engines.hf_models.folder_weights import FolderWeights
from rlgraph.engines.hf_models.pretrained import value_head
from rlgraph.engines.lora.modules import Beginning, is_adapter
from rlgraph.errors import DataError


class Head(torch.nn.Module, ABC):
    """A model and its head as one module, so that FSDP gathers all that lies outside of the layers around a whole pass.

    `prefix` begins the names of its metrics; `loss_name` is the name of the whole loss. `folder` has the weights of a model whose
    parameters are on the meta device; None for a model that is in memory. `begins` makes the first matrices of an adapter.
    """

    prefix: ClassVar[str]
    loss_name: ClassVar[str]
    model: Any
    folder: FolderWeights | None = None
    begins: Beginning | None = None

    @property
    @abstractmethod
    def backbone(self) -> Any:
        """The model without its head."""

    @property
    def layers(self) -> Any:
        """The layers, each of which is gathered by itself."""
        return layers_of(self.backbone)

    @property
    def trained_whole(self) -> tuple[torch.nn.Module, ...]:
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
    `head_scores`. `words` are those that this rank's head gives logits of; None for all. `exact` log-probs are those of vLLM on a GPU.
    """

    prefix, loss_name = "actor", "actor/pg_loss"
    words: VocabularyShard | None = None
    exact = False

    def __init__(self, path: str | Path | torch.nn.Module, *, fused: bool = False) -> None:
        super().__init__()
        self._fused = fused
        if isinstance(path, torch.nn.Module):
            self.model = path
        else:
            self.model = load_causal(path)
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
        states = predicting_states(self.backbone, micro_batch)
        if tokens is not None:
            return tokens.scores(self.model.get_output_embeddings(), states, micro_batch.targets, self._shape, temperature=temperature)
        scored = Scored(self._shape, temperature, entropy, squares, self.words, self.exact)
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
    def trained_whole(self) -> tuple[torch.nn.Module, ...]:
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
        return (torch.mv(predicting_states(self.model, micro_batch).float(), own_part(self.score.weight).float()[0]),)

    def loss(
        self, loss: ValueLossFn, scores: tuple[torch.Tensor, ...], rows: Columns, totals: Totals
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return loss(scores[0], rows, totals)
