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
    """How a trainer computes. `rg.Policy`, `Critic` and `Reference` take each field, and a trainer lists those that it takes.

    * `optimizer`: `rg.AdamW(…)` or `rg.optim.Muon(…)`, which also says how many bits a number of its moments has.
    * `micro_batch_tokens`: the most tokens in memory at once. The result does not depend on it.
    * `tensor_parallel`: the processes of a group that share the matrices of each layer, by the model's own plan.
    * `context_parallel`: the processes of a group that share the tokens of a pass; each has at most `micro_batch_tokens` of them.
    * `pipeline_parallel`: the processes of a group that share the layers, of which each has as many; several passes are under way.
    * `expert_parallel`: the processes with the same layers that share the experts of a mixture, whole ones; others hold the same experts.
    * `recompute`: True keeps only the input of each layer for the backward pass, and takes a third more time. "selective" keeps also
      what costs most for its bytes, the results of attention and of its products: a quarter of what a layer keeps otherwise, for half of
      that time or, with long sequences, less. See docs/memory.md.
    * `fused_head`: computes the logits of some tokens at a time, and in the backward pass again, so that those of all tokens of a pass
      are never in memory. It takes one more product with the head. None: if it recomputes. Without training it costs nothing and is
      always so.
    * `offload`: "moments" keeps AdamW's moments in host memory, 8 bytes a parameter, and brings those of one parameter at a time to the
      GPU in an optimizer step. The step has the same bits. "never" leaves them on the GPU while other models of the pool have it, where
      memory suffices; None takes them to the host meanwhile. Both are for GPUs.
    * `compiled`: fuses the kernels of each layer, at a slower start.
    * `load_balance`: the weight of the loss that balances the experts of a mixture, as 0.001; 0 leaves it out.
    * `router_replay`: computes with the experts that a batch's columns `prompt_routes` and `routes` name, where it has them.
    * `adapter`: `rg.LoRA(rank=…)` trains and publishes low-rank matrices, and leaves the model itself as it is.
    * `exact`: computes the log-probs of the engine `vllm` to the bit, and checks some tokens of each step before its update. It is for
      depth 0, on pools of one core with `dtype="float32"` or on Hopper GPUs with `dtype="bfloat16"`.

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
