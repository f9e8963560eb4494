"""The reference: a model without an update. A KL term keeps the policy close to it, or it follows the policy on devices of its own."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from rlgraph.engines.lora.settings import LoRA
from rlgraph.engines.optim import AdamW
from rlgraph.errors import GraphError, shown
from rlgraph.graph.nodes import Feedback, Output, declare
from rlgraph.graph.operation import ModelTraits
from rlgraph.nodes.training.cached_scores import CachedLogProbs
from rlgraph.nodes.training.policy import LogProbs, sampling_temperature
from rlgraph.nodes.training.trained_model import TOKENS, TrainedModel, check_scored
from rlgraph.settings import Count, checked, refuse_unknown


@refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class Reference(TrainedModel):
    """A model that gives log-probs and has no update. `path` is a folder in Hugging Face format.

    >>> import rlgraph as rg
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1))
    >>> rg.Reference("tiny", pool=rg.Pool("train")).log_probs(rollout).columns
    ('ref_log_probs',)

    `log_probs` uses the weights of the folder. `old_log_probs` uses those of a feedback edge; `path` is then the policy's folder.
    With `trainer="vllm"`, `max_context` bounds prompt and response together, in tokens (None: the model's own bound): vLLM keeps room for
    keys and values of that many tokens.
    """

    role: ClassVar[str] = "reference"
    frozen: ClassVar[bool] = True
    optimizer: AdamW = field(default_factory=AdamW, init=False)  # no effect without training, so neither can be given
    recompute: bool = field(default=False, init=False)
    adapter: LoRA | None = field(default=None, init=False)
    exact: bool = field(default=False, init=False)
    fused_head: bool | None = field(default=None, init=False)
    offload: Literal["moments", "never"] | None = field(default=None, init=False)
    load_balance: float = field(default=0.0, init=False)
    max_context: Count | None = None

    @property
    def traits(self) -> ModelTraits:
        return replace(super().traits, max_context=self.max_context)

    @checked()
    def log_probs(self, *inputs: Output, cache: str | Path | None = None, name: str = "ref_log_probs") -> Output:
        """Declare `ref_log_probs` [B, T]: the log-probs of the responses under the weights of the folder.

        `cache` is a folder in which they are kept by row, of whatever runs: a row with the same tokens is not computed again. Its key is
        the hash of weights, `dtype`, temperature and tokens. A row has the bits of the batch in which it was computed, so that runs with
        the same order of the data have the same bits with and without what was cached. It is for examples and pairs; a rollout hardly
        ever gives the same row twice. Metric: `ref_log_probs/cached`, the share of rows that were known.

        Raises GraphError for a cache with `dtype="auto"`, which may be another dtype on the next machine.
        """
        temperature = sampling_temperature(inputs)
        check_scored(name, self, temperature)
        operation = LogProbs(self, "ref_log_probs", temperature)
        if cache is not None:
            if self.dtype == "auto":
                raise GraphError(
                    f"node '{name}' has cache={shown(str(cache))} of a reference with dtype='auto', which may be another one on the next "
                    "machine; give dtype='bfloat16' or 'float32'"
                )
            operation = CachedLogProbs(self, "ref_log_probs", temperature, cache=os.path.abspath(cache))
        return Output(declare(name, operation, inputs, reads=TOKENS, writes=("ref_log_probs",), model=self))

    @checked()
    def old_log_probs(self, *inputs: Output, weights: Feedback, name: str = "old_log_probs") -> Output:
        """Declare `old_log_probs` [B, T] on this pool instead of the policy's, under the weights of a feedback edge.

        With the rollout's own edge they are the trainer's log-probs under the version that wrote the responses, and computing them
        overlaps both rollout and update. With an edge of `depth=0` they are those at the start of the update, as `policy.log_probs`
        gives, and the update waits for them.

        Raises GraphError for anything but a feedback edge, for an edge with `latest=True`, and for the edge of a rollout whose
        responses mix versions (`interrupt` or `continuous`).
        """
        if self.spec.only_scores:
            raise GraphError(
                f"node '{name}' is of a model with trainer='{self.spec.name}', which keeps the weights of its folder; leave out trainer"
            )
        if weights.latest:
            raise GraphError(
                f"node '{name}' follows feedback '{weights.name}', which takes the newest version there is: rollout and log-probs would "
                "use different ones; use an edge without latest=True"
            )
        mixed = next((o.node.name for o in inputs if _mixes_versions(o, weights)), None)
        if mixed is not None:
            raise GraphError(
                f"node '{name}' follows the edge '{weights.name}' of '{mixed}', whose responses run through several versions (interrupt or "
                "continuous): no one version wrote them; use an edge of its own with depth=0, or policy.log_probs(rollout)"
            )
        operation = LogProbs(self, "old_log_probs", sampling_temperature(inputs))
        return Output(declare(name, operation, inputs, reads=TOKENS, writes=("old_log_probs",), model=self, feedback=weights))


def _mixes_versions(output: Output, weights: Feedback) -> bool:
    if not isinstance(output, Output) or output.node.feedback is not weights:
        return False
    traits = output.node.traits
    return traits.interrupt is not None or traits.continuous
