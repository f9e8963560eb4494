"""The passes of bounded tokens in which a GPU computes a batch; each takes the host time to launch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlgraph.batching.cutting import best, cut
from rlgraph.costs.lengths import Array
from rlgraph.graph.operation import ModelTraits
from rlgraph.settings import Recompute

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Node


ALIKE = 64  # ranks that are dealt sequences at most; more of them, with as many sequences each, have passes of the same lengths


@dataclass(frozen=True)
class Passes:
    """A batch is cut into `mini_batches` of equal rows, and each of these as the trainer cuts it: dealt to the ranks, in passes
    of at most `tokens` tokens, packed one behind the other. The rows are in groups of `group` with one prompt, which a pass has once.
    `tensor` × `context` × `pipeline` ranks compute a pass together: it is cut between them. A pipeline waits for as many passes more as
    it has stages behind the first. `expert` ranks share experts, and cut no pass. `recompute` is what its layers compute again (None: not
    known, of costs that an earlier version wrote); passes are as many with it as without, and equal."""

    tokens: int
    mini_batches: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    group: int = 1
    recompute: Recompute | None = field(default=None, compare=False)

    @property
    def sharing(self) -> int:
        """The ranks that compute one pass together."""
        return self.tensor * self.context * self.pipeline

    def of_a_rank(self, lengths: Array, prompt_tokens: float, ranks: int) -> Array:
        """Count the tokens `[steps, passes]` of each pass, 0 where a step has fewer, for responses `[steps, rows]`.

        Ranks wait for each other in every pass, so a pass counts the tokens of the rank that has the most. Of a pass that ranks share each
        counts its share. Of more than `ALIKE` ranks that many, with their share of the rows, stand for all.
        """
        ranks_of_data = max(ranks // self.sharing, 1)
        if ranks_of_data > ALIKE:
            rows = max(round(lengths.shape[1] * ALIKE / ranks_of_data), ALIKE, self.mini_batches)
            lengths, ranks_of_data = lengths[:, :rows], ALIKE
        groups = np.arange(lengths.shape[1]) // self.group
        mini_batches = zip(*(np.array_split(each, self.mini_batches, axis=-1) for each in (lengths, groups)), strict=True)
        by_mini_batch = [self._cut(batch, of_rows, max(prompt_tokens, 1.0), ranks_of_data) for batch, of_rows in mini_batches]
        filling = [batch.max(axis=1, keepdims=True).repeat(self.pipeline - 1, axis=1) for batch in by_mini_batch]
        found: Array = np.concatenate([*by_mini_batch, *filling], axis=1)
        return found if self.sharing == 1 else found / self.sharing

    def _cut(self, lengths: Array, groups: Array, prompt_tokens: float, ranks: int) -> Array:
        """Count the tokens `[steps, passes]` of the passes of a mini-batch `[steps, rows]`, each step cut in its best way."""
        cuts = cut(np.full_like(lengths, prompt_tokens, dtype=float), lengths, groups, ranks, self.tokens, shared=self.group > 1)
        of_cuts = [each.of_passes(ranks) for each in cuts]
        width = max(passes.shape[1] for passes in of_cuts)
        padded = np.stack([np.pad(passes, ((0, 0), (0, width - passes.shape[1]))) for passes in of_cuts])
        found: Array = padded[best(cuts, ranks), np.arange(len(lengths))]
        return found


def passes_of(node: "Node", gpus: int) -> Passes | None:
    """Describe the passes in which a node computes its batch; None if it does not pack them without padding, as on a CPU."""
    model = node.model.traits if node.model is not None else ModelTraits()
    on_gpus = gpus > 0 and node.pool is not None and node.pool.cpus is None
    if model.micro_batch_tokens is None or not (on_gpus or model.recompute or model.sharing > 1):
        return None
    tensor, context = model.tensor_parallel, model.context_parallel
    group = _group(node) if model.shared_prompts else 1
    return Passes(
        model.micro_batch_tokens * context,
        node.traits.mini_batches,
        tensor,
        context,
        model.pipeline_parallel,
        model.expert_parallel,
        group,
        model.recompute,
    )


def _group(node: "Node") -> int:
    """Find how many neighbours among the rows of a node have one prompt, by the node that its responses come from; 1 if that is not known.

    An update on several batches counts each response with its own prompt.
    """
    source = node.source_of("responses") if "responses" in node.reads else None
    if source is None or source.rows != node.rows:
        return 1
    return source.traits.group_size or (2 if source.traits.preferences == "pairs" else 1)
