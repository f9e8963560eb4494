"""vLLM's worker of one GPU, as engines start it: it takes weights where they lie, and records steps that read prompts."""

from vllm.v1.worker.gpu_worker import Worker

from rlgraph.engines.vllm.mixed_cudagraph_patch import record_prompts
from rlgraph.engines.vllm.tp_weight_loading import Extension


class GpuWorker(Extension, Worker):  # type: ignore[misc]
    """Named as `worker_cls` and made by vLLM, in the engine's process or, where it spans GPUs, in one for each of them."""

    def init_device(self) -> None:
        if self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            record_prompts()
        super().init_device()
