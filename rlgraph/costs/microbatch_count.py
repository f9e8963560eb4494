"""The passes of bounded tokens in which a GPU computes a batch; each takes the host time to launch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlgraph.batching.packing import micro_batches
from rlgraph.costs.lengths import Array
from rlgraph.graph.operation import ModelTraits

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Node


ALIKE = 64  # ranks that are dealt sequences at most; more of them, with as many sequences each, have passes of the same lengths


@dataclass(frozen=True)
class Passes:
    """A batch is cut into `mini_batches` of equal rows, and each of these as the trainer cuts it: dealt to the ranks, in passes
    of at most `tokens` tokens, packed one behind the other. `tensor` × `context` × `pipeline` ranks compute a pass together: it is cut
    between them. A pipeline waits for as many passes more as it has stages behind the first. `expert` ranks share experts, and cut no
    pass."""

    tokens: int
    mini_batches: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def sharing(self) -> int:
        """The ranks that compute one pass together."""
        return self.tensor * self.context * self.pipeline

    def of_a_rank(self, lengths: Array, prompt_tokens: float, ranks: int) -> Array:
        """Count the tokens `[steps, passes]` of each pass, 0 where a step has fewer, for responses `[steps, rows]`.

        Ranks wait for each other in every pass, so a pass counts the tokens of the rank that has the most. Of a pass that ranks share each
        counts its share. Of more than `ALIKE` ranks that many, with their share of the rows, stand for all.
        """
        groups = max(ranks // self.sharing, 1)
        if groups > ALIKE:
            rows = max(round(lengths.shape[1] * ALIKE / groups), ALIKE, self.mini_batches)
            lengths, groups = lengths[:, :rows], ALIKE
        sequences = np.where(lengths > 0, lengths + max(prompt_tokens - 1, 0.0), 0.0)  # the last token of a response predicts nothing
        longest_first = [-np.sort(-batch, axis=1) for batch in np.array_split(sequences, self.mini_batches, axis=1)]
        cut = [self._cut(batch, groups) for batch in longest_first]
        filling = [batch.max(axis=1, keepdims=True).repeat(self.pipeline - 1, axis=1) for batch in cut]
        found: Array = np.concatenate([*cut, *filling], axis=1)
        return found if self.sharing == 1 else found / self.sharing

    def _cut(self, sequences: Array, ranks: int) -> Array:
        rank, micro_batch = micro_batches(sequences, ranks, self.tokens)
        steps, passes = len(sequences), int(micro_batch.max()) + 1
        place = (np.arange(steps)[:, None] * ranks + rank) * passes + micro_batch
        tokens = np.bincount(place.ravel(), weights=sequences.ravel(), minlength=steps * ranks * passes)
        found: Array = tokens.reshape(steps, ranks, passes).max(axis=1)
        return found


def passes_of(node: "Node", gpus: int) -> Passes | None:
    """Describe the passes in which a node computes its batch; None if it does not pack them without padding, as on a CPU."""
    model = node.model.traits if node.model is not None else ModelTraits()
    on_gpus = gpus > 0 and node.pool is not None and node.pool.cpus is None
    if model.micro_batch_tokens is None or not (on_gpus or model.recompute or model.sharing > 1):
        return None
    tensor, context = model.tensor_parallel, model.context_parallel
    return Passes(
        model.micro_batch_tokens * context, node.traits.mini_batches, tensor, context, model.pipeline_parallel, model.expert_parallel
    )
