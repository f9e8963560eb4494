"""The machine this runs on: as a cluster to compile for, and the environment of a worker on it."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rlgraph.engines.precision import device_precision, leave_out_broken_amx
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.worker.spec import WorkerSpec


def local_cluster() -> Cluster:
    """Describe the GPUs and cores that this process may use: their number, their memory and the dtype that they compute in.

    >>> import os
    >>> local_cluster().cpus == len(os.sched_getaffinity(0))
    True
    """
    leave_out_broken_amx()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = torch.cuda.get_device_properties(0) if gpus else None
    return Cluster(
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)),
        gpus_per_node=max(gpus, 1),
        gpu=properties.name if properties else None,
        gpu_memory_bytes=properties.total_memory if properties else None,
        host_memory_bytes=_host_memory_bytes(),
        gpu_precision=device_precision("cuda") if gpus else None,
        cpu_precision=device_precision("cpu"),
    )


def _host_memory_bytes() -> int:
    """Read the memory of the host, or the limit of the container where that is less."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(host, int(text)) if text.isdigit() else host


# The environment variables of a worker: which GPUs it sees, how many threads it uses, what it may import.


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
