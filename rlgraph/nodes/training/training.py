"""What policy and critic share: how a model is trained, and the node that trains it on a batch."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rlgraph.columns import Columns
from rlgraph.engines.api import Loss
from rlgraph.engines.fsdp.adamw import AdamW
from rlgraph.engines.registry import TRAINERS, TrainerSpec, trainer_of
from rlgraph.errors import GraphError, shown
from rlgraph.graph.nodes import Model, Node, Output, declare
from rlgraph.graph.operation import ModelTraits, NodeTraits, Operation
from rlgraph.kinds import Named
from rlgraph.nodes.base import Context, Fired, Stage
from rlgraph.nodes.training.guards import Guards, UpdateGuard
from rlgraph.nodes.training.mini_batches import UpdateSchedule
from rlgraph.settings import Count, Dtype

TOKENS = ("prompts", "prompt_mask", "responses", "response_mask")
DEFAULT_GUARDS = Guards()
TESTED = frozenset(  # by tests/engines/test_families.py
    ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3")
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedModel(Model):
    """What policy, critic and reference share: a Hugging Face folder, float32 master weights, `dtype` compute.

    `trainer` is "fsdp" (FSDP2), or a `TrainerSpec` of your own. `scores` is what it gives each token: "log_probs" or "values".

    `dtype` "auto" is bfloat16 where the device computes in it (a GPU of compute capability 8.0 or more, a CPU with AVX512-BF16 or AMX),
    else float32.

    `micro_batch_tokens` bounds what is in memory at once; the result does not depend on it. `ranks` is the number of
    data-parallel processes (None: one for each GPU of the pool, one on the host). `recompute` keeps only the input of each
    layer for the backward pass: less memory, a third more time. `compiled` fuses the kernels of each layer, at a slower start.
    `self_test` tries at the start, on a small random model of the same making, whether log-probs are those of the model's own forward;
    it takes a second, refuses a model of which they are not, and leaves out a layout of batches in which they are not.
    """

    optimizer: AdamW = field(default_factory=AdamW)
    data_parallel: Count | None = None
    micro_batch_tokens: Count = 16384
    dtype: Dtype = "auto"
    recompute: bool = False
    compiled: bool = False
    self_test: bool = True
    trainer: Annotated[str | TrainerSpec, Named(TRAINERS.names, TrainerSpec)] = "fsdp"
    scores: ClassVar[Literal["log_probs", "values"]] = "log_probs"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_spec", trainer_of(self))

    @property
    def spec(self) -> TrainerSpec:
        """What the trainer loads, takes and needs; it goes to the workers with the model."""
        return self._spec  # type: ignore[attr-defined]

    @property
    def ranks(self) -> int | None:
        return self.data_parallel

    @property
    def traits(self) -> ModelTraits:
        tokens = self.micro_batch_tokens
        return ModelTraits(dtype=self.dtype, estimates=self.spec, micro_batch_tokens=tokens, recompute=self.recompute)

    def load(self, context: Any) -> Any:
        return self.spec.load(self, context)


@dataclass(frozen=True)
class Update:
    """What an update gives: new weights for a feedback edge, and the metrics of the step."""

    weights: Output
    metrics: Output


@dataclass(frozen=True, eq=False, kw_only=True)
class Training(Operation):
    """The optimizer steps of a model on a batch. Policy and critic say what of it they learn from, and what they tell of it."""

    model: TrainedModel
    loss: Loss
    schedule: UpdateSchedule
    guards: Guards
    name: str

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="train", epochs=self.schedule.epochs, mini_batches=self.schedule.mini_batches, given=(self.loss,))

    def declare(self, inputs: Sequence[Output], reads: Sequence[str]) -> Update:
        """Declare the node; a column may be named twice."""
        node = declare(self.name, self, inputs, reads=tuple(dict.fromkeys(reads)), writes=(), model=self.model)
        return Update(Output(node, "weights"), Output(node, "metrics"))

    def check(self, node: Node) -> None:
        check_trained(self.model)

    def start(self, context: Context) -> Stage:
        guard = UpdateGuard(self.name, self.guards)
        return lambda step, columns: self.fire(context, guard, step, columns)

    @abstractmethod
    def fire(self, context: Context, guard: UpdateGuard, step: int, columns: Columns) -> Fired:
        """Train on the batch of a step, and return metrics."""

    def learn(self, context: Context, guard: UpdateGuard, batch: Columns, **settings: float) -> dict[str, float]:
        """Take the optimizer steps on a batch, each with the settings, unless the guards refuse it; give their metrics."""
        if not guard.batch(batch):
            return {}
        if self.schedule.mini_batches > 1:
            guard.found["guards/empty_mini_batches"] = float(self.schedule.empty(batch))
        return self.schedule.update(context.engine, batch, self.loss, guard=guard, **settings)


def check_folder(path: str) -> None:
    """Raise DataError for a folder that holds no model that can be loaded."""
    from rlgraph.engines.hf_models.pretrained import check_model

    check_model(path, loadable=True)


def check_trained(model: TrainedModel) -> None:
    """Raise DataError for a folder that holds no model, or one whose log-probs rlgraph does not compute as its own forward does.

    Families that the library's own tests hold are left to the test of the workers, which runs beside their start.
    """
    from rlgraph.engines.hf_models.pretrained import check_model

    if check_model(model.path).model_type not in TESTED and model.self_test:
        _check_computed(model.path, (Path(model.path) / "config.json").read_text())


@functools.cache
def _check_computed(path: str, config: str) -> None:
    from rlgraph.engines.forward.self_test import trainer_layout

    trainer_layout(path, flat=False)


def check_loss(name: str, loss: object) -> None:
    """Raise GraphError for what is no loss object."""
    if not callable(loss) or isinstance(loss, type) or not hasattr(loss, "reads"):
        raise GraphError(f"node '{name}' has loss={shown(loss)}; pass a loss object, as loss=rg.ClippedLoss()")
