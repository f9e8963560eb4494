"""Tools: what a rollout may call between turns, and the host pool that it runs on."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlgraph.errors import GraphError
from rlgraph.graph import Pool


@dataclass(frozen=True)
class Tool:
    """Something a model may call by name."""

    name: str


python = Tool("python")


@dataclass(frozen=True, eq=False)
class Tools:
    """Tools on a pool of host cores, as `Tools([rg.tools.python], pool=rg.Pool("sandbox", cpus=32))`."""

    tools: Sequence[Tool]
    pool: Pool

    def __post_init__(self) -> None:
        if not self.tools:
            raise GraphError("Tools([]) has no tool; pass at least one, as Tools([rg.tools.python], pool=...)")
        if self.pool.cpus is None:
            raise GraphError(
                f"tools are on pool '{self.pool.name}', which is of GPUs; tools run on host cores: Pool('{self.pool.name}', cpus=n)"
            )
