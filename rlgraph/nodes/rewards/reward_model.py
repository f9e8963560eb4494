"""Reward model: a sequence-classification model that scores responses, on a pool."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from rlgraph.columns import Columns
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Model, Node, Operation, Output, declare
from rlgraph.graph.traits import ModelTraits, NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage, list_columns
from rlgraph.nodes.prompts import Prompts
from rlgraph.nodes.rewards.reward import check_column, spread
from rlgraph.nodes.rewards.scoring import TOKEN_COLUMNS, texts_of, tokenizer_of
from rlgraph.nodes.training.trained_model import check_folder
from rlgraph.settings import Count, Dtype, Natural, check_arguments, refuse_unknown

MESSAGES = "prompt_messages"


@refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class RewardModel(Model):
    """A sequence-classification model that scores a response to a prompt.

    >>> import rlgraph as rg
    >>> prompts = rg.prompts([{"prompt": "1 + 1 ="}], count=1)
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts)
    >>> rg.RewardModel("judge", pool=rg.Pool("judge", gpus=4)).rewards(prompts, rollout).columns
    ('rewards',)

    Each device of its pool holds the model and scores its share of the batches; the scores are bit-identical to one device's. Prompt and
    response go through this model's chat template, the messages of a conversation one by one with their roles. Without a template
    they are joined as text.

    * `batch_tokens`: the most tokens per batch, padding included. A step with fewer than `batch_tokens` per device leaves devices idle.
    * `label`: the index of the output to use, for a model with several. None: the model has one.
    * `dtype`: "auto" is bfloat16 if the device computes in it, else float32.

    >>> import rlgraph as rg
    >>> data = rg.prompts([{"prompt": "1 + 1 ="}], count=4)
    >>> answers = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(data)
    >>> rg.RewardModel("scorer", pool=rg.Pool("scores")).rewards(answers).columns
    ('rewards',)
    """

    role: ClassVar[str] = "reward_model"
    dtype: Dtype = "auto"
    batch_tokens: Count = 16384
    label: Natural | None = None

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(dtype=self.dtype)

    def load(self, context: Any) -> Any:
        from rlgraph.engines import registry

        return registry.score_engine(self, context)

    @check_arguments()
    def rewards(self, *inputs: Output, writes: str = "rewards", name: str = "reward") -> Output:
        """Declare `rewards` [B]: the model's score of each response to its prompt. A rollout with `chunks` is scored part by part.

        Pass the rollout. Pass the prompts too if their texts hold more than the rollout's tokenizer decodes, e.g. special tokens. Prompts
        that are conversations are found automatically. Metrics are the same as with `rg.reward`. Raises GraphError for inputs without
        the responses of a rollout. The launch raises DataError for a conversation that the model's template refuses.
        """
        check_column(name, writes)
        tokenizer = tokenizer_of(inputs)
        if tokenizer is None:
            raise GraphError(f"node '{name}' was given no rollout whose model's tokenizer can decode the responses; pass the rollout")
        once = {column for column, count in Counter(list_columns(inputs)).items() if count == 1}
        prompt = ("prompt_texts",) if "prompt_texts" in once else ("prompts", TOKEN_COLUMNS["prompts"])
        inputs = with_conversations(inputs)
        if "prompt_images" in list_columns(inputs) or "images" in list_columns(inputs):
            raise GraphError(
                f"node '{name}' is of a reward model, which reads texts, and its inputs have images; use rg.reward or rg.LearnedReward"
            )
        messages = (MESSAGES,) if MESSAGES in list_columns(inputs) else ()
        reads = ("responses", TOKEN_COLUMNS["responses"], *prompt, *messages)
        operation = ModelReward(self, tokenizer, prompt[0], writes)
        return Output(declare(name, operation, inputs, reads=reads, writes=(writes,), model=self))


def with_conversations(inputs: tuple[Output, ...]) -> tuple[Output, ...]:
    """Add the prompts of a rollout among the inputs if they are conversations and no input carries their messages."""
    if MESSAGES in list_columns(inputs):
        return inputs
    rollouts = [output.node for output in inputs if isinstance(output, Output) and output.node.traits.sampling is not None]
    sources = [source for node in rollouts if node.traits.draws_from is None for source in node.inputs if MESSAGES in source.columns]
    return (*inputs, *dict.fromkeys(sources))


@dataclass(frozen=True, eq=False)
class ModelReward(Operation):
    """Decode prompts and responses with the rollout's tokenizer, and score them with the model."""

    model: RewardModel
    tokenizer: str  # model folder
    prompts: str  # the column
    writes: str

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work="forward", by_group=True)

    def check(self, node: Node) -> None:
        from rlgraph.engines.hf.chat_template import check_answered
        from rlgraph.engines.hf.model_files import check_tokenizer

        check_folder(self.model.path)
        tokenizer = check_tokenizer(self.model.path)
        sources = [output.node.operation for output in node.inputs if MESSAGES in output.columns]
        for source in (source for source in sources if isinstance(source, Prompts)):
            columns = source.columns([source.row(index) for index in range(source.size)])
            check_answered(self.model.path, tokenizer, [str(text) for text in columns[MESSAGES]])

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.tokenizer)
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Fired:
        prompts = columns[self.prompts]
        texts = prompts if isinstance(prompts, list) else texts_of(context, self.tokenizer, "prompts", columns)
        conversations = [str(text) for text in columns.get(MESSAGES, ())]
        scores = context.engine.scores(texts, texts_of(context, self.tokenizer, "responses", columns), conversations)
        return {self.writes: scores}, spread(self.writes, scores)
