"""The plug-in for the registry: one kernel for an engine and a trainer.

A trainer then computes what its engine computes, bit for bit: float32 on a CPU with one thread, bfloat16 on a GPU. On a CPU embeddings,
norms and the products in between are equal as they are. Linear maps, rotations and attention are exchanged for the engine's kernels;
log-probs are a `log_softmax` on both sides. On a GPU see `gpu` for the trainer and `gpu_worker` for the engine.
"""

from typing import Any

from rlgraph.engines.exact.rules import check
from rlgraph.engines.registry import Comparison, ExactSpec


def exchange(head: Any, device: str) -> list[Any]:
    """Give the model of a policy's `head` the engine's kernels. Returns the linear maps that `forget` when weights change."""
    if device == "cuda":
        from rlgraph.engines.exact import gpu

        gpu.exchange(head)
        return []
    from rlgraph.engines.exact import cpu

    return cpu.exchange(head)


def diagnose(folder: str) -> Comparison:
    """Compare engine and trainer on this machine, operation by operation."""
    from rlgraph.engines.exact import diagnosis

    return diagnosis.diagnose(folder)


EXACT = ExactSpec(
    check=check,
    exchange=exchange,
    engine_arguments={
        "worker_cls": "rlgraph.engines.exact.gpu_worker.ExactWorker",
        "disable_cascade_attn": True,  # it sums a shared prefix apart
    },
    diagnose=diagnose,
)
