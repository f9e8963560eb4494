"""The dtype that models compute in: `dtype="auto"` becomes bfloat16 where the device computes in it, else float32."""

from rlgraph.compiler.cluster import Cluster, Precision
from rlgraph.graph.nodes import Model

AUTO = "auto"
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
UNKNOWN_GPU = Precision("bfloat16", "GPUs are taken to compute in it; rg.local_cluster() asks them")
UNKNOWN_CPU = Precision("float32", "the cluster does not say whether its cores compute in bfloat16; rg.local_cluster() does")
ASKED = "dtype= says so"


def precision_of(model: Model, cluster: Cluster) -> Precision | None:
    """Choose the dtype that a model computes in on a cluster, and say why; None for a model without a `dtype` setting."""
    asked = model.traits.dtype
    if asked is None:
        return None
    if asked != AUTO:
        return Precision(asked, ASKED)
    if cluster.gpus and model.pool.cpus is None:
        return cluster.gpu_precision or UNKNOWN_GPU
    return cluster.cpu_precision or UNKNOWN_CPU


def itemsize_of(model: Model | None, cluster: Cluster) -> int:
    """Count the bytes of one number of the dtype that a model computes in."""
    precision = precision_of(model, cluster) if model is not None else None
    return ITEMSIZE.get(precision.dtype, 2) if precision is not None else 2
