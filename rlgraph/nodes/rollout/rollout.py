"""Rollout: the generator, and its node that samples responses under the current weights.

With continuous decoding the next batch and new weights may join a batch that still decodes.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import torch

from rlgraph.columns import Column, Columns, repeat_rows, rows_at, rows_of_rank
from rlgraph.data.rows import Overlong
from rlgraph.engines.api import Images, Request
from rlgraph.engines.hf.chat_template import ChatPrompt, TurnTemplate, encode_with_images, reads
from rlgraph.engines.hf.image_costs import tower_of_folder
from rlgraph.engines.hf.images import check_sees
from rlgraph.engines.hf.model_files import header_shapes
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.engines.registry import ENGINES, EngineSpec, engine_of, sampling_of
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.graph.nodes import Feedback, Model, Node, Operation, Output, declare
from rlgraph.graph.traits import ModelTraits, NodeTraits
from rlgraph.nodes.base import ChunkedStage, Context, Fired, Stage
from rlgraph.nodes.environments.agent import Agent, Environment
from rlgraph.nodes.environments.program import Program
from rlgraph.nodes.environments.tools import Tools
from rlgraph.nodes.prompts import Prompts, PromptSource
from rlgraph.nodes.rollout.conversation import ConversationLoop, chats_of, check_turns, form_of, turn_metrics
from rlgraph.nodes.rollout.decode_loop import (
    OUTPUTS,
    REWARDS,
    ROUTES,
    WRITES,
    DecodeLoop,
    OneTurn,
    Outcome,
    Task,
    TaskDecoder,
    chain_parts,
    check_routes,
    check_told,
    image_columns,
    pack_outcomes,
    route_dims,
    seed_of,
)
from rlgraph.nodes.rollout.fitting import check_prompts, declared_context, most_tokens
from rlgraph.nodes.rollout.session_loop import SessionLoop, SessionRules
from rlgraph.nodes.rollout.turn_loop import TurnLoop, TurnRules
from rlgraph.settings import Count, Dtype, Natural, OneOf, Range, check_arguments, refuse_unknown
from rlgraph.values.drafts import PromptLookup, check_no_model
from rlgraph.values.sampling import BatchAdmission, Running, Sampling

# Continuous decoding: whether the next batch and new weights may join a batch that still decodes.


def admission_rule(node: str, weights: Feedback | None, interrupt: Running | None, continuous: bool, source: object) -> BatchAdmission:
    """Make the rule. Raises GraphError for a setting that has no effect, or that cannot keep the staleness bound."""
    if interrupt is not None and weights is None:
        raise GraphError(f"node '{node}' has interrupt={interrupt!r} but no weights that change; pass a feedback edge, or leave it out")
    if interrupt is not None and weights is not None and weights.depth == 0:
        raise GraphError(
            f"node '{node}' has interrupt={interrupt!r}, but at depth=0 of feedback '{weights.name}' no version is published while "
            "responses decode: use depth>=1, or leave it out"
        )
    if continuous and weights is not None and weights.depth == 0:
        raise GraphError(
            f"node '{node}' has continuous=True at depth=0 of feedback '{weights.name}', where the next batch may start only after "
            "the update on this one; use depth>=1, or leave continuous out"
        )
    if continuous and source is not None and not isinstance(source, Prompts):
        raise GraphError(
            f"node '{node}' has continuous=True, so it needs the next prompts while it decodes, and only rg.prompts over a data set with "
            "a length has them: pass its output, read a stream into rg.data.rows(list(...)), or leave continuous out"
        )
    return BatchAdmission(interrupt, continuous, weights.depth if weights is not None else None)


if TYPE_CHECKING:

    class Refills(Protocol):
        """Declares a rollout that draws its own prompts, e.g. `rg.options.Refill`."""

        def declare(self, name: str, rollout: "Rollout", prompts: Output, weights: Feedback | None) -> Output: ...

# The text that determines a generator's engine: two generators with the same text have equal engines.

APART = {"pool", "sampling"}  # fields of a generator that its engine does not use
FILES = ("config.json", "generation_config.json")


def made_of(generator: Any) -> str | None:
    """Describe a `Generator`'s engine by its settings and its model's folder, whose weights may change.

    None if the folder's weights cannot be read, or are quantised, which an engine accepts only when it loads.
    """
    folder = Path(generator.path)
    texts = [(folder / name).read_text(encoding="utf-8") if (folder / name).exists() else "" for name in FILES]
    if '"quantization_config"' in texts[0]:
        return None
    try:
        shapes = [header_shapes(file) for file in sorted(folder.glob("*.safetensors"))]
    except (DataError, OSError):
        return None
    names = {field.name for field in fields(generator)} - set(APART)
    settings = {name: value for name, value in vars(generator).items() if name in names}
    return repr((settings, texts, shapes))


MAX_TURNS, MAX_CALLS = 8, 64  # defaults of rollouts with tools or environments, and with programs


@refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class Generator(Model):
    """The model that samples responses.

    >>> import rlgraph as rg
    >>> generator = rg.Generator("tiny", pool=rg.Pool("rollout", gpus=2), sampling=rg.Sampling(max_tokens=256), max_context=1024)
    >>> generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1), group_size=4)
    the batch of 'rollout'

    * `sampling`: the sampling of its rollouts, unless a rollout sets another.
    * `engine`: "vllm", "sglang", "transformers", or a custom `EngineSpec`.
    * `tensor_parallel`: the GPUs per engine. A pool with more GPUs runs several engines.
    * `max_context`: the most tokens of prompt and response together. None: the limit in the model's configuration.
    * `dtype`: "auto" is bfloat16 if the device computes in it, else float32.
    * `seed`: the seed of the sampling. A response also depends on its prompt's place in the data and on its place in the group.
    * `memory`: the share of a GPU's memory for engines and arriving versions. None: 0.9, or 0.45 in a pool shared with other models.
    * `max_sequences`: the most responses that an engine decodes at once. None: what the graph needs, at most 1024 on a GPU, 256 on a CPU.
    * `engines_per_gpu`: the engines that share each GPU and its memory. For responses of one turn, one engine is the fastest.
    * `weights_dtype`: "fp8" keeps the weight matrices of the layers in fp8, quantised from each version as it is loaded. None: as `dtype`.
    * `drafts`: `rg.options.PromptLookup(…)` guesses tokens ahead. None: each step decodes one token per sequence.
    * `routes`: writes the experts that the engine chose for each token into `prompt_routes` [B, P, L, E] and `routes`
      [B, T, L, E], for a policy with `router_replay=True`. It requires rollouts without tools or agents, and engines of one GPU.
    * `images`: the most images of a prompt, or of a conversation, whose model then reads them; see docs/engines.md. None: they have none.
    * `engine_args`: arguments for the engine itself, e.g. `{"max_num_batched_tokens": 32768}`. An argument that rlgraph sets is an error.
    * `self_test`: at the start, compares the engine `transformers` with the model's own forward pass.
    """

    role: ClassVar[str] = "generator"
    sampling: Sampling = field(default_factory=Sampling)
    engine: Annotated[str, OneOf(ENGINES.names)] | EngineSpec = "vllm"
    tensor_parallel: Count = 1
    max_context: Annotated[int, Range(least=2, rule="a whole number of tokens, at least 2")] | None = None
    dtype: Dtype = "auto"
    seed: Natural = 0
    memory: Annotated[float, Range(above=0, below=1, rule="a share of the GPU's memory, above 0 and below 1")] | None = None
    max_sequences: Count | None = None
    engines_per_gpu: Count = 1
    weights_dtype: Literal["fp8"] | None = None
    drafts: PromptLookup | None = None
    routes: bool = False
    images: Count | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    self_test: bool = True

    def __post_init__(self) -> None:
        check_no_model(self.drafts)
        super().__post_init__()
        limit = declared_context(self.path)
        if self.max_context is not None and limit is not None and self.max_context > limit:
            raise GraphError(
                f"Generator(max_context={self.max_context}): the model '{self.path}' reads at most {limit} tokens "
                "(max_position_embeddings of its config.json); lower it, or leave it out for all of them"
            )
        if self.engines_per_gpu > 1 and self.tensor_parallel > 1:
            raise GraphError(
                f"Generator(engines_per_gpu={self.engines_per_gpu}, tensor_parallel={self.tensor_parallel}): engines that span GPUs "
                "share none; pass only one of the two"
            )
        if self.memory is not None and self.pool.cpus is not None:
            raise GraphError(
                f"Generator(memory={self.memory}, pool=Pool({show_value(self.pool.name)}, cpus={self.pool.cpus})): memory is a share of "
                "a GPU's; leave it out on host cores"
            )
        if self.engine_args and self.engine_args.get("enable_expert_parallel") and self.tensor_parallel == 1:
            raise GraphError(
                "Generator(engine_args={'enable_expert_parallel': True}): an engine on one GPU has all experts; leave it out, or set "
                "tensor_parallel"
            )
        if self.images is not None:
            check_sees(f"Generator(images={self.images}, engine={self.spec.name!r})", self.path, whole=self.spec.own_processor)
        check_told(self)
        _ = self.spec, self._gpu_only  # so that they are looked up and checked when the model is declared
        sampling_of(self, None)

    @cached_property
    def spec(self) -> EngineSpec:
        """The spec of the engine that `engine` names or is. It travels to the workers with the model."""
        return engine_of(self)

    @cached_property
    def _gpu_only(self) -> Mapping[str, str]:
        check = self.spec.check_arguments if self.engine_args else None
        return {} if check is None else check(self.engine_args)

    @property
    def group(self) -> int:
        return self.tensor_parallel

    @property
    def engines(self) -> int:
        return self.engines_per_gpu

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(
            dtype=self.dtype,
            max_context=self.max_context,
            sampling=self.sampling,
            memory=self.memory,
            weights_dtype=self.weights_dtype,
            drafts=self.drafts,
            images=self.images,
            engine_args=self.engine_args,
            gpu_only=self._gpu_only,
            shares_steps=self.spec.shares_steps,
            merges_adapters=self.spec.merges_adapters,
            samples_exactly=self.spec.samples_exactly,
            estimates=self.spec,
            tower=None if self.images is None else partial(tower_of_folder, self.path),
            prepare=self.spec.prepare,
            made_of=partial(made_of, self) if self.spec.renews else None,
        )

    def load(self, context: Any) -> Any:
        return self.spec.load(self, context)

    @check_arguments()
    def rollout(
        self,
        prompts: Output,
        weights: Feedback | None = None,
        *,
        group_size: Annotated[int, Range(least=1, rule="a whole number of responses to a prompt, at least 1")] = 1,
        sampling: Sampling | None = None,
        tools: Tools | None = None,
        agent: Agent | Program | Callable[..., Environment] | Callable[..., Awaitable[object]] | str | Sequence[str] | None = None,
        max_turns: Annotated[int, Range(least=1, rule="a whole number of turns, at least 1")] | None = None,
        concurrency: Count | None = None,
        chunks: Annotated[int, Range(least=1, rule="a whole number of chunks in which a batch leaves, at least 1")] = 1,
        order: Literal["data", "finish"] = "data",
        interrupt: Running | None = None,
        continuous: bool = False,
        refill: "Refills | None" = None,
        name: str = "rollout",
    ) -> Output:
        """Declare the sampling of `group_size` responses for each prompt, with the weights of the feedback edge.

        >>> import rlgraph as rg
        >>> rg.Generator("m", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 + 1 ="}], 1), group_size=4).columns[:4]
        ('prompts', 'prompt_mask', 'responses', 'response_mask')

        It writes `prompts` [B, P], `responses` [B, T], their masks, `rollout_log_probs` [B, T], `weight_version` [B, T],
        `finish_reasons` [B] and `group_ids` [B]. The responses to one prompt are adjacent rows.

        * `prompts`, `weights`, `name`: the output of `rg.prompts`, the feedback edge (None: the initial weights stay), the node's name.
        * `group_size`, `sampling`: the responses per prompt, and a sampling in place of the generator's, e.g. for a greedy baseline.
        * `chunks`, `order`: parts of the batch that leave once their groups are done, in the order of the "data", or in which groups
          "finish", counted in decode steps. With "finish" the rollout carries its prompts' columns: pass it in place of `prompts`.
        * `interrupt`: swaps in each published version before the next decode step. "recompute" prefills the running responses again under
          the new weights; "keep" continues with their old keys and values. The run then depends on the clock.
        * `continuous`: lets batch k + 1 join on version max(0, k + 1 - depth) once half of batch k has ended: see docs/concepts.md.
        * `tools`, `agent` (an `rg.Agent`, an `rg.Program`, or its class, function or command): make a response a conversation; see
          docs/agents.md. An agent's rewards become `rewards` and `token_rewards`. `response_mask` is 0 on tokens of others.
        * `max_turns`, `concurrency`: the most turns of a conversation (None: 8, or 64 calls), and of open conversations (None: all).
        * `refill`: DAPO's dynamic sampling, `rg.options.Refill(reward=right)`: draws prompts itself, and carries their columns.

        Raises GraphError for options without effect or that exclude each other, and chunks that do not divide the prompts of a step.
        """
        check_options(name, self, prompts, tools=tools, agent=agent, max_turns=max_turns, concurrency=concurrency, refill=refill)
        source, given = prompts.node.operation, agent_of(tools, agent)
        operation = Rollout(
            generator=self,
            group_size=group_size * (given.sequences if isinstance(given, Program) else 1),
            sampling=sampling_of(self, sampling),
            tools=tools,
            agent=given,
            max_turns=max_turns or (MAX_CALLS if isinstance(given, Program) else MAX_TURNS),
            concurrency=concurrency,
            chunks=chunks,
            in_order_of_finish=checked_order(name, order, chunks, given, interrupt=interrupt, continuous=continuous),
            prefix=f"{name}: ",
            admission=admission_rule(name, weights, interrupt, continuous, source),
            source=source if continuous else None,
            overlong=source.overlong if isinstance(source, PromptSource) else Overlong(),
            carried=prompts.columns,
        )
        return operation.declare(name, prompts, weights) if refill is None else refill.declare(name, operation, prompts, weights)


@dataclass(frozen=True, eq=False)
class Rollout(Operation):
    """Tokenise the prompts, sample, and pad the responses to the longest."""

    generator: Generator
    group_size: int
    sampling: Sampling
    tools: Tools | None
    agent: Agent | Program | None
    max_turns: int
    concurrency: int | None
    chunks: int
    in_order_of_finish: bool
    prefix: str  # of its request ids
    admission: BatchAdmission
    source: Any  # of prompts, for a continuous rollout, which draws the next ones before they are due
    overlong: Overlong = field(default_factory=Overlong)
    carried: tuple[str, ...] = ()  # the columns of its prompts

    def declare(self, name: str, prompts: Output, weights: Feedback | None) -> Output:
        """Declare the node that samples responses to the prompts of another node."""
        messages = tuple(column for column in prompts.columns if column == "prompt_messages")
        of_agent = self.agent.reads(prompts.columns).values() if self.agent is not None else ()
        own = self.of_prompts
        shown = ("prompt_images",) if "prompt_images" in self.carried else ()
        reads = tuple(dict.fromkeys(("prompt_texts", *messages, "prompt_ids", *of_agent, *own, *shown)))
        rows, writes = prompts.node.rows * self.group_size, (*self.writes, *own)
        node = declare(
            name, self, (prompts,), reads=reads, writes=writes, rows=rows, model=self.generator, feedback=weights, chunks=self.chunks
        )
        return Output(node)

    @property
    def of_prompts(self) -> tuple[str, ...]:
        """The columns of its prompts that it carries."""
        return tuple(column for column in self.carried if column != "prompt_ids") if self.in_order_of_finish else ()

    @property
    def shows(self) -> tuple[str, ...]:
        """The columns of the images of a response: those of its prompt, and those that tools or environments answered with."""
        if self.generator.images is not None and isinstance(self.agent, Agent):
            return ("images", "image_mask")
        return ("images",) if "prompt_images" in self.carried else ()

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns of a response; an environment's rewards are among them."""
        own = (
            *self.shows,
            *(ROUTES if self.generator.routes else ()),
            *(REWARDS if self.gives_rewards else ()),
        )
        return (*WRITES, *own, *((OUTPUTS,) if self.has_outputs else ()))

    @property
    def gives_rewards(self) -> bool:
        """Whether its environments or programs return rewards."""
        return self.agent.rewarded if isinstance(self.agent, Program) else self.agent is not None and self.tools is None

    @property
    def rewards_per_prompt(self) -> int:
        """How many responses to a prompt have separate rewards: the responses of a session share one."""
        return self.group_size // (self.agent.sequences if isinstance(self.agent, Program) else 1)

    @property
    def has_outputs(self) -> bool:
        """Whether its programs have outputs."""
        return isinstance(self.agent, Program)

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(
            work="generate",
            host_pool=self.agent.pool if self.agent is not None else None,
            dims=self.dims,
            sampling=self.sampling,
            group_size=self.group_size,
            admission=self.admission,
            one_turn=self.agent is None,
            reorders=self.in_order_of_finish,
            looks_ahead=self.source is not None,
            given=(self.tools, self.agent) if self.tools is None else (self.tools,),
        )

    @property
    def dims(self) -> Mapping[str, int]:
        """The most tokens of a response and, if `max_context` is given, of a prompt."""
        tokens = self.sampling.max_tokens
        told = route_dims(self.generator.path) if self.generator.routes else {}
        most = self.generator.max_context
        return {"T": tokens, **told} | ({} if most is None else {"P": max(most - tokens, 1)})

    def check(self, node: Node) -> None:
        """Check model and prompts before anything starts. Raises DataError for a folder without a model, or a prompt that does not fit."""
        self.check_prompts(node, node.source_of("prompt_texts").operation)

    def check_prompts(self, node: Node, source: object) -> None:
        """Check the tools, the model and the prompts of `source`. Raises GraphError or DataError if one cannot be used."""
        if self.generator.routes:
            check_routes(f"node '{node.name}' has routes=True, and", self.generator.path)
        if self.tools is not None:
            self.tools.check()
        if self.agent is None:
            check_prompts(node, self.generator, self.sampling, source)
            return
        described = self.tools.schemas if self.tools is not None else []
        tokenizer = check_prompts(node, self.generator, self.sampling, None)
        check_conversations_of(self, tokenizer, source)
        if self.gives_rewards and isinstance(self.agent, Agent):
            self.agent.warn_without_outcome(node.name)
        if self.tools is not None:  # an environment may begin with messages other than its prompt
            check_prompts(node, self.generator, self.sampling, source, lambda columns: chats_of(columns, tokenizer, described))

    def start(self, context: Context) -> Stage | ChunkedStage:
        context.tokenizer(self.generator.path)  # here, so that the first step does not load it
        decoder = self.decoder(context)
        loop = DecodeLoop(context, decoder, self.admission, lambda step: chain_parts(self.tasks(context, self._draw_batch(context, step))))
        if self.chunks > 1:
            return ChunkedStage(partial(self.decode_chunks, context, loop))
        return lambda step, columns: next(self.decode_chunks(context, loop, step, columns))

    def decoder(self, context: Context) -> TaskDecoder:
        """Make the decoder that samples its responses, each in one turn, or in conversations.

        Raises GraphError if this worker's host cannot run one of the tools: the launch has checked only the driver's host.
        """
        if self.tools is not None:
            self.tools.check()
        if self.agent is None:
            return OneTurn(context.engine, self.prefix)
        return session_loop(self, self.agent, context) if isinstance(self.agent, Program) else turn_loop(self, self.agent, context)

    def _draw_batch(self, context: Context, step: int) -> Columns:
        assert self.source is not None
        return self.source.batch(step, context.set_aside)

    def decode_chunks(self, context: Context, loop: DecodeLoop, step: int, columns: Columns) -> Iterator[Fired]:
        """Decode all chunks of the batch together; yield each as soon as its last response is complete."""
        ids = columns["prompt_ids"]
        assert isinstance(ids, torch.Tensor)
        shares, chunks, size = self.shares(context, ids), self.tasks(context, columns), self.group_size
        own, every = [row for share in shares for row in share], chain_parts(chunks)  # prompts and tasks of this rank
        try:
            loop.begin(step, every)
            for rows, tasks in zip(shares, chunks, strict=True):
                if self.in_order_of_finish:
                    groups = loop.next_groups(step, len(rows), size)
                    rows, tasks = [own[n] for n in groups], [task for n in groups for task in every[n * size : (n + 1) * size]]
                sampled, at = loop.take(step, tasks), torch.tensor(rows, dtype=torch.int64)
                carried = {name: repeat_rows(rows_at(columns[name], at), size) for name in self.of_prompts}
                carried |= {"images": repeat_rows(rows_at(columns["prompt_images"], at), size)} if self.shows == ("images",) else {}
                yield self.pack_part(context, loop.decoder, sampled, repeat_rows(ids[at], size), carried)
        except GeneratorExit:
            raise
        except BaseException:
            if isinstance(loop.decoder, ConversationLoop):
                loop.decoder.close()
            raise

    def pack_part(self, context: Context, decoder: TaskDecoder, sampled: Sequence[Outcome], ids: Column, carried: Columns) -> Fired:
        """Pack the responses of a part into columns, with the `carried` ones of their prompts, and the metrics of its conversations."""
        columns = pack_outcomes(sampled, ids, self.gives_rewards, self.has_outputs, self.generator.routes) | dict(carried)
        columns |= image_columns(sampled, columns["responses"]) if "image_mask" in self.shows else {}
        found = context.engine.decode_metrics()
        if isinstance(decoder, ConversationLoop):
            found |= turn_metrics(sampled, decoder.seconds, self.tools is not None, context.world * self.chunks, decoder.counted)
        return (columns, found) if found else columns

    def shares(self, context: Context, ids: torch.Tensor) -> list[list[int]]:
        """Choose the rows of each part that this rank samples. Concatenated over the ranks, they are in data order."""
        return [
            [rows[place] for place in rows_of_rank(len(rows), context.rank, context.world)]
            for rows in (part.tolist() for part in torch.arange(len(ids)).chunk(self.chunks))
        ]

    def encode_prompts(self, context: Context, columns: Columns) -> tuple[list[list[int]], list[Images | None]]:
        """Encode the prompts of a batch, and give their images; cut off the beginning of long ones if their data set says so."""
        most = most_tokens(self.overlong, context, self.generator.max_context, self.sampling)
        return encode_with_images(self.generator.path, context.tokenizer(self.generator.path), columns, most)

    def tasks(self, context: Context, columns: Columns) -> list[list[Task]]:
        """Make a task for each response of this rank, by part.

        A response depends on the weights, the generator's seed, its prompt's place in the data order and its place in the group.
        A conversation's prompt is encoded when it begins.
        """
        ids = columns["prompt_ids"]
        assert isinstance(ids, torch.Tensor)
        places = ids.tolist()
        none: tuple[Sequence[Sequence[int]], Sequence[Images | None]] = [()] * len(places), [None] * len(places)
        encoded, shown = self.encode_prompts(context, columns) if self.agent is None else none
        items = [item_of(columns, row) if self.agent is not None else {} for row in range(len(places))]
        return [
            [self.task(places[row], member, encoded[row], items[row], shown[row]) for row in rows for member in range(self.group_size)]
            for rows in self.shares(context, ids)
        ]

    def task(self, place: int, member: int, prompt: Sequence[int], item: Mapping[str, Any], images: Images | None = None) -> Task:
        """Make the task of a response to the prompt at a place in the data order."""
        seed = seed_of(self.generator.seed, place, member)
        return Task(Request(f"{self.prefix}{place}.{member}", prompt, self.sampling, seed, images=images), member, item)


# The conversations of a rollout: the loop that samples them, and the checks of a launch.


def template_of(path: str, tokenizer: Any) -> TurnTemplate:
    """The chat template of a model, with the tokens at which the model ends a response."""
    return TurnTemplate(path, tokenizer, check_model(path).eos_token_ids)


def turn_loop(rollout: "Rollout", agent: Agent, context: Context) -> TurnLoop:
    """Make the loop that samples the conversations of a rollout."""
    path = rollout.generator.path
    tokenizer = context.tokenizer(path)
    described = rollout.tools.schemas if rollout.tools is not None else []
    room = (rollout.generator.max_context or context.engine.context_length()) - rollout.sampling.max_tokens

    def chat(item: Mapping[str, Any]) -> ChatPrompt:
        one = {name: [value] for name, value in item.items() if name in ("prompt_texts", "prompt_messages")}
        return ChatPrompt.from_json(chats_of(one, tokenizer, described)[0])

    rules = TurnRules(
        agent=agent,
        reads=agent.reads(rollout.carried),
        chat=chat,
        form=form_of(agent, tokenizer),
        prefix=rollout.prefix,
        group_size=rollout.group_size,
        max_turns=rollout.max_turns,
        concurrency=rollout.concurrency,
        most_prompt=rollout.overlong.limit(room),
        cut_prompts=rollout.overlong.policy == "truncate_left",
        rewarded=rollout.gives_rewards,
        images=rollout.generator.images,
    )
    return TurnLoop(rules, template_of(path, tokenizer), context)


def session_loop(rollout: "Rollout", program: Program, context: Context) -> SessionLoop:
    """Make the loop that samples the sessions of a program."""
    path = rollout.generator.path
    tokenizer = context.tokenizer(path)
    room = (rollout.generator.max_context or context.engine.context_length()) - rollout.sampling.max_tokens
    rules = SessionRules(
        program=program,
        reads=program.reads(rollout.carried),
        form=form_of(program, tokenizer),
        describes=reads(tokenizer.chat_template, "tools"),
        prefix=rollout.prefix,
        sampling=rollout.sampling,
        max_turns=rollout.max_turns,
        concurrency=rollout.concurrency,
        most_prompt=rollout.overlong.limit(room),
    )
    return SessionLoop(rules, template_of(path, tokenizer), context)


def check_conversations_of(rollout: "Rollout", tokenizer: Any, source: object) -> None:
    """Check at a launch that the model's template renders the turns of a rollout. Raises DataError or GraphError."""
    assert rollout.agent is not None
    first: Columns = source.columns([source.data[0]]) if isinstance(source, Prompts) else {"prompt_texts": ["Hi."]}
    described = rollout.tools.schemas if rollout.tools is not None else []
    template = template_of(rollout.generator.path, tokenizer)
    template.close  # noqa: B018 (a model without a chat template is refused before its prompts are rendered)
    if isinstance(rollout.agent, Program):  # its conversations are known only when the program runs
        rollout.agent.check()
        return
    check_turns(template, ChatPrompt.from_json(chats_of(first, tokenizer, described)[0]), rollout.agent, rollout.tools)


def item_of(columns: Columns, row: int) -> Mapping[str, Any]:
    """Collect the prompt columns of a row, except its place in the data order."""
    return {name: column[row] for name, column in columns.items() if name != "prompt_ids"}


# The options of a rollout: its agent, and options that exclude each other.


def checked_order(
    name: str, order: str, chunks: int, agent: Agent | Program | None, *, interrupt: Running | None, continuous: bool
) -> bool:
    """Whether a batch leaves in the order in which its groups finish. Raises GraphError for an order that has no effect, or that would
    depend on the clock."""
    if order == "data":
        return False
    if chunks == 1:
        raise GraphError(f"node '{name}' has order='finish' and one chunk, so it has no effect; set chunks, or leave it out")
    options = {"tools or an agent": agent is not None, "interrupt": interrupt is not None, "continuous": continuous}
    given = next((option for option, there in options.items() if there), None)
    if given is not None:
        raise GraphError(f"node '{name}' has order='finish' and {given}, with which the order depends on the clock; leave one out")
    return True


def agent_of(tools: Tools | None, agent: Any) -> Agent | Program | None:
    """Make the agent of a rollout from tools, a class of environments, or a program."""
    if tools is not None:
        return tools.agent()
    if isinstance(agent, Agent | Program | None):
        return agent
    return Program(agent) if isinstance(agent, str | Sequence) or inspect.iscoroutinefunction(agent) else Agent(agent)


def check_images(name: str, generator: Generator, prompts: Output, **options: Any) -> None:
    """Raise GraphError for prompts with images whose generator reads none, or with options that have no images."""
    if "prompt_images" not in prompts.columns:
        return
    if generator.images is None:
        raise GraphError(f"node '{name}' samples from prompts with images; set Generator(images=) to the most images of a prompt")
    if options["refill"] or isinstance(agent_of(options["tools"], options["agent"]), Program):
        given = "refill" if options["refill"] else "an agent program"
        raise GraphError(f"node '{name}' samples from prompts with images, with which {given} is not supported; leave it out")
    source = prompts.node.operation
    if isinstance(source, PromptSource) and source.overlong.policy == "truncate_left":
        raise GraphError(f"node '{name}' samples from prompts with images, whose tokens cannot be cut off; use overlong='drop'")


def check_options(name: str, generator: Generator, prompts: Output, **options: Any) -> None:
    """Raise GraphError for options that exclude each other, or that a generator with `routes`, or prompts with images, exclude."""
    check_images(name, generator, prompts, **options)
    refill = options["refill"]
    if options["tools"] is not None and options["agent"] is not None:
        raise GraphError(
            f"node '{name}' has tools= and agent=; choose one: an environment receives parsed tool calls with rg.Agent(…, calls=…)"
        )
    if generator.routes and (options["tools"] is not None or options["agent"] is not None):
        raise GraphError(
            f"node '{name}' samples conversations, and its generator has routes=True: routes are recorded for one turn only; leave out "
            "routes, or tools and agent"
        )
    for option in ("max_turns", "concurrency"):
        if options[option] is not None and options["tools"] is None and options["agent"] is None:
            raise GraphError(
                f"node '{name}' has {option}={options[option]} but no tools and no agent, so there is one turn; pass tools= or agent=, or "
                f"leave {option} out"
            )
    agent = options["agent"]
    if isinstance(agent, Agent) and agent.warm and options["concurrency"] is None:
        raise GraphError(
            f"node '{name}' has Agent(warm={agent.warm}) without concurrency=, so every conversation begins at once and none waits; "
            "pass concurrency=, or leave warm out"
        )
    if refill is not None and not hasattr(refill, "declare"):
        raise GraphError(
            f"node '{name}' has refill={show_value(refill)}; pass the options of the refill, e.g. refill=rg.options.Refill(reward=right)"
        )
