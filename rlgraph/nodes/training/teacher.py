"""Teachers of distillation: references on separate pools, which score a student's responses; several of them, chosen by the source of a
row."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from rlgraph.columns import Column, Columns
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Node, Operation, Output, declare
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage, list_columns, tensor_of
from rlgraph.nodes.examples import Examples
from rlgraph.nodes.items import read
from rlgraph.nodes.prompts import Prompts
from rlgraph.nodes.training.policy import sampling_temperature
from rlgraph.nodes.training.reference import Reference
from rlgraph.nodes.training.trained_model import TOKENS, ModelScores, beside_tokens, check_scored, check_whole_vocabulary
from rlgraph.settings import Count, Name, check_arguments, refuse_unknown

OWN = ("teacher_log_probs",)
TOP = ("teacher_top_ids", "teacher_top_log_probs")


@dataclass(frozen=True, eq=False)
class Teaching(ModelScores):
    """Score responses by the teacher: the sampled tokens, and with `top` its most probable tokens; `only` the rows of one source."""

    temperature: float
    top: bool
    top_k: int | None
    only: str | None

    @property
    def traits(self) -> NodeTraits:
        return replace(super().traits, dims={} if self.top_k is None else {"K": self.top_k})

    def start(self, context: Context) -> Stage:
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Columns:
        batch = dict(columns)
        if self.only is not None:
            own = torch.tensor([source == self.only for source in batch.pop("data_sources")])
            batch["response_mask"] = mask = tensor_of(columns, "response_mask") & own[:, None]
            if not bool(mask.any()):
                return self.nothing(mask)
        if not self.top:
            return {OWN[0]: context.engine.scores(batch, temperature=self.temperature)}
        found = context.engine.top_scores(batch, self.top_k, temperature=self.temperature)
        return dict(zip((*OWN, *TOP), found, strict=True))

    def nothing(self, mask: torch.Tensor) -> Columns:
        """Make the columns of a batch without a row of its source."""
        found: dict[str, Column] = {OWN[0]: torch.zeros(mask.shape)}
        if self.top:
            size = check_model(self.model.path).vocab_size
            shape = (*mask.shape, min(self.top_k or size, size))
            found |= {TOP[0]: torch.zeros(shape, dtype=torch.int32), TOP[1]: torch.zeros(shape)}
        return found


@refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class Teacher(Reference):
    """A frozen model that a student learns from. It must have the student's vocabulary.

    >>> import rlgraph as rg
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1))
    >>> teacher = rg.Teacher("larger", pool=rg.Pool("teacher"))
    >>> teacher.log_probs(rollout).columns, teacher.top_log_probs(rollout, top_k=64).columns
    (('teacher_log_probs',), ('teacher_log_probs', 'teacher_top_ids', 'teacher_top_log_probs'))

    On a separate pool it overlaps with rollout and update; on the policy's pool they time-share. With the trainer "vllm" it scores the
    responses as prompts of vLLM, at temperature 1, and `top_k` cannot be None.
    """

    role: ClassVar[str] = "teacher"

    @check_arguments()
    def log_probs(  # type: ignore[override]  # a student's own responses are not cached
        self, *inputs: Output, only: Name | None = None, name: str = "teacher_log_probs"
    ) -> Output:
        """Declare `teacher_log_probs` [B, T], for `rg.estimators.TeacherKL`. `only` restricts it to the rows of this `data_source`."""
        return self._declare_scores(name, inputs, OWN, top=False, top_k=None, only=only)

    @check_arguments()
    def top_log_probs(
        self, *inputs: Output, top_k: Count | None = 64, only: Name | None = None, name: str = "teacher_top_log_probs"
    ) -> Output:
        """Declare `teacher_top_ids` and `teacher_top_log_probs` [B, T, K] next to `teacher_log_probs`, for `rg.losses.DistillationLoss`.

        They are the teacher's `top_k` most probable tokens at each position; 64 need 512 bytes per token. With None they are the whole
        vocabulary, for small vocabularies or few tokens. `only` restricts it to the rows of this `data_source`.
        """
        return self._declare_scores(name, inputs, (*OWN, *TOP), top=True, top_k=top_k, only=only)

    def _declare_scores(self, name: str, inputs: Any, writes: tuple[str, ...], *, top: bool, top_k: int | None, only: str | None) -> Output:
        if top:
            check_whole_vocabulary(name, self)
        temperature = sampling_temperature(inputs)
        check_scored(name, self, temperature, top_k if top else 1)
        operation = Teaching(self, temperature, top, top_k, only)
        reads = (*TOKENS, *beside_tokens(name, self, inputs), *(() if only is None else ("data_sources",)))
        return Output(declare(name, operation, inputs, reads=reads, writes=writes, model=self))


@dataclass(frozen=True, eq=False)
class BySource(Operation):
    """Select each row from the teacher of its source."""

    sources: tuple[str, ...]
    columns: tuple[str, ...]
    teachers: tuple[str, ...]  # the prefixes of their columns

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(by_group=True, given=())

    def check(self, node: Node) -> None:
        """Raise GraphError for a row of the data without a teacher, if the data can be read before the run."""
        origin = node.inputs[0].node
        data = origin.operation.data if isinstance(origin.operation, Prompts | Examples) else ()
        for index in range(len(data)):
            source = read(data, index).get("data_source")
            if source not in self.sources:
                raise GraphError(f"node '{node.name}': item {index} of '{origin.name}' {self._without(source)}")

    def _without(self, source: object) -> str:
        return f"has the data_source {source!r}, for which there is no teacher among {list(self.sources)}: pass one, or leave the row out"

    def start(self, context: Context) -> Stage:
        return lambda step, columns: self.fire(columns)

    def fire(self, columns: Columns) -> Fired:
        sources = columns[f"{self.teachers[0]}data_sources"]
        unknown = next((source for source in sources if source not in self.sources), None)
        if unknown is not None:
            raise GraphError(f"a row {self._without(unknown)}")
        made: dict[str, Column] = {}
        for name in self.columns:
            scores = made[name] = tensor_of(columns, f"{self.teachers[0]}{name}").clone()
            for source, teacher in zip(self.sources[1:], self.teachers[1:], strict=True):
                rows = torch.tensor([own == source for own in sources])
                scores[rows] = tensor_of(columns, f"{teacher}{name}")[rows]
        return made, {f"teachers/{source}": float(sum(own == source for own in sources)) for source in self.sources}


@check_arguments()
def by_source(*inputs: Output, teachers: Mapping[str, Teacher], top_k: Count | None = None, name: Name = "by_source") -> Output:
    """Declare scores by several teachers: each row is scored by the teacher of its `data_source`, and by no other.

    >>> import rlgraph as rg
    >>> prompts = rg.prompts([{"prompt": "1 + 1 =", "data_source": "maths"}, {"prompt": "def", "data_source": "code"}], count=4)
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts)
    >>> maths, code = (rg.Teacher(name, pool=rg.Pool(name)) for name in ("maths", "code"))
    >>> rg.options.by_source(prompts, rollout, teachers={"maths": maths, "code": code}, top_k=64).columns
    ('teacher_log_probs', 'teacher_top_ids', 'teacher_top_log_probs')

    Without `top_k` only the sampled tokens are scored. Metrics: `teachers/NAME`, the rows of each. Raises GraphError for inputs without
    `data_sources`, and, during the run, for a source without a teacher.
    """
    if len(teachers) < 2:
        raise GraphError(f"node '{name}' has teachers={list(teachers)}; it needs two or more: for one, call teacher.log_probs(rollout)")
    if "data_sources" not in list_columns(inputs):
        raise GraphError(f"node '{name}' needs the column data_sources; pass prompts whose items have a data_source, next to the rollout")
    scored = []
    for source, teacher in teachers.items():
        own = f"{name} {source}"
        scored.append(
            teacher.log_probs(*inputs, only=source, name=own)
            if top_k is None
            else teacher.top_log_probs(*inputs, top_k=top_k, only=source, name=own)
        )
    columns = OWN if top_k is None else (*OWN, *TOP)
    fronts = tuple(f"teacher{number}." for number in range(len(teachers)))  # a source may be any text
    sources = next(o for o in inputs if "data_sources" in o.columns).with_prefix(fronts[0])
    reads = (f"{fronts[0]}data_sources", *(front + column for front in fronts for column in columns))
    apart = [output.with_prefix(front) for front, output in zip(fronts, scored, strict=True)]
    operation = BySource(tuple(teachers), columns, fronts)
    return Output(declare(name, operation, [sources, *apart], reads=reads, writes=columns, rows=scored[0].node.rows))
