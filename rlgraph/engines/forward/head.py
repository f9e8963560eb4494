"""The head of a trained model: what gives each response token its score, log-probs of a policy or values of a critic."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from rlgraph.algorithms.aggregation import Totals
from rlgraph.batching.packing import MicroBatch
from rlgraph.columns import Columns
from rlgraph.engines.forward.chosen_tokens import ChosenTokens
from rlgraph.engines.hf_models.backbone import layers_of
from rlgraph.engines.hf_models.folder_weights import FolderWeights
from rlgraph.engines.lora.modules import Beginning, is_adapter


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
