"""The reference: a frozen model that the policy is kept close to."""

from dataclasses import dataclass
from typing import ClassVar

from rlgraph.graph import Output, declare
from rlgraph.nodes.policy import TOKENS, LogProbs, TrainedModel, sampling_temperature


@dataclass(frozen=True, eq=False, kw_only=True)
class Reference(TrainedModel):
    """A model whose weights never change. `path` is a folder in Hugging Face format."""

    role: ClassVar[str] = "reference"

    def log_probs(self, *inputs: Output, name: str = "ref_log_probs") -> Output:
        """Declare `ref_log_probs` [B, T]: what the reference gives the responses."""
        return Output(
            declare(
                name,
                LogProbs(self, "ref_log_probs", sampling_temperature(inputs)),
                inputs,
                reads=TOKENS,
                writes=("ref_log_probs",),
                model=self,
            )
        )
