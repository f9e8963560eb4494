"""Batches that decode together: whatever the timing, each gets its own prompts, keeps its bound, and leaves in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlgraph as rg
from rlgraph.engines.api import GenerateEngine, Request, Response
from rlgraph.errors import DataError, GraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.rollout.decode_loop import DecodeLoop, OneTurn, Task
from rlgraph.values.sampling import BatchAdmission, Running, Sampling

STEPS = 7


class Echo(GenerateEngine):
    """Writes the number that its weights are, as often as a request's `max_tokens` says; decodes `room` requests at a time."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.number, self.steps = room, 0, 0
        self.rows: dict[str, tuple[Request, list[int]]] = {}

    def submit(self, request: Request) -> None:
        assert request.id not in self.rows
        self.rows[request.id] = (request, [])

    def decode(self) -> dict[str, Response]:
        self.steps += 1
        for _, tokens in list(self.rows.values())[: self.room]:
            tokens.append(self.number)
        done = [name for name, (request, tokens) in self.rows.items() if len(tokens) == request.sampling.max_tokens]
        return self.drop(done)

    def count_requests(self) -> int:
        return len(self.rows)

    def count_tokens(self) -> dict[str, int]:
        return {name: len(tokens) for name, (_, tokens) in self.rows.items()}

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        gone = {name: self.rows.pop(name)[1] for name in ids}
        return {name: Response(tokens, [-1.0 * number for number in tokens]) for name, tokens in gone.items()}

    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None:
        self.number = int(weights["number"])

    def context_length(self) -> int:
        return 100

    def close(self) -> None:
        pass


@dataclass
class Trainer:
    """Publishes version k + 1 so many decode steps after it got batch k; one batch after another."""

    context: Context
    delays: Sequence[int]
    clock: int = 0  # decode steps, and those that would have fitted into waits
    published: dict[int, int] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)

    def deliver(self, step: int) -> None:
        self.published[step + 1] = max(self.now(), self.published.get(step, 0)) + self.delays[step]

    def now(self) -> int:
        return self.context.engine.steps + self.clock

    def poll(self) -> None:
        while (due := self.published.get(self.context.version + 1)) is not None and due <= self.now():
            self._load()

    def wait(self, version: int) -> None:
        while self.context.version < version:
            assert self.context.version + 1 in self.published, "waits for a version that needs the batch it decodes: a deadlock"
            self.clock += max(0, self.published[self.context.version + 1] - self.now())
            self._load()
            self.waits.append(self.context.version)

    def _load(self) -> None:
        self.context.version += 1
        self.context.engine.load_weights({"number": torch.tensor(self.context.version)}, version=self.context.version)


@dataclass(frozen=True)
class Case:
    rule: BatchAdmission
    lengths: tuple[tuple[int, ...], ...]  # of the responses, by step
    delays: tuple[int, ...]
    room: int
    latest: bool = False


@st.composite
def cases(draw: st.DrawFn, interrupts: Sequence[Running | None] = (None, "keep", "recompute")) -> Case:
    rows = draw(st.integers(1, 5))
    length = st.integers(1, 4) | st.integers(1, 30)
    return Case(
        BatchAdmission(draw(st.sampled_from(interrupts)), draw(st.booleans()), draw(st.integers(1, 4))),
        tuple(tuple(draw(length) for _ in range(rows)) for _ in range(STEPS + 5)),
        tuple(draw(st.integers(0, 30)) for _ in range(STEPS)),
        draw(st.integers(1, 12)),
        draw(st.booleans()),
    )


def run(case: Case) -> tuple[list[list[Response]], Trainer]:
    """Fire a rollout STEPS times as a worker does, beside a trainer."""
    context = Context(engine=Echo(case.room))
    trainer = Trainer(context, case.delays)
    loop = DecodeLoop(context, OneTurn(context.engine, "rollout: "), case.rule, lambda step: requests(case, step))
    batches = []
    for step in range(STEPS):
        context.arrivals = trainer
        trainer.wait(case.rule.needs(step))
        if case.latest:
            trainer.poll()
        loop.begin(step, requests(case, step))
        batches.append([one.response for one in loop.take(step, requests(case, step))])
        trainer.deliver(step)
    return batches, trainer


def requests(case: Case, step: int) -> list[Task]:
    return [
        Task(Request(f"rollout: {step}.{row}", [step, row], Sampling(max_tokens=length), seed=0))
        for row, length in enumerate(case.lengths[step])
    ]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_every_token_keeps_the_bound_and_says_which_version_wrote_it(case: Case) -> None:
    batches, _ = run(case)
    assert case.rule.depth is not None
    for step, batch in enumerate(batches):
        for response in batch:
            assert response.tokens == response.versions, "the fake engine writes the number of its weights"
            assert response.log_probs == [-1.0 * version for version in response.versions]
            assert max(0, step - case.rule.depth) <= min(response.versions) <= max(response.versions) <= step
            assert response.versions == sorted(response.versions)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_each_batch_holds_the_responses_to_its_own_prompts(case: Case) -> None:
    batches, _ = run(case)
    assert [[len(r.tokens) for r in batch] for batch in batches] == [list(lengths) for lengths in case.lengths[:STEPS]]


@settings(max_examples=50, deadline=None)
@given(cases([None]), st.integers(0, 40))
def test_without_interrupts_a_run_does_not_depend_on_the_timing(case: Case, delay: int) -> None:
    case = Case(case.rule, case.lengths, case.delays, case.room)
    other = Case(case.rule, case.lengths, (delay,) * STEPS, case.room)
    found, repeated = run(case)[0], run(other)[0]
    assert [[r.versions for r in batch] for batch in found] == [[r.versions for r in batch] for batch in repeated]


@settings(max_examples=50, deadline=None)
@given(cases(["keep", "recompute"]))
def test_an_interrupt_with_nothing_published_meanwhile_changes_nothing(case: Case) -> None:
    never = Case(BatchAdmission(case.rule.interrupt, False, case.rule.depth), case.lengths, (1000,) * STEPS, case.room)
    without = Case(BatchAdmission(None, False, case.rule.depth), case.lengths, (1000,) * STEPS, case.room)
    assert [[r.versions for r in batch] for batch in run(never)[0]] == [[r.versions for r in batch] for batch in run(without)[0]]


LONG_TAIL = ((1, 1, 1, 10),) * (STEPS + 5)


def steps_taken(rule: BatchAdmission, delay: int) -> int:
    return run(Case(rule, LONG_TAIL, (delay,) * STEPS, room=8))[1].now()


def test_a_long_tail_decodes_beside_the_next_batch() -> None:
    alone = steps_taken(BatchAdmission(None, False, 1), delay=0)
    assert alone == 10 * STEPS
    assert steps_taken(BatchAdmission(None, True, 1), delay=0) < 0.6 * alone
    assert steps_taken(BatchAdmission("keep", True, 1), delay=0) < 0.6 * alone


def test_more_depth_lets_more_batches_decode_beside_one_another_where_versions_interrupt() -> None:
    taken = [steps_taken(BatchAdmission("keep", True, depth), delay=2) for depth in (1, 2, 4)]
    assert taken[0] > taken[1] > taken[2]


def test_an_interrupt_brings_newer_tokens_than_waiting_for_the_next_step() -> None:
    interrupted, _ = run(Case(BatchAdmission("recompute", False, 1), LONG_TAIL, (3,) * STEPS, room=8))
    waited, _ = run(Case(BatchAdmission(None, False, 1), LONG_TAIL, (3,) * STEPS, room=8))
    assert interrupted[3][3].versions == [2] * 3 + [3] * 7
    assert waited[3][3].versions == [2] * 10


def test_other_prompts_than_were_looked_up_are_refused() -> None:
    context = Context(engine=Echo(8))
    drawn = iter(range(100))
    request = lambda: [Task(Request(f"rollout: {next(drawn)}", [0], Sampling(max_tokens=2), 0)) for _ in range(2)]  # noqa: E731
    loop = DecodeLoop(context, OneTurn(context.engine, "rollout: "), BatchAdmission(continuous=True), lambda step: request())
    first = [Task(Request("rollout: a", [0], Sampling(max_tokens=1), 0)), Task(Request("rollout: b", [0], Sampling(max_tokens=3), 0))]
    loop.begin(0, first)
    loop.take(0, first)
    with pytest.raises(DataError, match="step 1 has different prompts than it had one step before"):
        loop.begin(1, request())


@rg.node(reads="prompt_texts prompt_ids", writes="prompt_texts prompt_ids")
def shouted(batch: rg.Columns) -> rg.Columns:
    return batch


WRONG = {
    "an unknown mode": (1, {"interrupt": "drop"}, "interrupt='drop'; interrupt is one of \\['keep', 'recompute'\\]"),
    "no interrupt": (1, {"interrupt": True}, "interrupt=True"),
    "interrupt on-policy": (
        0,
        {"interrupt": "keep"},
        "interrupt='keep', but at depth=0 of feedback 'weights' no version is published while responses decode",
    ),
    "continuous on-policy": (0, {"continuous": True}, "continuous=True at depth=0 .* may start only after the update on this one"),
    "a number": (1, {"continuous": 2}, "continuous=2; continuous is True or False"),
    "nothing that changes": (None, {"interrupt": "keep"}, "interrupt='keep' but no weights that change"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_combined_is_refused_where_it_is_declared(name: str) -> None:
    depth, options, message = WRONG[name]
    weights = None if depth is None else rg.feedback("weights", depth=depth)
    with pytest.raises(GraphError, match=f"node 'rollout' has {message}"):
        rg.Generator("m", pool=rg.Pool("p")).rollout(rg.prompts([{"prompt": "?"}], count=2), weights, **options)  # type: ignore[arg-type]


def test_prompts_that_cannot_be_looked_up_are_refused() -> None:
    prompts = shouted(rg.prompts([{"prompt": "?"}], count=2))
    with pytest.raises(GraphError, match=r"only rg\.prompts over a data set with a length has them"):
        rg.Generator("m", pool=rg.Pool("p")).rollout(prompts, rg.feedback("weights", depth=1), continuous=True)
