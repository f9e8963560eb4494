"""The machine this runs on, as a cluster to compile for."""

import os
from pathlib import Path

import torch

from rlgraph.engines.precision import device_precision, leave_out_broken_amx
from rlgraph.plan.cluster import Cluster


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
