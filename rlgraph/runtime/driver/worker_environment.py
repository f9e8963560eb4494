"""The environment variables of a worker: which GPUs it sees, how many threads it uses, what it may import."""

import os
import sys
from collections.abc import Sequence

from rlgraph.runtime.worker.spec import WorkerSpec


def worker_environment(spec: WorkerSpec, reserved: Sequence[str] | None = None) -> dict[str, str]:
    """Build the variables that a worker needs before it imports anything; `reserved` are the GPUs of its host that the job may use."""
    threads = str(spec.worker.threads)
    visible = None if spec.listen_at else os.environ.get("CUDA_VISIBLE_DEVICES")  # which of several hosts it describes is not known
    mine = reserved or (visible.split(",") if visible else [str(gpu) for gpu in range(max(spec.local_gpus, default=-1) + 1)])
    # Ranks of one host meet at the loopback interface alone.
    inside = {} if spec.listen_at else {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {
        # The plan assigns the GPUs: models of one pool share them, which Ray's own count cannot express.
        "CUDA_VISIBLE_DEVICES": ",".join(mine[gpu] for gpu in spec.local_gpus),
        **inside,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # vLLM warns at each start that it binds memory to a node
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # a worker imports what the driver can
    }
