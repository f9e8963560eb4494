"""A trained model: the base of policy, critic and reference, and the checks of its folder and its ranks."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

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
from rlgraph.settings import Count, Dtype, Named
from rlgraph.values.optimizers import Muon
from rlgraph.values.trainer import TrainerSettings

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
class TrainedModel(Model, TrainerSettings):
    """The base of policy, critic and reference: a Hugging Face folder, float32 master weights, `dtype` compute.

    It takes the fields of `TrainerSettings`, as far as its trainer does, and:

    * `trainer`: "fsdp" (FSDP2), "megatron" (Megatron-Core), for a teacher or a reference "vllm", or a `TrainerSpec` of your own.
      `scores`: its output for each token, "log_probs" or "values".
    * `dtype`: "auto" is bfloat16 if the device computes in it (a GPU of compute capability 8.0 or more, a CPU with AVX512-BF16 or
      AMX), else float32.
    * `data_parallel`: the number of data-parallel groups of processes. None: as many as the pool has GPUs for, one on the host.
    * `self_test`: checks at the start, on a small random model of the same architecture, that log-probs equal those of the model's own
      forward. It takes a second. A model that fails in every layout of batches is refused; one layout that fails is not used.
    """

    data_parallel: Count | None = None
    dtype: Dtype = "auto"
    router_replay: bool = field(default=False, init=False)  # a policy's alone
    self_test: bool = True
    trainer: Annotated[str | TrainerSpec, Named(TRAINERS.names, TrainerSpec)] = "fsdp"
    scores: ClassVar[Literal["log_probs", "values"]] = "log_probs"
    frozen: ClassVar[bool] = False  # whether it may be without an update

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload == "moments" and isinstance(self.optimizer, Muon):
            raise GraphError(
                f"{type(self).__name__}(optimizer=rg.optim.Muon(), offload='moments'): only AdamW's moments can be in host memory; "
                "leave out one"
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
    def traits(self) -> ModelTraits:
        settings = self.trainer_settings | {"fused_head": self.fuses_head if self.scores == "log_probs" else None}
        return ModelTraits(
            **settings,
            dtype=self.dtype,
            estimates=self.spec,
            frees_memory=self.spec.only_scores,
            shared_prompts=self.spec.shares_prompts and not self.exact,
            shares_base=self.spec.shares_base,
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
    from rlgraph.engines.hf.pretrained import check_model

    check_model(path, loadable=True)


def check_trained(model: TrainedModel) -> None:
    """Raise DataError for a folder without a model, or for a model whose log-probs here differ from those of its own forward, and
    GraphError for a model that its trainer is not offered for, or that its ranks cannot share.

    The families in `TESTED` have library tests of their own, so for them the workers' self-test, which runs during their start, is enough.
    """
    from rlgraph.engines.exact.rules import check_family, check_on_gpu
    from rlgraph.engines.hf.pretrained import check_model

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
    from rlgraph.engines.hf.pretrained import check_model

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
    from rlgraph.engines.hf.pretrained import check_model

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
