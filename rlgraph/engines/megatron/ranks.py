"""The ranks of a model that Megatron-Core cuts: those that share matrices (tensor), rows of tokens (context) or layers (pipeline), or have
other sequences (data).

Neighbours share matrices, then rows, and the ranks of a stage come before those of the next: of 8 ranks with `tensor` and `pipeline` 2,
ranks 0 and 1 share the first layers, as 2 and 3 do for other sequences, and ranks 4 to 7 have the last layers. With `context` 2, ranks 0
and 2 have two halves of the same rows. Of a mixture the experts are shared by `expert` neighbours of a stage, whole ones, whatever else
these share.
"""

from typing import Any

import torch.distributed as dist

from rlgraph.errors import GraphError

ORDER = "tp-cp-ep-dp-pp"
_made: list[tuple[int, int, int, int]] = []  # Megatron-Core's groups are of a process, however many models it has


class MegatronRanks:
    """The place of one rank of `world`. `data` counts the ranks of a stage that have sequences of their own; those of `data_group` compute
    with the same parameters for other tokens.

    Raises GraphError where ranks are no multiple of those of a pass, or another model of this process is shared in another way.
    """

    def __init__(self, rank: int, world: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1, expert: int = 1) -> None:
        asked = tensor, context, pipeline, expert
        given = f"MegatronEngine(world={world}, {_name_setting(asked)})"
        for sharing in (tensor * context * pipeline, pipeline * expert):
            if world % sharing:
                raise GraphError(f"{given}: the ranks come in groups of {sharing}; give a multiple")
        if _made and _made[-1] != asked:
            raise GraphError(
                f"{given}: another model in these processes has {_name_setting(_made[-1])}, and Megatron-Core knows one way in a process; "
                "give both the same, or processes of their own"
            )
        from megatron.core import parallel_state as groups

        if not _made:
            experts = {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": 1}
            more = {"context_parallel_size": context, "order": ORDER, "create_gloo_process_groups": False}
            groups.initialize_model_parallel(tensor, pipeline, **more, **experts)
        _made.append(asked)
        stage = world // pipeline  # ranks of one
        self.world, self.tensor, self.context, self.pipeline, self.expert = world, tensor, context, pipeline, expert
        self.data = stage // (tensor * context)
        self.stage, of_stage = divmod(rank, stage)
        of_row, self.tensor_rank = divmod(of_stage, tensor)
        self.data_rank, self.context_rank = divmod(of_row, context)
        self.expert_data_rank, self.expert_rank = divmod(of_stage, expert)
        self.tensor_group: Any = groups.get_tensor_model_parallel_group()
        self.context_group: Any = groups.get_context_parallel_group()
        self.data_group: Any = groups.get_data_parallel_group(with_context_parallel=True)
        self.expert_data_group: Any = groups.get_expert_data_parallel_group()
        self.tied_group: Any = groups.get_embedding_group() if self.is_first or self.is_last else None

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
        """Whether this rank reports the scores of its tokens: it is one of those that computed the head."""
        return self.is_last and self.tensor_rank == 0

    def close(self) -> None:
        """Let go of Megatron-Core's groups, if no other model of this process has them."""
        _made.pop()
        if not _made and dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()


def _name_setting(asked: tuple[int, int, int, int]) -> str:
    return "tensor_parallel={}, context_parallel={}, pipeline_parallel={}, expert_parallel={}".format(*asked)
