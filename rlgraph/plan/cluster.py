"""The cluster that a graph is compiled for, and the dtype that its devices compute in. Counts only; nothing is looked up on a machine."""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from rlgraph import settings
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Model
from rlgraph.settings import Count, Natural, OneOf, Range

Bytes: TypeAlias = Annotated[int, Range(least=1, rule="a whole number of bytes above 0, or None where it is not known")]


@settings.refuse_unknown
@dataclass(frozen=True)
class Precision:
    """The dtype that a device computes models in, and the reason.

    Raises PlanError for another dtype.

    >>> Cluster(gpus=1, gpu_precision=Precision("float32", "a test compares bits")).gpu_precision.dtype
    'float32'

    * `dtype`: "bfloat16" or "float32".
    * `why`: the reason in words, for the printed plan.
    """

    dtype: Annotated[str, OneOf(("bfloat16", "float32"))]
    why: str

    def __post_init__(self) -> None:
        settings.check(self, PlanError)


@settings.refuse_unknown
@dataclass(frozen=True)
class Cluster:
    """GPUs and host cores, of all hosts together. Without GPUs the pools run on the cores.

    Raises PlanError for counts below zero, or more hosts than cores.

    >>> Cluster(gpus=16, gpus_per_node=8, gpu="H100").hosts
    2

    * `gpus`: the GPUs, of all hosts together.
    * `cpus`: the host cores, of all hosts together.
    * `gpus_per_node`: the GPUs per host, from which the number of hosts follows.
    * `hosts`: the number of hosts without GPUs, each with an equal share of the cores.
    * `gpu`: the kind of GPU, e.g. "H100". With it, times that were not measured are estimated.
    * `gpu_memory_bytes`: the memory of each GPU; the compiler then refuses a plan that cannot fit.
    * `host_memory_bytes`: the memory of each host, with the same check.
    * `gpu_precision`, `cpu_precision`: the dtype of models with dtype="auto" on GPUs and on cores. By default GPUs compute in
      bfloat16 and cores in float32.
    """

    gpus: Natural = 0
    cpus: Count = 2
    gpus_per_node: Count = 8
    gpu: str | None = None
    gpu_memory_bytes: Bytes | None = None
    host_memory_bytes: Bytes | None = None
    hosts: Count = 1
    gpu_precision: Precision | None = None
    cpu_precision: Precision | None = None

    def __post_init__(self) -> None:
        settings.check(self, PlanError)
        if self.gpus:
            # At construction: the GPUs determine the least number of hosts.
            object.__setattr__(self, "hosts", max(self.hosts, -(-self.gpus // self.gpus_per_node)))
        if self.hosts > max(self.cpus, self.gpus):
            raise PlanError(f"Cluster(hosts={self.hosts}, cpus={self.cpus}): each host has at least one core; pass the cores of all hosts")

    def host_of_gpu(self, gpu: int) -> int:
        """Find the host of a GPU."""
        return gpu // self.gpus_per_node

    def host_of_core(self, core: int) -> int:
        """Find the host of a core; cores beyond the last count as cores of the last host."""
        return min(core // max(self.cpus // self.hosts, 1), self.hosts - 1)

    @property
    def device(self) -> str:
        """The kind of device on which models run: "gpu" or "cpu"."""
        return "gpu" if self.gpus else "cpu"


# The dtype that models compute in: `dtype="auto"` becomes bfloat16 if the device computes in it, else float32.

AUTO = "auto"
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
UNKNOWN_GPU = Precision("bfloat16", "GPUs are taken to compute in it; rg.cluster() asks them")
UNKNOWN_CPU = Precision("float32", "the cluster does not say whether its cores compute in bfloat16; rg.cluster() does")
ASKED = "dtype= says so"


def precision_of(model: Model, cluster: Cluster) -> Precision | None:
    """Choose the dtype that a model computes in on a cluster, with the reason; None for a model without a `dtype` setting."""
    asked = model.traits.dtype
    if asked is None:
        return None
    if asked != AUTO:
        return Precision(asked, ASKED)
    if cluster.gpus and model.pool.cpus is None:
        return cluster.gpu_precision or UNKNOWN_GPU
    return cluster.cpu_precision or UNKNOWN_CPU


def itemsize_of(model: Model | None, cluster: Cluster) -> int:
    """Count the bytes per element of the dtype that a model computes in."""
    precision = precision_of(model, cluster) if model is not None else None
    return ITEMSIZE.get(precision.dtype, 2) if precision is not None else 2
