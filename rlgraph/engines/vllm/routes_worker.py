"""vLLM's worker of one GPU whose routers write down what they choose, in recorded decode steps too."""

from typing import Any

from rlgraph.engines.vllm.gpu_worker import GpuWorker
from rlgraph.engines.vllm.routes import write_down


class RoutesWorker(GpuWorker):
    """Named as `worker_cls`: a `GpuWorker` for engines with routes."""

    chosen: Any = None

    def load_model(self, **settings: Any) -> None:
        super().load_model(**settings)
        self.chosen = write_down(self.get_model(), self.vllm_config)  # here, so that CUDA graphs record it
