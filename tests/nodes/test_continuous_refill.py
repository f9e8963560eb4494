"""Dynamic sampling beside the next batch: the same batches as one after the other, each prompt once, no token older than the bound."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.letters import CONSTANT, Engine, Letters, data, last_letter, prompts_of

import rlgraph as rg
from rlgraph.engines.api import Request
from rlgraph.nodes.base import Context
from rlgraph.nodes.rollout.dynamic_sampling import DynamicSampler, Group, Refill, batch_of_next, batches


@dataclass
class Versioned(Engine):
    """An engine that notes under which version each request began."""

    context: Context = field(default_factory=Context)
    versions: dict[str, int] = field(default_factory=dict)

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.versions[request.id] = self.context.version


@dataclass
class Arrivals:
    """Versions as the runtime lets them come: at step k those up to k, at a poll by chance."""

    context: Context
    draw: random.Random
    step: int = 0

    def poll(self) -> None:
        if self.context.version < self.step and self.draw.random() < 0.2:
            self.context.version += 1

    def wait(self, version: int) -> None:
        assert version <= self.step, "this version is trained on a batch that is not sampled yet"
        self.context.version = max(self.context.version, version)


@dataclass
class Run:
    """A rank of a rollout with a refill, stepped as the runtime does."""

    kinds: str
    count: int
    depth: int
    rounds: int = 1000
    rank: int = 0
    world: int = 1
    timing: int = 0
    interrupt: str | None = None
    continuous: bool = True
    takes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator, prompts = rg.Generator("m", pool=rg.Pool("p")), rg.prompts(data(self.kinds), count=self.count)
        options: dict[str, Any] = {"continuous": self.continuous, "interrupt": self.interrupt}
        refill = Refill(reward=last_letter, rounds=self.rounds)
        weights = rg.feedback("w", depth=self.depth)
        output = generator.rollout(prompts, weights, group_size=2, refill=refill, **options)
        self.context = Context(rank=self.rank, world=self.world, cache={"m": Letters()})
        self.engine = self.context.engine = Versioned(random.Random(self.timing), self.takes, context=self.context)
        self.context.arrivals = self.arrivals = Arrivals(self.context, random.Random(self.timing))
        self.source = output.node.operation.draws_from  # type: ignore[attr-defined]
        stage = output.node.operation.start(self.context)
        assert isinstance(stage, DynamicSampler)
        self.stage = stage

    def step(self, step: int) -> tuple[list[int], dict[str, float]]:
        self.context.version = max(self.context.version, step - self.depth)
        self.arrivals.step = step
        columns, metrics = self.stage(step, {})
        return prompts_of(columns), dict(metrics)

    def oldest(self, prompts: list[int]) -> int:
        return min(self.engine.versions[f"{self.stage.operation.rollout.prefix}{p}.{m}"] for p in prompts for m in range(2))


def expected(run: Run, steps: int) -> list[list[int]]:
    """What each batch holds: the first groups that differ, and constant ones where all rounds are used up."""
    found, at = [], run.rank
    wanted = run.count * (run.rank + 1) // run.world - run.count * run.rank // run.world
    for _ in range(steps):
        drawn: list[int] = []
        differing: list[int] = []
        while len(differing) < wanted and len(drawn) < wanted * run.rounds:
            drawn.append(at)
            differing += [] if run.source.item(at)["prompt"].startswith(CONSTANT) else [at]
            at += run.world
        constant = [p for p in drawn if p not in differing]
        found.append(sorted(differing + constant[: wanted - len(differing)]))
    return found


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.text(alphabet=[CONSTANT, "d"], min_size=1, max_size=9).filter(lambda kinds: "d" in kinds),
    count=st.integers(1, 6),
    depth=st.integers(1, 3),
    rounds=st.sampled_from([2, 3, 1000]),
    world=st.integers(1, 3),
    rank=st.integers(0, 2),
    timing=st.integers(0, 9),
    interrupt=st.sampled_from([None, "keep"]),
)
def test_batches_are_those_of_one_after_the_other_each_prompt_once_within_the_bound(
    kinds: str, count: int, depth: int, rounds: int, world: int, rank: int, timing: int, interrupt: str | None
) -> None:
    run = Run(kinds, count, depth, rounds, rank % world, world, timing, interrupt)
    wanted = expected(run, 5)
    for step in range(5):
        prompts, metrics = run.step(step)
        assert prompts == wanted[step]
        if prompts:
            assert step - depth <= run.oldest(prompts) <= step
        assert metrics["dynamic_sampling/prompts"] >= len(prompts) * world
    assert len(run.engine.begun) == len(set(run.engine.begun))


@pytest.mark.parametrize("interrupt", [None, "keep"])
def test_the_next_batch_decodes_beside_the_tail_of_this_one(interrupt: str | None) -> None:
    kinds = "dddddddd"
    beside, after = (Run(kinds, 4, 1, takes={}, timing=3, interrupt=interrupt, continuous=on) for on in (True, False))
    for run in (beside, after):
        for step in range(6):
            run.step(step)
    assert beside.engine.steps < after.engine.steps
    assert beside.engine.most > after.engine.most
    assert beside.engine.most <= 2 * 4 * 2, "one batch ahead, and no more"


def test_a_batch_that_lacks_a_group_takes_the_first_of_the_next_which_draws_another() -> None:
    """Four groups a batch. The one at place 3 is constant and slow: by then groups 4 to 7 are under way, and 4 becomes one of the first."""
    run = Run("dddddddddcdd", 4, 1, takes={"d": 3, CONSTANT: 9})
    assert [run.source.item(place)["prompt"][0] for place in range(5)] == ["d", "d", "d", CONSTANT, "d"]
    prompts, metrics = run.step(0)
    assert prompts == [0, 1, 2, 4]
    assert metrics["dynamic_sampling/filtered_groups"] == 1
    begun = [int(name.rpartition(": ")[2].partition(".")[0]) for name in run.engine.begun]
    assert max(begun) >= 7, "the next batch was under way"
    assert run.step(1)[0] == [5, 6, 7, 8]


@settings(deadline=None, max_examples=40)
@given(
    kinds=st.text(alphabet=[CONSTANT, "d"], min_size=2, max_size=9).filter(lambda kinds: "d" in kinds),
    timing=st.integers(0, 9),
    cut=st.integers(1, 4),
)
def test_a_resume_trains_no_prompt_twice_and_leaves_none_out(kinds: str, timing: int, cut: int) -> None:
    before, after = Run(kinds, 4, 2, timing=timing), Run(kinds, 4, 2, timing=timing + 1)
    found = [before.step(step)[0] for step in range(cut)]
    after.stage.load_state(before.stage.state())
    found += [after.step(step)[0] for step in range(cut, 6)]
    assert found == expected(before, 6)


def test_a_run_depends_on_its_seed_and_depth_alone() -> None:
    """Without interrupt: the same responses under the same versions, whenever versions arrive."""
    runs = [Run("dcddcdddd", 4, 2, timing=5) for _ in range(2)]
    runs[1].arrivals.draw = random.Random(99)
    for run in runs:
        for step in range(6):
            run.step(step)
    assert runs[0].engine.versions == runs[1].engine.versions


def groups(kinds: str) -> list[Group]:
    """Groups that differ (d), are constant (c) or still decode (?)."""
    found = []
    for position, kind in enumerate(kinds):
        group = Group(position, {}, ())
        if kind != "?":
            group.score(torch.tensor([1.0, 1.0 if kind == "c" else 0.0]))
        found.append(group)
    return found


def test_batches_end_with_the_last_group_that_they_need_or_are_let_draw() -> None:
    def cut(kinds: str, wanted: int, most: int) -> list[str]:
        return ["".join(kinds[group.position] for group in batch) for batch in batches(groups(kinds), wanted, most)]

    assert cut("dcd?cd", 2, 99) == ["dcd", "?cd"]
    assert cut("ccccdd", 2, 4) == ["cccc", "dd"]
    assert cut("d", 2, 4) == []
    assert [batch_of_next(groups(kinds), 2, 4) for kinds in ("", "d", "d?", "d??", "dc", "cccc", "c???")] == [0, 0, 1, 1, 0, 1, 1]


@settings(deadline=None, max_examples=80)
@given(kinds=st.text(alphabet="dc?", max_size=24), wanted=st.integers(1, 4), rounds=st.integers(2, 4), ends=st.randoms())
def test_a_group_ends_up_in_the_batch_that_it_was_drawn_for_or_an_earlier_one(kinds: str, wanted: int, rounds: int, ends: Any) -> None:
    now = groups(kinds)
    drawn_for = {group.position: number for number, batch in enumerate(batches(now, wanted, wanted * rounds)) for group in batch}
    ended = groups("".join(kind if kind != "?" else ends.choice("dc") for kind in kinds))
    last = batch_of_next(now, wanted, wanted * rounds)
    for number, batch in enumerate(batches(ended, wanted, wanted * rounds)):
        for group in batch:
            assert number <= drawn_for.get(group.position, last)
