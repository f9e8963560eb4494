"""The cluster a graph is compiled for: counts only, nothing is looked up on a machine."""

from dataclasses import dataclass

from rlgraph.errors import PlanError


@dataclass(frozen=True)
class Precision:
    """What a device computes models in: "bfloat16" or "float32", and `why` in words."""

    dtype: str
    why: str


@dataclass(frozen=True)
class Cluster:
    """GPUs and host cores, of all hosts together. Without GPUs the pools run on the cores.

    `gpu` names the kind of GPU, as "H100": then times are estimated where none were measured. What is known of the memory of
    a GPU and of the host lets a plan that cannot fit be refused. `gpu_precision` and `cpu_precision` are what models with
    dtype="auto" compute in there; unless given, GPUs are taken to compute in bfloat16, cores in float32.

    A host has `gpus_per_node` GPUs, so GPUs say how many hosts there are at least; without GPUs `hosts` does, each with its
    part of the cores. Raises PlanError for counts below zero, or more hosts than cores.
    """

    gpus: int = 0
    cpus: int = 2
    gpus_per_node: int = 8
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    hosts: int = 1
    gpu_precision: Precision | None = None
    cpu_precision: Precision | None = None

    def __post_init__(self) -> None:
        for name, count, least in (
            ("gpus", self.gpus, 0),
            ("cpus", self.cpus, 1),
            ("gpus_per_node", self.gpus_per_node, 1),
            ("hosts", self.hosts, 1),
        ):
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise PlanError(f"Cluster({name}={count!r}): {name} is a whole number of at least {least}")
        for name, size in (("gpu_memory_bytes", self.gpu_memory_bytes), ("host_memory_bytes", self.host_memory_bytes)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise PlanError(f"Cluster({name}={size!r}): {name} is a whole number of bytes above 0, or None where it is not known")
        if self.gpus:
            object.__setattr__(self, "hosts", max(self.hosts, -(-self.gpus // self.gpus_per_node)))
        if self.hosts > max(self.cpus, self.gpus):
            raise PlanError(f"Cluster(hosts={self.hosts}, cpus={self.cpus}): each host has at least one core; give the cores of all hosts")

    def host_of_gpu(self, gpu: int) -> int:
        return gpu // self.gpus_per_node

    def host_of_core(self, core: int) -> int:
        """Return the host of a core; cores beyond the last are shared by the operating system of the last host."""
        return min(core // max(self.cpus // self.hosts, 1), self.hosts - 1)

    @property
    def device(self) -> str:
        return "gpu" if self.gpus else "cpu"
