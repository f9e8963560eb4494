"""Reward model: a sequence-classification model that scores responses, on a pool."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from rlgraph.columns import Columns
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Model, Node, Output, declare
from rlgraph.graph.operation import ModelTraits, NodeTraits, Operation
from rlgraph.nodes.base import Context, Fired, Stage, carried
from rlgraph.nodes.rewards.reward import check_column, spread
from rlgraph.nodes.rewards.scoring import TOKEN_COLUMNS, texts_of, tokenizer_of
from rlgraph.nodes.training.training import check_folder
from rlgraph.settings import Count, Dtype, Natural, checked


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardModel(Model):
    """A sequence-classification model that scores a response to a prompt. `path` is a folder in Hugging Face format.

    >>> import rlgraph as rg
    >>> prompts = rg.prompts([{"prompt": "1 + 1 ="}], count=1)
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts)
    >>> rg.RewardModel("judge", pool=rg.Pool("judge", gpus=4)).rewards(prompts, rollout).columns
    ('rewards',)

    Each device of its pool holds the model and scores its share of the batches; the scores are those of one device, bit for bit.
    `batch_tokens` bounds the tokens of a batch, padding included: a step of fewer tokens than `batch_tokens` for each device leaves
    devices idle. `label` chooses the output of a model with several. Prompt and
    response go through the model's chat template; without one they are joined. `dtype` "auto" is bfloat16 if the device computes in
    it, else float32.

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
        from rlgraph.engines import load

        return load.score_engine(self, context)

    @checked()
    def rewards(self, *inputs: Output, writes: str = "rewards", name: str = "reward") -> Output:
        """Declare `rewards` [B]: the model's score of each response to its prompt. A rollout with `chunks` is scored part by part.

        Pass the rollout. Pass the prompts too if their texts hold more than the rollout's tokenizer decodes, as special tokens. Metrics
        are those of `rg.reward`. Raises GraphError for inputs without the responses of a rollout.
        """
        check_column(name, writes)
        tokenizer = tokenizer_of(inputs)
        if tokenizer is None:
            raise GraphError(f"node '{name}' was given no rollout whose model's tokenizer can decode the responses; pass the rollout")
        once = {column for column, count in Counter(carried(inputs)).items() if count == 1}
        prompt = ("prompt_texts",) if "prompt_texts" in once else ("prompts", TOKEN_COLUMNS["prompts"])
        reads = ("responses", TOKEN_COLUMNS["responses"], *prompt)
        operation = ModelReward(self, tokenizer, prompt[0], writes)
        return Output(declare(name, operation, inputs, reads=reads, writes=(writes,), model=self))


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
        from rlgraph.engines.hf_models.model_files import check_tokenizer

        check_folder(self.model.path)
        check_tokenizer(self.model.path)

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.tokenizer)
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Fired:
        prompts = columns[self.prompts]
        texts = prompts if isinstance(prompts, list) else texts_of(context, self.tokenizer, "prompts", columns)
        scores = context.engine.scores(texts, texts_of(context, self.tokenizer, "responses", columns))
        return {self.writes: scores}, spread(self.writes, scores)
