"""What an engine of vLLM imports, for a process from which workers are forked."""

import os
from importlib import import_module

from rlgraph.engines.vllm import engine_arguments

MODULES = (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "rlgraph.engines.vllm.engine",
)
ON_CPU = ("vllm.v1.worker.cpu_worker",)  # those of a GPU are imported by the worker, which may open it


def import_vllm() -> None:
    """Import vLLM, with the variables that it reads as it is imported; it opens no GPU."""
    gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))  # to ask torch would open it
    for name, value in engine_arguments.environment(gpu, os.environ).items():
        os.environ.setdefault(name, value)
    for module in (*MODULES, *(() if gpu else ON_CPU)):
        import_module(module)
