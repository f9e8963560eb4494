"""A trained model: the base of policy, critic and reference, and the checks of its folder and its ranks."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rlgraph.engines.optim import AdamW, Muon
from rlgraph.engines.registry import TRAINERS, TrainerSpec, trainer_of
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Model, Node
from rlgraph.graph.operation import ModelTraits, NodeTraits, Operation
from rlgraph.nodes.rollout.fitting import check_rotation
from rlgraph.nodes.training.compatibility import (
    check_adapter,
    check_adapter_folder,
    check_eight_bits,
    check_exact_settings,
    check_installed,
    check_replay,
    check_replay_folder,
    check_vocabulary,
    writers,
)
from rlgraph.settings import AtLeastZero, Count, Dtype, Named, Recompute
from rlgraph.values.lora import LoRA

TOKENS = ("prompts", "prompt_mask", "responses", "response_mask")
TESTED = frozenset(  # by tests/engines/test_families.py
    (
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "granite",
        "smollm3",
        "olmoe",
        "gemma3",
    )
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedModel(Model):
    """The base of policy, critic and reference: a Hugging Face folder, float32 master weights, `dtype` compute.

    * `trainer`: "fsdp" (FSDP2), "megatron" (Megatron-Core), for a teacher or a reference "vllm", or a `TrainerSpec` of your own.
      `scores`: its output for each token, "log_probs" or "values".
    * `dtype`: "auto" is bfloat16 if the device computes in it (a GPU of compute capability 8.0 or more, a CPU with AVX512-BF16 or
      AMX), else float32.
    * `micro_batch_tokens`: the most tokens in memory at once. The result does not depend on it.
    * `data_parallel`: the number of data-parallel groups of processes. None: as many as the pool has GPUs for, one on the host.
    * `tensor_parallel`: the processes of a group that share the matrices of each layer, by the model's own plan.
    * `context_parallel`: the processes of a group that share the tokens of a pass; each has at most `micro_batch_tokens` of them.
    * `pipeline_parallel`: the processes of a group that share the layers, of which each has as many; several passes are under way.
    * `expert_parallel`: the processes with the same layers that share the experts of a mixture, whole ones; others hold the same experts.
    * `recompute`: True keeps only the input of each layer for the backward pass, and takes a third more time. "selective" keeps also
      what costs most for its bytes, the results of attention and of its products: a quarter of what a layer keeps otherwise, for half of
      that time or, with long sequences, less. See docs/models.md.
    * `fused_head`: computes the logits of some tokens at a time, and in the backward pass again, so that those of all tokens of a pass
      are never in memory. It takes one more product with the head. None: if it recomputes. Without training it costs nothing and is
      always so.
    * `offload`: "moments" keeps AdamW's moments in host memory, 8 bytes a parameter, and brings those of one parameter at a time to the
      GPU in an optimizer step. The step has the same bits. "never" leaves them on the GPU while other models of the pool have it, where
      memory suffices; None takes them to the host meanwhile. Both are for GPUs.
    * `compiled`: fuses the kernels of each layer, at a slower start.
    * `load_balance`: the weight of the loss that balances the experts of a mixture, as 0.001; 0 leaves it out.
    * `adapter`: `rg.LoRA(rank=…)` trains and publishes low-rank matrices, and leaves the model itself as it is.
    * `exact`: computes the log-probs of the engine `vllm` to the bit, and checks some tokens of each step before its update. It is for
      depth 0, on pools of one core with `dtype="float32"` or on Hopper GPUs with `dtype="bfloat16"`.
    * `self_test`: checks at the start, on a small random model of the same architecture, that log-probs equal those of the model's own
      forward. It takes a second. A model that fails in every layout of batches is refused; one layout that fails is not used.
    """

    optimizer: AdamW = field(default_factory=AdamW)
    data_parallel: Count | None = None
    tensor_parallel: Count = 1
    context_parallel: Count = 1
    pipeline_parallel: Count = 1
    expert_parallel: Count = 1
    micro_batch_tokens: Count = 16384
    dtype: Dtype = "auto"
    recompute: Recompute = False
    fused_head: bool | None = None
    offload: Literal["moments", "never"] | None = None
    compiled: bool = False
    load_balance: AtLeastZero = 0.0
    router_replay: bool = field(default=False, init=False)  # a policy's alone
    adapter: LoRA | None = None
    exact: bool = False
    self_test: bool = True
    trainer: Annotated[str | TrainerSpec, Named(TRAINERS.names, TrainerSpec)] = "fsdp"
    scores: ClassVar[Literal["log_probs", "values"]] = "log_probs"
    frozen: ClassVar[bool] = False  # whether it may be without an update

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload == "moments" and isinstance(self.optimizer, Muon):
            raise GraphError(
                f"{type(self).__name__}(optimizer=rg.Muon(), offload='moments'): only AdamW's moments can be in host memory; leave out one"
            )
        if self.optimizer.moments == "8bit":
            check_eight_bits(self)
        if self.adapter is not None:
            check_adapter(self)
        if self.exact:
            check_exact_settings(self)
        if self.expert_parallel > 1 and self.compiled:
            raise GraphError(
                f"{type(self).__name__}(expert_parallel={self.expert_parallel}, compiled=True): layers whose experts ranks share are not "
                "compiled; leave out compiled"
            )
        if self.tensor_parallel > 1 and self.context_parallel > 1 and self.compiled:
            raise GraphError(
                f"{type(self).__name__}(tensor_parallel={self.tensor_parallel}, context_parallel={self.context_parallel}, compiled=True): "
                "layers of which ranks share both matrices and rows are not compiled; leave out compiled, or one of the two"
            )
        if self.load_balance and (self.compiled or self.tensor_parallel > 1 or self.context_parallel > 1):
            raise GraphError(
                f"{type(self).__name__}(load_balance={self.load_balance}): layers that are compiled, or that ranks share, do not "
                "tell what their routers chose; leave out load_balance, or compiled, tensor_parallel and context_parallel"
            )
        check_replay(self)
        object.__setattr__(self, "_spec", trainer_of(self))
        stage = (self.data_parallel or 0) * self.tensor_parallel * self.context_parallel
        if stage % self.expert_parallel:
            raise GraphError(
                f"{type(self).__name__}(data_parallel={self.data_parallel}, tensor_parallel={self.tensor_parallel}, context_parallel="
                f"{self.context_parallel}, expert_parallel={self.expert_parallel}): {stage} processes have the same layers, of which "
                f"{self.expert_parallel} share experts; choose numbers that divide"
            )
        if self.spec.only_scores:
            self._check_scorer()

    def _check_scorer(self) -> None:
        """Raise GraphError for what an engine that only scores cannot do."""
        name = self.spec.name
        if not self.frozen:
            raise GraphError(f"{type(self).__name__}(trainer='{name}'): it only scores, for rg.Teacher and rg.Reference; leave out trainer")
        if self.data_parallel not in (None, 1):
            raise GraphError(
                f"{type(self).__name__}(trainer='{name}', data_parallel={self.data_parallel}): it is one process; leave it out"
            )

    @property
    def spec(self) -> TrainerSpec:
        """The spec of the trainer that `trainer` names or is. It travels to the workers with the model."""
        return self._spec  # type: ignore[attr-defined]

    @property
    def ranks(self) -> int | None:
        if self.spec.only_scores or (self.adapter is not None and self.adapter.base is not None):
            return 1
        return None if self.data_parallel is None else self.data_parallel * self.traits.sharing

    @property
    def fuses_head(self) -> bool:
        """Whether logits are computed again in the backward pass: as `fused_head` says, or else if activations are."""
        return bool(self.recompute) if self.fused_head is None else self.fused_head

    @property
    def traits(self) -> ModelTraits:
        tokens = self.micro_batch_tokens
        return ModelTraits(
            dtype=self.dtype,
            estimates=self.spec,
            frees_memory=self.spec.only_scores,
            micro_batch_tokens=tokens,
            recompute=self.recompute,
            compiled=self.compiled,
            host_moments=self.offload == "moments",
            moments_stay=self.offload == "never",
            shared_prompts=self.spec.shares_prompts and not self.exact,
            fused_head=self.fuses_head if self.scores == "log_probs" else None,
            one_moment=isinstance(self.optimizer, Muon),
            moments=self.optimizer.moments,
            adapter=self.adapter,
            shares_base=self.spec.shares_base,
            exact=self.exact,
            tensor_parallel=self.tensor_parallel,
            context_parallel=self.context_parallel,
            pipeline_parallel=self.pipeline_parallel,
            expert_parallel=self.expert_parallel,
            any_vocabulary=self.spec.any_vocabulary,
            any_heads=self.spec.any_heads,
            prepare=self.spec.prepare,
        )

    def load(self, context: Any) -> Any:
        return self.spec.load(self, context)


@dataclass(frozen=True, eq=False)
class ModelScores(Operation):
    """The base of nodes that score responses by a pass of a trained model without gradients."""

    model: TrainedModel

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="forward", by_group=True)

    def check(self, node: Node) -> None:
        check_trained(self.model)
        check_vocabulary(node)
        check_rows_fit(node, self.model)
        check_rotary_factors(node, self.model)


def check_folder(path: str) -> None:
    """Raise DataError for a folder without a model that can be loaded."""
    from rlgraph.engines.hf_models.pretrained import check_model

    check_model(path, loadable=True)


def check_trained(model: TrainedModel) -> None:
    """Raise DataError for a folder without a model, or for a model whose log-probs here differ from those of its own forward, and
    GraphError for a model that its trainer is not offered for, or that its ranks cannot share.

    The families in `TESTED` have library tests of their own, so for them the workers' self-test, which runs during their start, is enough.
    """
    from rlgraph.engines.exact.rules import check_family, check_on_gpu
    from rlgraph.engines.hf_models.pretrained import check_model

    model.spec.check(model)
    check_installed(model)
    check_replay_folder(model)
    if model.adapter is not None:
        check_adapter_folder(model, check_model(model.path))
    if model.exact:
        check_family(model.path, check_model(model.path).model_type)
        if model.dtype != "float32":
            check_on_gpu(model.path)
    if check_model(model.path, loadable=True).model_type not in TESTED and model.self_test:
        _check_computed(model.path, (Path(model.path) / "config.json").read_text())


@functools.cache
def _check_computed(path: str, config: str) -> None:
    from rlgraph.engines.forward.self_test import trainer_layout

    trainer_layout(path, flat=False)


def check_whole_vocabulary(name: str, model: TrainedModel) -> None:
    """Raise GraphError for a trainer, or for ranks that share passes, that do not compute the log-probs of several tokens at a position."""
    if not model.spec.whole_vocabulary:
        raise GraphError(
            f"node '{name}' needs log-probs of several tokens at each position, which trainer='{model.spec.name}' does not give: leave out "
            "trainer, or distil by the sampled token"
        )
    if model.tensor_parallel > 1 or model.context_parallel > 1:
        raise GraphError(
            f"node '{name}' needs log-probs of several tokens at each position, which ranks that share a pass do not give: leave out "
            f"tensor_parallel={model.tensor_parallel} and context_parallel={model.context_parallel}, or distil by the sampled token"
        )


def check_rows_fit(node: Node, model: TrainedModel) -> None:
    """Raise GraphError for an engine that only scores and has less room for a row than the generator that writes it."""
    from rlgraph.engines.hf_models.pretrained import check_model

    if not model.spec.only_scores:
        return
    room = model.traits.max_context or check_model(model.path).context_length
    for writer in (output.node for output in node.inputs if output.node.traits.work == "generate"):
        most = writer.model and (writer.model.traits.max_context or check_model(writer.model.path).context_length)
        if most and most > room:
            raise GraphError(
                f"node '{node.name}' scores rows of '{writer.name}', which may have {most} tokens, but its model has room for {room}: "
                "raise its max_context= as far as the model's own bound, or lower that of the generator"
            )


def check_rotary_factors(node: Node, model: TrainedModel) -> None:
    """Raise GraphError for rows that are so long that the model's rotary factors depend on the rows beside them.

    Rows that are no generator's are checked as they arrive.
    """
    from rlgraph.engines.hf_models.pretrained import check_model

    for writer in writers(node):
        if writer.model is not None and writer.traits.work == "generate":
            most = writer.model.traits.max_context or check_model(writer.model.path).context_length
            check_rotation(f"node '{node.name}' reads", model.path, most)
    if model.spec.only_scores:  # an engine that chooses factors by its own room for rows
        room = model.traits.max_context or check_model(model.path).context_length
        check_rotation(f"node '{node.name}' has room for", model.path, room, room=f"{type(model).__name__}(max_context=)")


def check_scored(name: str, model: TrainedModel, temperature: float, top_k: int | None = 1) -> None:
    """Raise GraphError for scores that an engine that only scores does not give."""
    if not model.spec.only_scores:
        return
    if temperature != 1.0:
        raise GraphError(
            f"node '{name}' scores responses that are sampled at temperature {temperature}, but trainer='{model.spec.name}' gives those of "
            "temperature 1; sample at 1, or leave out trainer"
        )
    if top_k is None:
        raise GraphError(
            f"node '{name}' has top_k=None, but trainer='{model.spec.name}' gives some tokens of the vocabulary; give top_k, as top_k=64"
        )
