"""Evaluation: every few steps a generator answers a separate data set; means, verl's bootstrap and pass@k of the scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlgraph.columns import Column, Columns, repeat_rows, rows_of_rank, truncation_mask
from rlgraph.data.rows import Dataset, Mix
from rlgraph.engines.hf.chat_template import encode_with_images
from rlgraph.engines.registry import sampling_of
from rlgraph.errors import DataError, GraphError, choices
from rlgraph.graph.nodes import Due, Feedback, Node, Operation, Output, declare
from rlgraph.graph.traits import ImageSizes, NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage
from rlgraph.nodes.conversations import Chat
from rlgraph.nodes.prompts import Prompts, is_stream, plural, prompts
from rlgraph.nodes.rewards.calls import Calls, Retry
from rlgraph.nodes.rewards.reward import DEADLINE_S, Concurrency, RewardFunction
from rlgraph.nodes.rewards.scoring import Score, Scoring, match_parameters
from rlgraph.nodes.rollout.decode_loop import columns_of
from rlgraph.nodes.rollout.fitting import check_prompts, most_tokens
from rlgraph.nodes.rollout.rollout import Generator
from rlgraph.notices import accept_old_names
from rlgraph.settings import Count, Finite, Name, Seconds, check_arguments
from rlgraph.values.sampling import Sampling

# Best, worst and majority of k answers to an item, estimated by a bootstrap over its n answers with verl's draws.

DRAWS = 1000
SEED = 42  # verl's: the same draws for every item, variable and step


def sizes(answers: int) -> list[int]:
    """List the k of an item with this many answers: 2, 4, 8, … and all of them; none for a single answer.

    >>> sizes(6)
    [2, 4, 6]
    """
    return [1 << i for i in range(1, answers.bit_length()) if 1 << i < answers] + ([answers] if answers > 1 else [])


@lru_cache(maxsize=16)
def draws(answers: int, k: int) -> npt.NDArray[np.int64]:
    """Draw k of an item's answers with replacement, 1000 times; return their indices, [1000, k]."""
    return np.random.RandomState(SEED).choice(answers, size=(DRAWS, k), replace=True)


def bootstrap(values: Sequence[float], votes: Sequence[str] | None = None) -> dict[str, float]:
    """Compute `best@k/mean`, `worst@k/mean` and, with `votes`, `maj@k/mean` of an item's answers, and each's `std` over the draws.

    `maj@k` is the score of the most frequent answer among k, the first drawn one among equals; its score is the score of the first
    response with this answer. Bit-identical to verl 0.9.1's `bootstrap_metric` and `calc_maj_val`.

    >>> found = bootstrap([1.0, 0.0, 0.0], ["4", "5", "5"])
    >>> found["best@2/mean"], found["maj@3/mean"]
    (0.574, 0.284)
    """
    given = np.asarray(values, dtype=np.float64)
    found: dict[str, float] = {}
    for k in sizes(len(given)):
        drawn = given[draws(len(given), k)]
        outcomes = {"best": drawn.max(-1), "worst": drawn.min(-1)}
        if votes is not None:
            outcomes["maj"] = drawn[np.arange(DRAWS), _majority_places(votes, k)]
        for name, outcome in outcomes.items():
            found |= {f"{name}@{k}/mean": float(outcome.mean()), f"{name}@{k}/std": float(outcome.std())}
    return found


def _majority_places(votes: Sequence[str], k: int) -> npt.NDArray[np.int64]:
    """Find in each draw the index of the first response with the most frequent answer, [1000]."""
    numbers = {vote: number for number, vote in enumerate(dict.fromkeys(votes))}
    cast = np.array([numbers[vote] for vote in votes])[draws(len(votes), k)]
    rows = np.arange(DRAWS)[:, None]
    counts = np.bincount((rows * len(numbers) + cast).ravel(), minlength=DRAWS * len(numbers)).reshape(DRAWS, -1)
    return counts[rows, cast].argmax(-1)


# Metrics of an evaluation: means, verl's bootstrap of best, worst and majority, and the unbiased pass@k.


@dataclass(frozen=True)
class Item:
    """The answers to one item: their rewards, how right each is (`acc`), and each answer (`votes`), if the scorer returns it."""

    rewards: Sequence[float]
    acc: Sequence[float]
    passed: int
    votes: Sequence[str] | None

    @classmethod
    def of(cls, scores: Sequence[Score], passes: float, tells: bool) -> "Item":
        """Make an item from its scores. An answer is right if its `acc`, or without `acc` its reward, is at least `passes`.

        `tells`: whether the scorer returns answers. A response without one then votes for "".
        """
        right = [(score if score.acc is None else score.acc) >= passes for score in scores]
        acc = [float(passed) if score.acc is None else score.acc for score, passed in zip(scores, right, strict=True)]
        votes = [score.pred or "" for score in scores] if tells else None
        return cls([float(score) for score in scores], acc, sum(right), votes)


def summary(scores: Sequence[Sequence[Score]], sources: Sequence[str], passes: float) -> dict[str, float]:
    """Compute the metrics of the scores of N items with n answers each, over all items and, as `source/...`, over each source's items.

    They are `acc/mean@n`, `acc/std@n`, the results of `bootstrap`, e.g. `acc/best@k/mean`, `pass@k` for k of 1, 2, 4, … and n, and of the
    plain rewards `reward/mean@n` and `reward/std@n`. Each is the mean over items. `acc/stderr` is the standard error of `acc/mean@n` over
    items. An empty source has no separate metrics.
    """
    tells = any(score.pred is not None for answers in scores for score in answers)
    items = [Item.of(answers, passes, tells) for answers in scores]
    of_items = [_of_item(item) for item in items]
    found = _over(of_items)
    for source in sorted(set(sources) - {""}):
        own = _over([metrics for metrics, s in zip(of_items, sources, strict=True) if s == source])
        found |= {f"{source}/{name}": value for name, value in own.items()}
    return found


def _of_item(item: Item) -> dict[str, float]:
    samples = len(item.acc)
    found = {f"acc/{name}": value for name, value in bootstrap(item.acc, item.votes).items()}
    for name, values in (("acc", item.acc), ("reward", item.rewards)):
        found[f"{name}/mean@{samples}"] = float(np.mean(values))
        if samples > 1:
            found[f"{name}/std@{samples}"] = float(np.std(values))
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i < samples]
    return found | {f"pass@{k}": pass_at(k, samples, item.passed) for k in (*powers, samples)}


def _over(items: Sequence[dict[str, float]]) -> dict[str, float]:
    found = {name: float(np.mean([item[name] for item in items])) for name in items[0]}
    if len(items) > 1:
        mean = next(name for name in found if name.startswith("acc/mean@"))
        found["acc/stderr"] = float(np.std([item[mean] for item in items], ddof=1) / len(items) ** 0.5)
    return found


def pass_at(k: int, samples: int, right: int) -> float:
    """Estimate the probability that at least one of k samples passes, without bias, given that `right` of `samples` passed.

    Source: Chen et al., 2021 (Evaluating Large Language Models Trained on Code), equation 1.

    >>> round(pass_at(2, 4, 1), 3)
    0.5
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


# Evaluation: every few steps a generator answers a separate data set, and a reward scores the answers during the training.

NAME, SOURCE = "evaluate", "data_source"
ANSWERS = ("responses", "response_mask", "weight_version", "finish_reasons", "group_ids")
ASKED = ("prompts", "prompt_mask")  # read only by a recorder of samples, as images are


@accept_old_names(at_once="concurrency")
@check_arguments()
def evaluate(
    generator: Generator,
    data: Dataset,
    weights: Feedback | None,
    *,
    reward: RewardFunction,
    every: Count,
    samples: Count = 1,
    sampling: Sampling | None = None,
    steps: Count | None = None,
    at_start: bool = False,
    chat: Chat | None = None,
    passes: Finite = 1.0,
    prompt: Name = "prompt",
    source: Name = SOURCE,
    concurrency: Concurrency | None = None,
    deadline_s: Seconds = DEADLINE_S,
    retries: Retry | None = None,
    trial: bool = True,
    name: Name = NAME,
) -> Output:
    """Declare an evaluation: every `every` steps, sample responses to each item of `data` and score them.

    >>> import rlgraph as rg
    >>> generator, weights = rg.Generator("tiny", pool=rg.Pool("rollout")), rg.feedback("weights", depth=1)
    >>> items, right = [{"prompt": "1 + 1 =", "answer": "2"}], lambda response, answer: float(answer in response)
    >>> rg.evaluate(generator, items, weights, reward=right, every=10)  # for rg.Graph("name", step.metrics, evaluation)
    the metrics of 'evaluate rewards'

    * `generator`: the rollout's generator time-shares with the rollout and uses the same weights. A separate generator in its own pool
      overlaps with the training, and uses the weights that the step publishes. The metrics of its step and of later steps wait for it.
    * `data`, `chat`, `prompt`: the items, as for `rg.prompts`.
    * `weights`: the feedback edge. None evaluates the weights of the generator's folder, e.g. in a graph without update.
    * `reward`, `concurrency`, `deadline_s`, `retries`, `trial`: the function that scores, and how it is called, as for `rg.reward`.
    * `every`: the steps between two evaluations.
    * `steps`, `at_start`: adds the last step, given the run's number of steps; and step 0, with the initial weights.
    * `samples`, `sampling`: the responses per item, and a sampling in place of the generator's.
    * `passes`: the least reward of a right answer.
    * `source`, `name`: a field of the items and the node's name; both separate metrics, e.g. `val/gsm8k/acc/mean@4`.

    Metrics (docs/checkpoints.md): `val/version`; `val/acc/mean@n` and `val/reward/mean@n` of n samples; the unbiased `val/pass@k`; verl's
    bootstrap `val/acc/best@k/mean`, `worst@k`, and `maj@k` if the reward returns answers, e.g. `rg.scorers.math_verify`.

    Raises GraphError for several greedy `samples`, an unknown `source` or an evaluation that delays other nodes; DataError as `rg.prompts`.
    """
    questions = _questions(name, data, chat, prompt)
    sampling = _check(name, generator, questions, samples, sampling_of(generator, sampling), source)
    due = Due(every, steps, at_start)
    answer = Answer(generator, questions, samples, sampling, due)
    rows = len(data) * samples
    answers = Output(declare(name, answer, (), reads=(), writes=answer.writes, rows=rows, model=generator, feedback=weights, due=due))
    messages = () if questions.chat is None else ("prompt_messages",)
    texts = ("prompts", "prompt_texts", *messages, *(plural(f) for f in questions.fields))
    scored = match_parameters(
        f"node '{name}'", reward, (*ANSWERS, *texts), generator.path, Calls(concurrency, deadline_s, retries, trial), texts
    )
    for column in (column for column in scored.reads if column not in (*ANSWERS, *texts)):
        raise GraphError(f"node '{name}' reads column '{column}', which its data set lacks; {choices(column, texts)}")
    grade = Grade(scored, questions, samples, passes, source, "val" if name == NAME else f"val/{name}")
    return Output(declare(f"{name} rewards", grade, (answers,), reads=ANSWERS, writes=("rewards",), due=due), "metrics")


def _questions(name: str, data: Dataset, chat: Chat | None, prompt: str) -> Prompts:
    """Make the source of an evaluation's items. Raises DataError for a stream, whose end is unknown, and for a mixture."""
    if is_stream(data):
        raise DataError(f"node '{name}' evaluates on a stream, whose end is not known; read it into rows: rg.data.rows(list(…))")
    if isinstance(data, Mix):
        raise DataError(f"node '{name}' evaluates on a mixture, whose weights would have no effect: evaluate on each of its data sets")
    size = len(data) if hasattr(data, "__len__") and len(data) else 1
    questions = prompts(data, size, chat=chat, prompt=prompt, name=name).node.operation
    assert isinstance(questions, Prompts)
    return questions


def _check(name: str, generator: Generator, questions: Prompts, samples: int, sampling: Sampling, source: str) -> Sampling:
    """Check and return a sampling, and check a source. Raises GraphError for several greedy samples, or an unknown source."""
    if questions.images_in is not None and generator.images is None:
        raise GraphError(f"node '{name}' asks questions with images; set Generator(images=) to the most images of a question")
    if questions.images_in is not None and questions.overlong.policy == "truncate_left":
        raise GraphError(f"node '{name}' asks questions with images, whose tokens cannot be cut off; use overlong='drop'")
    if samples > 1 and sampling.temperature == 0:
        raise GraphError(
            f"node '{name}' has samples={samples} of a greedy sampling, which are all equal; leave samples out, or set a temperature, e.g. "
            "sampling=rg.Sampling(temperature=1.0, top_p=0.7)"
        )
    if source != SOURCE and source not in questions.fields:
        raise GraphError(f"node '{name}' has source='{source}', which the items lack; {choices(source, questions.fields)}")
    return sampling


@dataclass(frozen=True, eq=False)
class Answer(Operation):
    """Sample responses to this rank's share of the items; none at a step that is not due."""

    generator: Generator
    questions: Prompts
    samples: int
    sampling: Sampling
    due: Due

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns of a response."""
        return (*ANSWERS, *ASKED, *(("images",) if self.questions.images_in is not None else ()))

    @property
    def traits(self) -> NodeTraits:
        dims = {"T": self.sampling.max_tokens}
        return NodeTraits(work="generate", dims=dims, sampling=self.sampling, group_size=self.samples, given=())

    @property
    def image_sizes(self) -> ImageSizes:
        """The sizes of the images of its first questions."""
        return self.questions.image_sizes

    def cursor(self, step: int) -> dict[str, Any]:
        """Describe the items for a checkpoint, since a curve must use one data set."""
        return {"items": self.questions.size, "digest": self.questions.digest}

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.generator.path)
        return lambda step, columns: self.fire(context, step)

    def fire(self, context: Context, step: int) -> dict[str, Column]:
        count = self.questions.size if self.due(step) else 0
        mine = rows_of_rank(count, context.rank, context.world)
        asking = self.questions.columns([self.questions.row(i) for i in mine])
        most = most_tokens(self.questions.overlong, context, self.generator.max_context, self.sampling) if mine else None
        path = self.generator.path
        encoded, images = encode_with_images(path, context.tokenizer(path), asking, most) if mine else ([], [])
        asked = [tokens for tokens in encoded for _ in range(self.samples)]
        shown = [own for own in images for _ in range(self.samples)]
        # Each evaluation uses the same seeds, so that two evaluations differ only by their weights. They differ from the seeds of rollouts.
        seeds = [(i * self.samples + sample) * 2 + 1 for i in mine for sample in range(self.samples)]
        responses = context.engine.generate(asked, self.sampling, seeds, **({"images": shown} if any(shown) else {}))
        written = columns_of(asked, responses, torch.tensor(mine, dtype=torch.int64).repeat_interleave(self.samples))
        if "images" in self.writes:
            written["images"] = repeat_rows(asking["prompt_images"], self.samples)
        return {name: written[name] for name in self.writes}

    def check(self, node: Node) -> None:
        """Check model and prompts before anything starts. Raises DataError for a folder without a model, or a prompt that does not fit."""
        self.questions.check(node)
        check_prompts(node, self.generator, self.sampling, self.questions)


@dataclass(frozen=True, eq=False)
class Grade(Operation):
    """Score the responses and report their metrics; none at a step that is not due."""

    scoring: Scoring
    questions: Prompts
    samples: int
    passes: float
    source: str
    prefix: str  # of its metric names

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(given=(self.scoring,))

    def check(self, node: Node) -> None:
        self.scoring.check()

    def trial(self, node: Node, columns: Columns, rows: int) -> None:
        asked = self.questions.columns([self.questions.first] * rows)
        self.scoring.try_on({**columns, "prompts": asked["prompt_texts"], **asked})

    def start(self, context: Context) -> Stage:
        self.scoring.start(context)
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Fired:
        groups = columns["group_ids"]
        assert isinstance(groups, torch.Tensor)
        if not len(groups):
            return {"rewards": torch.zeros(0)}, {}
        fields = {name: [column[i] for i in groups.tolist()] for name, column in self.items.items()}
        graded = self.scoring.grade(context, {**columns, **fields})
        scores = graded.scores
        sources = [str(s) for s in fields.get(plural(self.source), [""] * len(scores))[:: self.samples]]
        found = summary([scores[i : i + self.samples] for i in range(0, len(scores), self.samples)], sources, self.passes)
        found |= {f"reward/{name}": value for name, value in graded.metrics(self.scoring.retry).items()}
        mask, versions = columns["response_mask"], columns["weight_version"]
        assert isinstance(mask, torch.Tensor)
        assert isinstance(versions, torch.Tensor)
        found["response_length/mean"] = mask.sum(-1).float().mean().item()
        found["response/truncated"] = truncation_mask(columns).float().mean().item()
        found["version"] = float(versions.max())
        rewards = torch.tensor([float(score) for score in scores])
        return {"rewards": rewards}, {f"{self.prefix}/{name}": value for name, value in (found | self.questions.metrics).items()}

    @cached_property
    def items(self) -> dict[str, list[Any]]:
        """The columns of the whole data set, in order."""
        data = [self.questions.row(i) for i in range(self.questions.size)]
        columns = replace(self.questions, images_in=None).columns(data).items()  # no grader reads the images
        found = {name: column.tolist() if isinstance(column, torch.Tensor) else list(column) for name, column in columns}
        return {"prompts": found["prompt_texts"], **found}
