"""A trained model: the base of policy, critic and reference, and the checks of its folder, its ranks and its settings.

Settings that exclude each other: exact log-probs, adapters, low bits, router replay, other vocabularies.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch

from rlgraph.columns import Columns, rows_of
from rlgraph.engines.hf.image_costs import tower_of_folder
from rlgraph.engines.hf.images import FAMILIES as FAMILIES_WITH_IMAGES
from rlgraph.engines.hf.images import check_sees
from rlgraph.engines.hf.pretrained import ModelSummary
from rlgraph.engines.precision import INSTALL, is_installed
from rlgraph.engines.registry import TRAINERS, TrainerSpec, exactness, trainer_of
from rlgraph.errors import CertificateError, DataError, GraphError
from rlgraph.graph.nodes import Model, Node, Operation, Output
from rlgraph.graph.rules import EXACT_DTYPES
from rlgraph.graph.traits import ModelTraits, NodeTraits
from rlgraph.nodes.base import list_columns, tensor_of
from rlgraph.nodes.examples import Examples, Stepwise
from rlgraph.nodes.rollout.decode_loop import ROUTES, check_routes
from rlgraph.nodes.rollout.fitting import check_rotation
from rlgraph.plan.model_shapes import PROJECTIONS
from rlgraph.settings import Count, Dtype, OneOf
from rlgraph.values.lora import ALL_LINEAR, FAMILIES, LoRA
from rlgraph.values.optimizers import Muon
from rlgraph.values.trainer import TrainerSettings

# A policy whose log-probs are bit-identical to the engine's: its allowed settings, and a check of some rows in each step.

CHECKED = 4  # rows of a step


def check_exact_settings(model: Any) -> None:
    """Raise GraphError for settings that are not proven to be exact."""
    where = f"{type(model).__name__}(exact=True"
    if model.dtype not in EXACT_DTYPES:
        raise GraphError(
            f"{where}, dtype='{model.dtype}'): exact works with {' and '.join(f'{d} on {p}' for d, p in EXACT_DTYPES.items())}; write "
            f"{' or '.join(f'dtype={d!r}' for d in EXACT_DTYPES)}"
        )
    given = {
        "tensor_parallel": (model.tensor_parallel, 1),
        "context_parallel": (model.context_parallel, 1),
        "expert_parallel": (model.expert_parallel, 1),
        "recompute": (model.recompute, False),
        "fused_head": (model.fused_head, None),
        "compiled": (model.compiled, False),
        "load_balance": (model.load_balance, 0.0),
        "router_replay": (model.router_replay, False),
        "adapter": (model.adapter, None),
        "train_vision": (model.train_vision, False),
    }
    for name, (value, plain) in given.items():
        if value != plain:
            raise GraphError(f"{where}, {name}={value!r}): the combination is not tested to be exact; leave out one of the two")


def columns_to_check(name: str, model: Any, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The columns that an update reads for its check. Raises GraphError if an exact policy's batch was not sampled by an engine."""
    if model.exact and "rollout_log_probs" not in list_columns(inputs):
        raise GraphError(
            f"node '{name}' trains a policy with exact=True on a batch that no engine sampled; pass it a rollout, or leave out exact"
        )
    return ("rollout_log_probs",) if model.exact else ()


def checked_rows(engine: Any, batch: Columns, step: int, temperature: float) -> dict[str, float]:
    """Score some rows of a batch before its first update, other rows in each step; return the number of their tokens as a metric.

    Raises CertificateError for a token whose log-prob differs from the engine's in any bit.
    """
    rows = rows_of(batch)
    chosen = torch.arange(step * CHECKED, step * CHECKED + min(CHECKED, rows)) % rows
    some = {name: tensor_of(batch, name)[chosen] for name in ("prompts", "prompt_mask", "responses", "response_mask")}
    sampled, mask = tensor_of(batch, "rollout_log_probs")[chosen], some["response_mask"].bool()
    own = engine.scores(some, temperature=temperature)
    differ = (own != sampled) & mask
    if bool(differ.any()):
        most = (own - sampled)[mask].abs().max().item()
        raise CertificateError(
            f"step {step}: {int(differ.sum())} of {int(mask.sum())} tokens of {len(chosen)} rows have different log-probs in the trainer "
            f"and in the engine, by up to {most:.1e}; Policy(exact=True) requires equality. Leave out exact to train without this check"
        )
    return {"exact/tokens_checked": float(mask.sum())}


# Checks of a model that is trained with moments of 8 bits, or with a frozen base of 4 bits.


def check_eight_bits(model: Any) -> None:
    """Raise GraphError for settings that moments of 8 bits do not work with."""
    where = f"{type(model).__name__}(optimizer=rg.AdamW(moments='8bit')"
    if model.offload == "moments":
        raise GraphError(f"{where}, offload='moments'): moments in host memory have 32 bits; leave out one")
    if model.tensor_parallel > 1:
        raise GraphError(
            f"{where}, tensor_parallel={model.tensor_parallel}): ranks that share matrices split them within blocks of moments; use "
            "data_parallel or context_parallel, or leave out moments"
        )
    if model.expert_parallel > 1:
        raise GraphError(
            f"{where}, expert_parallel={model.expert_parallel}): ranks that share experts split them differently than the blocks "
            "of moments; leave out one"
        )


def check_four_bits(model: Any) -> None:
    """Raise GraphError for settings that a base of 4 bits does not work with."""
    where = f"{type(model).__name__}(adapter=LoRA(base='{model.adapter.base}')"
    if model.compiled:
        raise GraphError(f"{where}, compiled=True): products with matrices of 4 bits are not compiled; leave out compiled")
    for name, ranks in (("data_parallel", model.data_parallel or 1), ("context_parallel", model.context_parallel)):
        if ranks > 1:
            raise GraphError(f"{where}, {name}={ranks}): a 4-bit base must be whole on one rank; leave out one")


def check_installed(model: Any) -> None:
    """Raise GraphError for a model that needs bitsandbytes if it is not installed."""
    eight, four = model.optimizer.moments == "8bit", model.adapter is not None and model.adapter.base is not None
    if (eight or four) and not is_installed():
        given = "optimizer=rg.AdamW(moments='8bit')" if eight else f"adapter=LoRA(base='{model.adapter.base}')"
        raise GraphError(f"{type(model).__name__}({given}): the package bitsandbytes is not installed: {INSTALL}")


def check_vision(model: Any) -> None:
    """Raise GraphError for settings with which the tower of a model that reads images cannot be trained."""
    given = {
        "tensor_parallel": (model.tensor_parallel, 1),
        "expert_parallel": (model.expert_parallel, 1),
        "optimizer": (isinstance(model.optimizer, Muon), False),
    }
    for name, (value, plain) in given.items():
        if value != plain:
            raise GraphError(f"{type(model).__name__}(train_vision=True) does not work with {name}=; leave out one of the two")


# Checks of a model that trains an adapter: of its settings when it is declared, of its folder before anything starts.


def check_adapter(model: Any) -> None:
    """Raise GraphError for settings that an adapter does not work with."""
    where = f"{type(model).__name__}(adapter=LoRA(rank={model.adapter.rank})"
    if isinstance(model.optimizer, Muon):
        raise GraphError(
            f"{where}, optimizer=rg.optim.Muon()): Muon updates whole matrices, while an adapter trains their factors; use rg.AdamW(…)"
        )
    if model.tensor_parallel > 1:
        raise GraphError(
            f"{where}, tensor_parallel={model.tensor_parallel}): ranks that share matrices would have to share the adapter's too, which is "
            "not supported; use data_parallel or context_parallel"
        )
    if model.expert_parallel > 1:
        raise GraphError(
            f"{where}, expert_parallel={model.expert_parallel}): mixtures of experts have no adapters here; leave out expert_parallel"
        )
    if model.adapter.base is not None:
        check_four_bits(model)
    if model.load_balance:
        raise GraphError(f"{where}, load_balance={model.load_balance}): routers of experts are frozen; leave out load_balance")


def check_adapter_folder(model: Any, summary: ModelSummary) -> None:
    """Raise GraphError for an adapter of an untested family, with unknown targets, or that differs from the folder from which it starts."""
    lora: LoRA = model.adapter
    where = f"{type(model).__name__}({str(summary.path)!r}, adapter=LoRA(…))"
    tested = (*FAMILIES, *FAMILIES_WITH_IMAGES)
    if summary.model_type not in tested:
        raise GraphError(
            f"{where}: adapters are tested for {', '.join(tested)}, and this model is a '{summary.model_type}'; train it without adapter="
        )
    unknown = [] if lora.targets == ALL_LINEAR or model.train_vision else [name for name in lora.targets if name not in PROJECTIONS]
    if unknown:
        raise GraphError(f"{where} has the target '{unknown[0]}'; the layers have {list(PROJECTIONS)}")
    if lora.folder is not None:
        there = LoRA.load(lora.folder)
        if (there.rank, there.alpha, _targets(there)) != (lora.rank, lora.alpha, _targets(lora)):
            raise GraphError(
                f"{where} starts from '{lora.folder}', whose rank, alpha and targets are {there.rank}, {there.alpha:g} and "
                f"{_targets(there)}; write adapter=rg.LoRA.load({lora.folder!r})"
            )


def _targets(lora: LoRA) -> list[str]:
    return sorted(PROJECTIONS if lora.targets == ALL_LINEAR else lora.targets)


# A policy that computes with the experts that the engine chose: its allowed settings, and the columns that its nodes read.


def check_replay(model: Any) -> None:
    """Raise GraphError for settings with which the choice of routers cannot be replayed."""
    if not model.router_replay:
        return
    given = {"compiled": (model.compiled, False), "tensor_parallel": (model.tensor_parallel, 1)}
    given |= {"context_parallel": (model.context_parallel, 1)}
    for name, (value, plain) in given.items():
        if value != plain:
            raise GraphError(
                f"{type(model).__name__}(router_replay=True, {name}={value!r}): routers of layers that are compiled, or that ranks share, "
                f"cannot replay choices; leave out {name}, or router_replay"
            )


def check_replay_folder(model: Any) -> None:
    """Raise GraphError for a model without experts."""
    if model.router_replay:
        check_routes(f"{type(model).__name__}(router_replay=True)", model.path)


def routes_read(name: str, model: Any, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The columns of routes that a node of a policy reads. Raises GraphError for a batch without them.

    Batches of examples have none, so only a rollout's batch is checked.
    """
    if not model.router_replay:
        return ()
    if not set(ROUTES) <= set(list_columns(inputs)):
        sampled = next((o.node.name for o in inputs if isinstance(o, Output) and o.node.traits.work == "generate"), None)
        fix = f"make the generator of '{sampled}' with routes=True" if sampled else "pass it a rollout of rg.Generator(…, routes=True)"
        raise GraphError(
            f"node '{name}' is of a policy with router_replay=True, and its inputs do not carry the experts that the engine chose; {fix}, "
            "or leave out router_replay"
        )
    return ROUTES


def beside_tokens(name: str, model: Any, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The columns that a model computes with beside the tokens: routes, if it replays them, and images, if the batch has some.

    Raises GraphError for images that the model, or its trainer, does not read.
    """
    routes = routes_read(name, model, inputs)
    shown = tuple(column for column in ("images", "image_mask") if column in list_columns(inputs))
    where = f"node '{name}'"
    if not shown:
        if model.train_vision:
            raise GraphError(f"{where} is of a model with train_vision=True, and its batch has no images; leave out train_vision")
        return routes
    if not model.spec.reads_images:
        raise GraphError(
            f"{where} gets images, which trainer='{model.spec.name}' does not read; use trainer='fsdp', or leave the images out"
        )
    if model.context_parallel > 1:
        raise GraphError(
            f"{where} gets images, and its ranks share rows (context_parallel={model.context_parallel}): leave out one of both"
        )
    check_sees(where, model.path)
    return (*routes, *shown)


# Whether a model reads the tokens of its batch as they were written: with the vocabulary of the model that wrote them.

WRITTEN = "responses"


def check_vocabulary(node: Node) -> None:
    """Raise DataError if the tokens of a node were written by a model with another vocabulary than the node's model.

    Models of one family may have extra tokens at the end of their vocabularies, so only the ids of both are compared.
    """
    assert node.model is not None
    for writer, path in {source.name: _path(source) for source in writers(node)}.items():
        found = None if path == node.model.path else difference(path, node.model.path)
        if found is not None:
            raise DataError(
                f"node '{node.name}' scores the tokens of '{writer}' with '{node.model.path}', but they come from the vocabulary of "
                f"'{path}': {found}; use models with the same vocabulary"
            )


def _path(writer: Node) -> str:
    operation = writer.operation
    model = operation.model if isinstance(operation, Examples | Stepwise) else writer.model
    assert model is not None, "tokens are written with a model"
    return model.path


def writers(node: Node) -> Iterator[Node]:
    """Yield the nodes that wrote the tokens of a node's inputs."""
    for output in node.inputs:
        if not any(column.removeprefix(output.prefix) == WRITTEN for column in output.columns):
            continue
        source = output.node
        if isinstance(source.operation, Examples | Stepwise) or source.model is not None:
            yield source
        else:
            yield from writers(source)


@functools.cache
def difference(first: str, second: str) -> str | None:
    """Name a token id that two models read differently; None if there is none, or if one of the folders has no tokenizer."""
    from rlgraph.engines.hf.model_files import check_tokenizer
    from rlgraph.engines.hf.pretrained import check_model

    try:
        known, own = ({place: text for text, place in check_tokenizer(path).get_vocab().items()} for path in (first, second))
    except DataError:
        return None
    other = next((place for place in sorted(known.keys() & own.keys()) if known[place] != own[place]), None)
    if other is not None:
        return f"token {other} is {known[other]!r} there and {own[other]!r} here"
    size = check_model(second).vocab_size
    return f"it goes up to token {max(known)}, the model up to {size - 1}" if max(known) >= size else None


# A trained model: the base of policy, critic and reference, and the checks of its folder and its ranks.

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

    It accepts the fields of `TrainerSettings` that its trainer supports, and:

    * `trainer`: "fsdp" (FSDP2), "megatron" (Megatron-Core), for a teacher or a reference "vllm", or a custom `TrainerSpec`.
      `scores`: its output for each token, "log_probs" or "values".
    * `dtype`: "auto" is bfloat16 if the device computes in it (a GPU of compute capability 8.0 or more, a CPU with AVX512-BF16 or
      AMX), else float32.
    * `data_parallel`: the number of data-parallel groups of processes. None: all GPUs of the pool, or one process on the host.
    * `self_test`: at the start, compares packed log-probs with the model's own forward pass, on a small random model of the same
      architecture. This lasts a second. Layouts that fail are not used; a model that fails every layout is refused.
    """

    data_parallel: Count | None = None
    dtype: Dtype = "auto"
    router_replay: bool = field(default=False, init=False)  # a policy's alone
    self_test: bool = True
    trainer: Annotated[str, OneOf(TRAINERS.names)] | TrainerSpec = "fsdp"
    scores: ClassVar[Literal["log_probs", "values"]] = "log_probs"
    frozen: ClassVar[bool] = False  # whether it may lack an update

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
        if self.train_vision:
            check_vision(self)
        if self.expert_parallel > 1 and self.compiled:
            raise GraphError(
                f"{type(self).__name__}(expert_parallel={self.expert_parallel}, compiled=True): layers whose experts are split over ranks "
                "are not compiled; leave out compiled"
            )
        if self.tensor_parallel > 1 and self.context_parallel > 1 and self.compiled:
            raise GraphError(
                f"{type(self).__name__}(tensor_parallel={self.tensor_parallel}, context_parallel={self.context_parallel}, compiled=True): "
                "layers whose matrices and rows are both split over ranks are not compiled; leave out compiled, or one of the two"
            )
        if self.load_balance and (self.compiled or self.tensor_parallel > 1 or self.context_parallel > 1):
            raise GraphError(
                f"{type(self).__name__}(load_balance={self.load_balance}): layers that are compiled, or that ranks share, do not "
                "report what their routers chose; leave out load_balance, or compiled, tensor_parallel and context_parallel"
            )
        check_replay(self)
        _ = self.spec  # looked up when the model is declared
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
        """Raise GraphError for settings that a scoring engine does not support."""
        name = self.spec.name
        if not self.frozen:
            raise GraphError(f"{type(self).__name__}(trainer='{name}'): it only scores, for rg.Teacher and rg.Reference; leave out trainer")
        if self.data_parallel not in (None, 1):
            raise GraphError(
                f"{type(self).__name__}(trainer='{name}', data_parallel={self.data_parallel}): it is one process; leave it out"
            )

    @functools.cached_property
    def spec(self) -> TrainerSpec:
        """The spec of the trainer that `trainer` names or is. It travels to the workers with the model."""
        return trainer_of(self)

    @property
    def ranks(self) -> int | None:
        if self.spec.only_scores or (self.adapter is not None and self.adapter.base is not None):
            return 1
        return None if self.data_parallel is None else self.data_parallel * self.traits.ranks_per_pass

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
            tower=functools.partial(tower_of_folder, self.path),
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
    """Raise DataError for a folder without a model, or for a model whose packed log-probs differ from its own forward pass, and GraphError
    for a model that its trainer does not support, or that its ranks cannot share.

    The families in `TESTED` have their own library tests, so for them the workers' self-test, which runs during their start, is enough.
    """
    from rlgraph.engines.hf.pretrained import check_model

    model.spec.check(model)
    check_installed(model)
    check_replay_folder(model)
    if model.adapter is not None:
        check_adapter_folder(model, check_model(model.path))
    if model.exact:
        exactness().check(model.path, check_model(model.path).model_type, model.dtype)
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
            f"node '{name}' needs log-probs of several tokens per position, which trainer='{model.spec.name}' does not return: leave out "
            "trainer, or distil by the sampled token"
        )
    if model.tensor_parallel > 1 or model.context_parallel > 1:
        raise GraphError(
            f"node '{name}' needs log-probs of several tokens per position, which ranks that share a pass do not return: leave out "
            f"tensor_parallel={model.tensor_parallel} and context_parallel={model.context_parallel}, or distil by the sampled token"
        )


def check_rows_fit(node: Node, model: TrainedModel) -> None:
    """Raise GraphError for a scoring engine with less room for a row than the generator that writes it."""
    from rlgraph.engines.hf.pretrained import check_model

    if not model.spec.only_scores:
        return
    room = model.traits.max_context or check_model(model.path).context_length
    for writer in (output.node for output in node.inputs if output.node.traits.work == "generate"):
        most = writer.model and (writer.model.traits.max_context or check_model(writer.model.path).context_length)
        if most and most > room:
            raise GraphError(
                f"node '{node.name}' scores rows of '{writer.name}', which may have {most} tokens, but its model has room for {room}: "
                "raise its max_context= up to the model's own limit, or lower the generator's"
            )


def check_rotary_factors(node: Node, model: TrainedModel) -> None:
    """Raise GraphError for rows that are so long that the model's rotary factors depend on the other rows.

    Rows that no generator wrote are checked as they arrive.
    """
    from rlgraph.engines.hf.pretrained import check_model

    for writer in writers(node):
        if writer.model is not None and writer.traits.work == "generate":
            most = writer.model.traits.max_context or check_model(writer.model.path).context_length
            check_rotation(f"node '{node.name}' reads", model.path, most)
    if model.spec.only_scores:  # an engine chooses factors by its own room for rows
        room = model.traits.max_context or check_model(model.path).context_length
        check_rotation(f"node '{node.name}' has room for", model.path, room, room=f"{type(model).__name__}(max_context=)")


def check_scored(name: str, model: TrainedModel, temperature: float, top_k: int | None = 1) -> None:
    """Raise GraphError for scores that a scoring engine does not return."""
    if not model.spec.only_scores:
        return
    if temperature != 1.0:
        raise GraphError(
            f"node '{name}' scores responses that are sampled at temperature {temperature}, but trainer='{model.spec.name}' scores at "
            "temperature 1; sample at 1, or leave out trainer"
        )
    if top_k is None:
        raise GraphError(f"node '{name}' has top_k=None, but trainer='{model.spec.name}' returns only some log-probs; set e.g. top_k=64")
