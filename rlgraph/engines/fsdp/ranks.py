"""The ranks of a model: which share its matrices (tensor), which a row of tokens (context), and which have batches of their own (data)."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.errors import GraphError


class Ranks:
    """The place of one rank of `world`. Neighbours share matrices, then rows of tokens: of 8 with `tensor` and `context` 2, ranks 0 and 1
    share matrices, ranks 0 and 2 a row, and ranks 0 to 3 compute what 4 to 7 do for other sequences. Of those that share a row `ring` pass
    keys round (`ring_group`); neighbours among them exchange tokens for heads (`heads_group`).

    `sharded` is the mesh over which FSDP shards parameters: all ranks that share no matrices. `matrices` is the mesh of these ("fsdp") and
    of the ranks that share matrices ("tp"). Groups and meshes are None for a size of 1.
    Of a mixture `expert` neighbours hold experts of their own: of 4 with `expert` 2, ranks 0 and 1 hold all experts together, and ranks 0
    and 2 the same ones. `experts` is their mesh, of ranks that hold the same experts ("fsdp") and of those that hold all ("ep").
    Raises GraphError where the ranks are no multiple of `tensor` × `context`, or of `expert`.
    """

    def __init__(self, device: str, rank: int, world: int, *, tensor: int = 1, context: int = 1, ring: int = 1, expert: int = 1) -> None:
        if world % expert or expert > 1 < tensor * context:
            raise GraphError(
                f"FsdpEngine(world={world}, tensor_parallel={tensor}, context_parallel={context}, expert_parallel={expert}): experts are "
                f"shared in groups of {expert} ranks, each with passes of its own; give a multiple, and leave out the others"
            )
        if world % (tensor * context):
            raise GraphError(
                f"FsdpEngine(world={world}, tensor_parallel={tensor}, context_parallel={context}): the ranks come in groups of "
                f"{tensor * context}; give a multiple"
            )
        self.ring = ring
        self.tensor, self.context, self.data = tensor, context, world // (tensor * context)
        self.data_rank, self.context_rank = rank // (tensor * context), rank // tensor % context
        numbers = torch.arange(world)
        self.matrices: DeviceMesh | None = None
        if tensor > 1:
            self.matrices = DeviceMesh(device, numbers.view(-1, tensor), mesh_dim_names=("fsdp", "tp"))
            self.sharded = self.matrices["fsdp"]
        else:
            self.sharded = DeviceMesh(device, numbers)
        self.experts: DeviceMesh | None = None
        if expert > 1:
            self.experts = DeviceMesh(device, numbers.view(-1, expert), mesh_dim_names=("fsdp", "ep"))
        self.context_group: Any = None
        self.data_group: Any = self.sharded.get_group()
        if context > 1:
            shape = (self.data, context, tensor)
            mesh = DeviceMesh(device, numbers.view(shape), mesh_dim_names=("dp", "cp", "tp"))
            self.context_group, self.data_group = mesh["cp"].get_group(), mesh["dp"].get_group()
        self.ring_group: Any = None
        self.heads_group: Any = None
        if ring > 1:
            places = numbers.view(self.data, ring, context // ring, tensor)
            mesh = DeviceMesh(device, places, mesh_dim_names=("dp", "ring", "heads", "tp"))
            self.ring_group = mesh["ring"].get_group()
            self.heads_group = mesh["heads"].get_group() if ring < context else None

    @property
    def sharing(self) -> int:
        """The number of ranks that compute one pass together."""
        return self.tensor * self.context
