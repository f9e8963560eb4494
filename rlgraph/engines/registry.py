"""The engines by name: how each is loaded, the settings it takes, and the estimates that a plan needs; and parsers of tool calls.

A new engine is one file with an `ENGINE` and one line in a table below. Nothing outside this folder compares the name of an engine, and
nothing but this file knows the plug-ins `exact`, `megatron` and `sglang`, whose specs are imported at their first use.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

import torch

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.engines.api import GenerateEngine, Place, TrainEngine
from rlgraph.engines.precision import device_precision, leave_out_broken_amx
from rlgraph.errors import GraphError, show_value
from rlgraph.plan.cluster import AUTO
from rlgraph.plan.estimates import Estimates, fully_sharded_memory, master_weights, moments
from rlgraph.plan.model_shapes import Need, Workload
from rlgraph.settings import Name, OneOf, refuse_unknown
from rlgraph.values.sampling import Sampling
from rlgraph.values.trainer import setting_names

S = TypeVar("S", bound="EngineSpec | TrainerSpec")
EngineSetting: TypeAlias = Literal[
    "memory", "max_sequences", "engines_per_gpu", "self_test", "engine_args", "weights_dtype", "drafts", "routes", "images", "min_p", "stop"
]
TRAINER_SETTINGS = (*(name for name in setting_names() if name != "optimizer"), "self_test", "max_context")  # optional ones
TrainerSetting: TypeAlias = Annotated[str, OneOf(TRAINER_SETTINGS)]


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class EngineSpec(Estimates):
    """Describe an engine that generates: `rg.Generator(model, pool=…, engine=…)` accepts its name or the spec itself.

    * `name`: its name in `engine=` and in errors.
    * `load`: `load(generator, place)` builds the engine in its worker. It is pickled, so it must be a module-level function.
    * `settings`: the optional fields of `Generator` that the engine supports: `max_sequences`, `memory`, `engines_per_gpu`, `self_test`,
      `weights_dtype`, `drafts`, `routes`, `images`, `engine_args`; and of its `Sampling`: `min_p`, `stop`. Any other setting is an error.
    * `spans_devices`: it supports `tensor_parallel`.
    * `shares_steps`: responses that join later are decoded in the same steps as running responses.
    * `merges_adapters`: it may follow a policy with `adapter=`: each version is then computed from the base and the adapter.
    * `samples_exactly`: a policy with `exact=True` computes bit-identical log-probs.
    * `own_processor`: it loads a model's processor of images itself, with all that the processor imports.
    * `fixed_rotation`: rotary factors that depend on the length of a text are chosen once for all texts, from `max_context`.
    * `check_arguments`: `check_arguments(given)` checks `engine_args` when the generator is declared, and returns the arguments that
      need a GPU, each with the reason.
    * `prepare`: imports what `load` needs, if that changes the process for others. `rg.runs.warm` then keeps a separate process for it,
      from which workers are forked.
    * `renews`: `rg.runs.warm(engines=True)` may cache it between jobs, with its methods `forget` and `renew`.

    See `Estimates` for the other fields.

    Example:
        >>> from rlgraph.engines.registry import EngineSpec
        >>> spec = EngineSpec(name="mine", load=lambda generator, place: MyEngine(generator.path, place.device))
        >>> spec.takes("tensor_parallel")
        False
    """

    name: Name
    load: Callable[[Any, Place], GenerateEngine]
    settings: tuple[EngineSetting, ...] = ()
    spans_devices: bool = False
    shares_steps: bool = True
    merges_adapters: bool = False
    samples_exactly: bool = False
    own_processor: bool = False
    fixed_rotation: bool = False
    check_arguments: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    prepare: Callable[[], None] | None = None
    renews: bool = False

    def takes(self, setting: str) -> bool:
        """Whether the engine supports this optional setting."""
        return setting in self.settings or (setting == "tensor_parallel" and self.spans_devices)


@dataclass(frozen=True)
class SavedShard:
    """A box of a parameter in a saved state: `box` has no memory (its tensor is on the "meta" device), and `read` reads the tensor."""

    box: WeightShard
    read: Callable[[], torch.Tensor]


def check_plan(model: Any) -> None:
    """Raise GraphError if the ranks cannot share the model, or its experts, with transformers' plan for it."""
    from rlgraph.engines.fsdp.parallel import check_folder_experts, check_folder_parallel

    if model.expert_parallel > 1:
        for name, ranks in (("tensor_parallel", model.tensor_parallel), ("context_parallel", model.context_parallel)):
            if ranks > 1:
                raise GraphError(
                    f"{type(model).__name__}(expert_parallel={model.expert_parallel}, {name}={ranks}): trainer='{model.spec.name}' shares "
                    f"experts between ranks that have their own micro-batches; leave out {name}"
                )
        check_folder_experts(type(model).__name__, model.path, model.expert_parallel)
    if model.traits.ranks_per_pass > 1:
        check_folder_parallel(type(model).__name__, model.path, tensor=model.tensor_parallel, context=model.context_parallel)


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class TrainerSpec(Estimates):
    """Describe an engine that trains: `rg.Policy(…, trainer=…)`, `Critic` and `Reference` accept its name or the spec itself.

    * `name`: its name in `trainer=` and in errors.
    * `load`: `load(model, place)` builds one rank's engine, whose scores are `model.scores`: "log_probs" or "values".
    * `settings`: the fields of `TRAINER_SETTINGS` that the engine supports. Any other setting of the model is an error.
    * `check`: `check(model)` raises GraphError for an unsupported model, before anything starts. By default it refuses a model whose
      tensor-parallel plan in transformers does not fit the ranks.
    * `only_scores`: it is for a teacher or a reference, and is one process.
    * `whole_vocabulary`: it can return log-probs of all tokens at each position, and not only of one.
    * `any_vocabulary`: the number of ranks need not divide the vocabulary.
    * `any_heads`: the number of ranks need not divide the heads; the ranks then form a ring.
    * `shares_prompts`: on a GPU it computes the prompt of several responses once, and counts micro-batches accordingly.
    * `reads_images`: it computes with the images of prompts, in the column `images`.
    * `streams`: its engine has `add_gradients` and `apply_gradients`, for updates with `streamed=True`.
    * `shares_base`: it reads the frozen weights of an adapter's base from `place.shared_base`, unless that is None.
    * `saved_shards`: `saved_shards(folder)` finds the weights in a folder that the engine's `save` wrote, for `rg.runs.export`. Without it
      only a running job exports.
    * `prepare`: as for an `EngineSpec`.

    The default estimates assume float32 weights, gradients and AdamW moments, all sharded over the ranks, which gather them in
    each micro-batch. The moments move to host memory in `sleep`. While a rank loads, it is assumed to hold all float32 weights, unless
    it `reads_shards`.

    Example:
        >>> from rlgraph.engines.registry import TrainerSpec
        >>> spec = TrainerSpec(name="mine", load=lambda model, place: MyTrainer(model.path, place.rank), settings=("recompute",))
        >>> spec.takes("compiled"), spec.sleep_bytes(1000, 2)
        (False, 8000)
    """

    name: Name
    load: Callable[[Any, Place], TrainEngine]
    settings: tuple[TrainerSetting, ...] = ()
    check: Callable[[Any], None] = check_plan
    only_scores: bool = False
    whole_vocabulary: bool = True
    any_vocabulary: bool = False
    any_heads: bool = False
    shares_prompts: bool = False
    shares_base: bool = False
    reads_images: bool = False
    streams: bool = False
    saved_shards: Callable[[Path], Iterable[SavedShard]] | None = None
    prepare: Callable[[], None] | None = None
    sleep_bytes: Callable[[int, int], int] = moments
    loading_bytes: Callable[[int, int], int] = master_weights
    memory_estimate: Callable[[Workload], Need] = fully_sharded_memory
    gathers_shards: bool = True

    def takes(self, setting: str) -> bool:
        """Whether the trainer supports this optional setting."""
        return setting in self.settings


class Comparison(Protocol):
    """What `rlgraph doctor exact` prints."""

    @property
    def equal(self) -> bool: ...

    def to_json(self) -> str: ...


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ExactSpec:
    """Describe what makes a trainer's log-probs bit-identical to those of the engine "vllm", for `rg.Policy(…, exact=True)`.

    * `check`: `check(path, model_type, dtype)` raises DataError for a model that is not proven to be exact.
    * `exchange`: `exchange(head, device)` gives the model of a `PolicyHead` the engine's kernels, and sets its `score_tokens` if log-probs
      need one. Returns the modules to `forget` when weights change.
    * `engine_arguments`: the arguments of `vllm.EngineArgs` on a GPU, for an engine with kernels that the trainer has too.
    * `diagnose`: `diagnose(folder)` compares both on this machine, operation by operation.
    """

    check: Callable[[str, str, str], None]
    exchange: Callable[[Any, str], list[Any]]
    engine_arguments: Mapping[str, Any]
    diagnose: Callable[[str], Comparison]


class SpecTable(Generic[S]):
    """Specs by name. A spec given as `module:name` is imported at its first use."""

    def __init__(self, known: Mapping[str, str | S]) -> None:
        self._known: dict[str, str | S] = dict(known)

    def names(self) -> tuple[str, ...]:
        """The names, in the order of registration."""
        return tuple(self._known)

    def register(self, spec: S) -> None:
        """Add a spec by its name, in the process that declares graphs; workers get it with the model.

        Raises GraphError if another spec has that name.
        """
        if self._known.setdefault(spec.name, spec) is not spec:
            raise GraphError(f"register({type(spec).__name__}(name={show_value(spec.name)})): this name is taken; choose another one")

    def find(self, asked: str | S) -> S:
        """Look up a spec by its name; a spec is returned as it is."""
        found: Any = self._known[asked] if isinstance(asked, str) else asked
        return _import_spec(found) if isinstance(found, str) else found

    def with_setting(self, name: str) -> list[str]:
        """List the names of the specs that take a setting."""
        return [known for known in self._known if self.find(known).takes(name)]


def _import_spec(place: str) -> Any:
    module, _, name = place.partition(":")
    return vars(import_module(module))[name]


ENGINES: SpecTable[EngineSpec] = SpecTable({name: f"rlgraph.engines.{name}.spec:ENGINE" for name in ("vllm", "transformers", "sglang")})
TRAINERS: SpecTable[TrainerSpec] = SpecTable({name: f"rlgraph.engines.{name}.spec:TRAINER" for name in ("fsdp", "megatron", "vllm")})


def exactness() -> ExactSpec:
    """Import what `exact=True` needs: nothing without it does."""
    spec: ExactSpec = _import_spec("rlgraph.engines.exact.spec:EXACT")
    return spec


def engine_of(generator: Any) -> EngineSpec:
    """Look up the engine spec of a `Generator`. Raises GraphError for a setting that the engine does not take."""
    return _check_choice(generator, "engine", ENGINES, ("tensor_parallel", *get_args(EngineSetting)))


def trainer_of(model: Any) -> TrainerSpec:
    """Look up the trainer spec of a model. Raises GraphError for a setting that the trainer does not take."""
    return _check_choice(model, "trainer", TRAINERS, TRAINER_SETTINGS)


def _check_choice(model: Any, choice: str, table: SpecTable[S], optional: tuple[str, ...]) -> S:
    asked = getattr(model, choice)
    spec = table.find(asked)
    for field in fields(model):
        value = getattr(model, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else None if field.default is MISSING else field.default
        if field.name in optional and value != default and not spec.takes(field.name):
            others = " or ".join(f"{choice}={name!r}" for name in table.with_setting(field.name))
            raise GraphError(
                f"{type(model).__name__}({choice}={show_value(spec.name)}, {field.name}={show_value(value)}): '{spec.name}' has no "
                "such setting; "
                f"leave it out{f', or use {others}' if others else ''}"
            )
    return spec


def sampling_of(generator: Any, given: Sampling | None) -> Sampling:
    """Choose the sampling of a node: its own, or its generator's. Raises GraphError for a setting that the engine does not support."""
    spec, sampling = generator.spec, given or generator.sampling
    for name in ("min_p", "stop"):
        value = vars(sampling)[name]
        if value and not spec.takes(name):
            others = " or ".join(f"engine={known!r}" for known in ENGINES.with_setting(name))
            raise GraphError(
                f"Sampling({name}={show_value(value)}): the engine '{spec.name}' has no such setting; leave it out, or use {others}"
            )
    if sampling.min_p and generator.drafts is not None:
        raise GraphError(
            f"Sampling(min_p={sampling.min_p}): engines with drafts sample by temperature, top_k and top_p; leave out min_p, or drafts"
        )
    return sampling


# vLLM's parsers of tool calls, by name.


def vllm_calls(name: str, tokenizer: Any) -> Callable[[str, Mapping[str, Any]], Sequence[tuple[str, str]]]:
    """Make the parser `name` of vLLM: a function of a text and the tools' schemas that returns the name and the JSON of each call.

    Raises GraphError where vLLM is missing, has no such parser, or the parser does not take the model's tokenizer.
    """
    where = f"calls='vllm:{name}'"
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise GraphError(f"{where} needs vLLM, which cannot be imported ({error!s:.200}): use one of rlgraph's own formats") from None
    try:
        kind = ToolParserManager.get_tool_parser(name)
        parser = kind(tokenizer)
    except Exception as error:  # noqa: BLE001 (whatever a parser of vLLM raises for another tokenizer)
        raise GraphError(f"{where}: vLLM's parser cannot be used with this model ({type(error).__name__}: {error!s:.200})") from None

    def parse(text: str, schemas: Mapping[str, Any]) -> list[tuple[str, str]]:
        tools = [{"type": "function", "function": {"name": tool, "parameters": dict(schema)}} for tool, schema in schemas.items()]
        request = ChatCompletionRequest(model="policy", messages=[], tools=tools or None)
        found = parser.extract_tool_calls(text, request)
        return [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse


# Load the engine of a model in its place: a scorer, and the dtype in which an engine computes there.


def score_engine(model: Any, place: Place) -> Any:
    """Load a `RewardModel`; its ranks meet at `place.rendezvous`."""
    import torch

    from rlgraph.engines.fsdp.sharding import add_up, meet_at
    from rlgraph.engines.transformers.engine import ScoreEngine

    meet_at(place)
    return ScoreEngine(
        model.path,
        device=place.device,
        dtype=getattr(torch, dtype_of(model, place)),
        label=model.label,
        batch_tokens=model.batch_tokens,
        rank=place.rank,
        world=place.world,
        add_up=add_up,
    )


def dtype_of(model: Any, place: Place) -> str:
    """The dtype that a model computes in: its own, or for "auto" that of the device. Every engine asks for it before it computes."""
    leave_out_broken_amx()
    return device_precision(place.device).dtype if model.dtype == AUTO else str(model.dtype)
