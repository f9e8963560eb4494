"""An engine that can be kept from one job to the next, without vLLM: that of transformers, which reads its folder again."""

from typing import Any

import torch

from rlgraph.engines.api import GenerateEngine, Place
from rlgraph.engines.registry import EngineSpec
from rlgraph.engines.transformers.engine import TransformersEngine
from rlgraph.engines.vllm.engine import folder_weights


class Renewing(TransformersEngine):
    """Loads the weights of its folder again when another job begins."""

    def renew(self) -> None:
        self.replace_weights(folder_weights(self._summary.path, dict(self._model.named_parameters())), "recompute")


def load(generator: Any, place: Place) -> GenerateEngine:
    torch.manual_seed(generator.seed)  # as vLLM does, for all of its process
    return Renewing(generator.path, dtype=torch.float32)


ENGINE = EngineSpec(name="renewing", load=load, renews=True)
