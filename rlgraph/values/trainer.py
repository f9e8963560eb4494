"""How a trainer computes: the settings that a trained model, its traits, its part of a plan and its engine carry whole."""

from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, Literal

from rlgraph.notices import old_attribute
from rlgraph.settings import AtLeastZero, Count, Recompute
from rlgraph.values.lora import LoRA
from rlgraph.values.optimizers import AdamW, Muon

ADAMW = AdamW()  # one for all: traits are made often, and an optimizer checks its values


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """How a trainer computes. `rg.Policy`, `Critic` and `Reference` accept each field, and a trainer lists the fields that it supports.

    * `optimizer`: `rg.AdamW(…)` or `rg.optim.Muon(…)`; it also sets the precision of the optimizer's moments.
    * `micro_batch_tokens`: the most tokens per micro-batch and process. It bounds memory; the result does not depend on it.
    * `tensor_parallel`: the processes per group that share the matrices of each layer, according to the model's tensor-parallel plan.
    * `context_parallel`: the processes per group that share the tokens of a micro-batch; each has at most `micro_batch_tokens` of them.
    * `pipeline_parallel`: the processes per group that share the layers, in equal numbers; several micro-batches are in flight.
    * `expert_parallel`: the processes with the same layers that share the experts of a mixture, each expert on one of them.
    * `recompute`: True keeps only the input of each layer for the backward pass, and needs a third more time. "selective" also keeps
      the tensors that are most expensive to recompute per byte, above all attention outputs. It keeps a quarter of a layer's
      activations, for half of the extra time or less. False keeps all. See docs/memory.md.
    * `fused_head`: computes logits in blocks of tokens, and again in the backward pass, so that the logits of a whole micro-batch
      are never in memory. It costs one more matmul with the head. None: on if `recompute` is. Without training it is always on,
      at no cost.
    * `offload`: "moments" keeps AdamW's moments in host memory, 8 bytes per parameter, and moves one parameter's moments at a time to
      the GPU during an optimizer step. The result is bit-identical. "never" leaves the moments on the GPU while other models use it, if
      they fit. None moves them to the host meanwhile. Both need GPUs.
    * `compiled`: fuses the kernels of each layer with torch.compile; the first step is slower.
    * `load_balance`: the weight of the loss that balances the experts of a mixture, e.g. 0.001; 0 leaves it out.
    * `router_replay`: computes with the experts in the columns `prompt_routes` and `routes` of a batch, if it has them.
    * `adapter`: `rg.LoRA(rank=…)` trains and publishes low-rank matrices, and leaves the model's weights unchanged. None: full training.
    * `train_vision`: of a model that reads images, trains the part that makes features of them too, tower and projector, and publishes
      it; an `adapter` then adapts this part as well. False leaves it as the folder has it.
    * `exact`: makes log-probs bit-identical to the engine `vllm`, and checks some tokens of each step before its update. It requires
      depth 0, and pools of one core with `dtype="float32"` or Hopper GPUs with `dtype="bfloat16"`.

    >>> TrainerSettings(recompute="selective", tensor_parallel=2).ranks_per_pass
    2
    """

    optimizer: AdamW = ADAMW
    micro_batch_tokens: Count = 16384
    tensor_parallel: Count = 1
    context_parallel: Count = 1
    pipeline_parallel: Count = 1
    expert_parallel: Count = 1
    recompute: Recompute = False
    fused_head: bool | None = None
    offload: Literal["moments", "never"] | None = None
    compiled: bool = False
    load_balance: AtLeastZero = 0.0
    router_replay: bool = False
    adapter: LoRA | None = None
    train_vision: bool = False
    exact: bool = False

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """The fields of this class by name, also of what is derived from it."""
        names = setting_names()
        return dict(zip(names, attrgetter(*names)(self), strict=True))

    @property
    def ranks_per_pass(self) -> int:
        """The workers that compute one pass together."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    sharing = old_attribute("sharing", "ranks_per_pass")

    @property
    def fuses_head(self) -> bool:
        """Whether logits are computed again in the backward pass: as `fused_head` says, or else if activations are."""
        return bool(self.recompute) if self.fused_head is None else self.fused_head

    @property
    def host_moments(self) -> bool:
        """Whether the moments of the optimizer are in host memory while it trains."""
        return self.offload == "moments"

    @property
    def moments_stay(self) -> bool:
        """Whether they stay on the GPU while other models have it."""
        return self.offload == "never"

    @property
    def one_moment(self) -> bool:
        """Whether the optimizer keeps one moment of each matrix of a layer, as Muon does."""
        return isinstance(self.optimizer, Muon)


@cache
def setting_names() -> tuple[str, ...]:
    """List the settings of trainers."""
    return tuple(field.name for field in fields(TrainerSettings))
