"""vLLM's worker of one GPU, also as one that writes down routes."""

import logging
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from rlgraph.engines.vllm.mixed_cudagraph_patch import record_prompts
from rlgraph.engines.vllm.routes import write_down
from rlgraph.engines.vllm.weights import Extension

# vLLM's worker of one GPU, as engines start it: it takes weights where they lie, and records steps that read prompts.

log = logging.getLogger("rlgraph.engines")


class GpuWorker(Extension, Worker):
    """Named as `worker_cls` and made by vLLM, in the engine's process or, where it spans GPUs, in one for each of them."""

    def init_device(self) -> None:
        # Qwen3-VL adds features of images behind its first layers, and clears them by code that a recorded step leaves out.
        sees = self.vllm_config.model_config.is_multimodal_model
        if self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs() and not sees:
            record_prompts()
        super().init_device()

    def sleep(self, level: int = 1) -> None:
        """Free device memory. vLLM compares what the whole device has free before and after, in which other programs of the device show."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if "Memory usage increased after sleeping" not in str(error):
                raise
            log.warning("the engine sleeps, and its device has less free memory than before: another program took more meanwhile")


# vLLM's worker of one GPU whose routers write down what they choose, in recorded decode steps too.


class RoutesWorker(GpuWorker):
    """Named as `worker_cls`: a `GpuWorker` for engines with routes."""

    chosen: Any = None

    def load_model(self, **settings: Any) -> None:
        super().load_model(**settings)
        self.chosen = write_down(self.get_model(), self.vllm_config)  # here, so that CUDA graphs record it
