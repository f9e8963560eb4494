"""A pool: the devices that nodes time-share."""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from rlgraph import settings
from rlgraph.errors import GraphError
from rlgraph.settings import Name, Range

Exact: TypeAlias = Annotated[int, Range(least=1, rule="an exact count, a whole number of at least 1")]


@settings.refuse_unknown
@dataclass(frozen=True)
class Pool:
    """Devices that nodes time-share. Nodes of one pool never run at the same time; nodes of two pools overlap.

        >>> rollout, train = Pool("rollout", share=1), Pool("train", share=3)  # a quarter and three quarters of the GPUs
        >>> sandbox = Pool("sandbox", cpus=8)
        >>> sandbox.cpus
        8

    Raises GraphError for a share or a count that is not positive, an empty name, or two of `share`, `gpus` and `cpus`.

    * `name`: its name in plans, pictures and errors.
    * `share`: its share of the cluster's GPUs relative to the other pools; None lets the compiler choose. Without GPUs, shares
      divide the cores.
    * `gpus`: an exact number of GPUs, instead of `share`.
    * `cpus`: an exact number of host cores, for a pool without GPUs.
    """

    name: Name
    share: Annotated[float, Range(above=0, rule="a positive number, or None to let the compiler choose")] | None = 1
    gpus: Exact | None = None
    cpus: Exact | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        if self.gpus is not None and self.cpus is not None:
            raise GraphError(f"pool '{self.name}' has both gpus={self.gpus} and cpus={self.cpus}; a pool is of one kind: make two pools")
        if self.share != 1 and (self.gpus is not None or self.cpus is not None):
            raise GraphError(f"pool '{self.name}' has a share and an exact count; set one of them")
