"""The ranks of a model that Megatron-Core cuts: those that share matrices (tensor) or layers (pipeline), or have other sequences (data).

Neighbours share matrices, then layers: of 8 ranks with `tensor` and `pipeline` 2, ranks 0 and 1 have the first layers, ranks 2 and 3 the
last, and ranks 4 to 7 do the same for other sequences.
"""

from typing import Any

import torch.distributed as dist

from rlgraph.errors import GraphError

ORDER = "tp-cp-ep-pp-dp"
_made: list[tuple[int, int]] = []  # Megatron-Core's groups are of a process, however many models it has


class Ranks:
    """The place of one rank of `world`. Raises GraphError where ranks are no multiple of those of a pass, or another model of this process
    is shared in another way."""

    def __init__(self, rank: int, world: int, *, tensor: int = 1, pipeline: int = 1) -> None:
        sharing = tensor * pipeline
        given = f"MegatronEngine(world={world}, tensor_parallel={tensor}, pipeline_parallel={pipeline})"
        if world % sharing:
            raise GraphError(f"{given}: the ranks come in groups of {sharing}; give a multiple")
        if _made and _made[-1] != (tensor, pipeline):
            raise GraphError(
                f"{given}: another model in these processes has tensor_parallel={_made[-1][0]}, pipeline_parallel={_made[-1][1]}, and "
                "Megatron-Core knows one way in a process; give both the same, or pools of their own"
            )
        from megatron.core import parallel_state

        if not _made:
            parallel_state.initialize_model_parallel(tensor, pipeline, order=ORDER, create_gloo_process_groups=False)
        _made.append((tensor, pipeline))
        self.world, self.tensor, self.pipeline, self.data = world, tensor, pipeline, world // sharing
        self.tensor_rank, self.stage, self.data_rank = rank % tensor, rank // tensor % pipeline, rank // sharing
        self.tensor_group: Any = parallel_state.get_tensor_model_parallel_group()
        self.data_group: Any = parallel_state.get_data_parallel_group()
        self.tied_group: Any = parallel_state.get_embedding_group() if self.is_first or self.is_last else None

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.stage == self.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank tells what its pass gave: one of those that computed the head."""
        return self.is_last and self.tensor_rank == 0

    def close(self) -> None:
        """Let go of Megatron-Core's groups, if no other model of this process has them."""
        _made.pop()
        if not _made and dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
