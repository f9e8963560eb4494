"""The cluster a graph is compiled for: counts only, nothing is looked up on a machine."""

from dataclasses import dataclass

from rlgraph.errors import PlanError


@dataclass(frozen=True)
class Cluster:
    """GPUs and host cores. Without GPUs the pools run on the cores.

    Raises PlanError for counts below zero, or a cluster with neither.
    """

    gpus: int = 0
    cpus: int = 2
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name, count, least in (("gpus", self.gpus, 0), ("cpus", self.cpus, 1), ("gpus_per_node", self.gpus_per_node, 1)):
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise PlanError(f"Cluster({name}={count!r}): {name} is a whole number of at least {least}")

    @property
    def device(self) -> str:
        return "gpu" if self.gpus else "cpu"
