"""What models compute in: `dtype="auto"` becomes bfloat16 where the device computes in it, else float32."""

from rlgraph.graph import Model
from rlgraph.planning.cluster import Cluster, Precision

AUTO = "auto"
UNKNOWN_GPU = Precision("bfloat16", "GPUs are taken to compute in it; rg.local_cluster() asks them")
UNKNOWN_CPU = Precision("float32", "the cluster does not say whether its cores compute in bfloat16; rg.local_cluster() does")
ASKED = "dtype= says so"


def precision_of(model: Model, cluster: Cluster) -> Precision | None:
    """What a model computes in on a cluster, and why; None for a model without a `dtype`, as one of a user's own may be."""
    asked = getattr(model, "dtype", None)
    if asked is None:
        return None
    if asked != AUTO:
        return Precision(str(asked), ASKED)
    if cluster.gpus and model.pool.cpus is None:
        return cluster.gpu_precision or UNKNOWN_GPU
    return cluster.cpu_precision or UNKNOWN_CPU
