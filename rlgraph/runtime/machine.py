"""The machine this runs on, as a cluster to compile for."""

import os

import torch

from rlgraph.planning.cluster import Cluster


def local_cluster() -> Cluster:
    """Return the GPUs and cores that this process may use."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Cluster(gpus=gpus, cpus=len(os.sched_getaffinity(0)), gpus_per_node=max(gpus, 1))
