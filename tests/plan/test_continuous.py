"""Batches and versions that join while responses decode: what a plan predicts is what the rollout's own code does on a virtual clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.grpo import grpo_graph, zero_reward

import rlgraph as rg
from rlgraph.engines.api import Request, Response
from rlgraph.nodes.rollout.decode_loop import DecodeLoop, OneTurn, Task
from rlgraph.plan.calibrate import measured_costs, spread
from rlgraph.plan.cost_functions import Decode, NodeCost
from rlgraph.plan.forecast import Machine, never
from rlgraph.plan.schedule import Sampled, Span
from rlgraph.values.sampling import BatchAdmission

STEPS, ROWS = 400, 32  # as many steps as a prediction draws
LENGTHS = rg.planning.Lengths((0.0, 0.5, 0.9, 1.0), (10.0, 20.0, 40.0, 90.0), prompt_tokens=20.0)
# No sum of these equals another one, so that no version comes just as a decode step ends.
DECODE = Decode(step_s=1.01234567e-2, sequence_s=1.2345678e-4, prefill_s=1.0987654e-4, start_s=0.0312345)
LOAD_S, PUBLISH_S = 0.05, 0.02


@dataclass
class Clocked:
    """An engine and its weights on a clock of its own: it counts what each decode step takes, and knows when versions are there."""

    decode: Decode
    recompute: bool
    shares_steps: bool
    published: Mapping[int, float]  # when each version is there
    now: float = 0.0
    version: int = 0
    engine: Any = None
    arrivals: Any = None
    left: dict[str, list[int]] = field(default_factory=dict)  # of each running response: tokens to come, tokens read, the step it began
    steps: int = 0

    def __post_init__(self) -> None:
        self.engine = self.arrivals = self

    def report_progress(self, done: int, of: int, what: str) -> None:
        pass

    def submit(self, request: Request) -> None:
        self.now += self.decode.prefill_s * LENGTHS.prompt_tokens
        self.left[request.id] = [request.seed, int(LENGTHS.prompt_tokens), self.steps]

    def step(self, prefix: str = "") -> dict[str, Response]:
        groups = 1 if self.shares_steps else len({began for _, _, began in self.left.values()})
        self.now += self.decode.step_s * groups + self.decode.sequence_s * len(self.left)
        self.steps += 1
        for each in self.left.values():
            each[0], each[1] = each[0] - 1, each[1] + 1
        ended = [name for name, (tokens, _, _) in self.left.items() if tokens == 0]
        for name in ended:
            del self.left[name]
        return {name: Response([], []) for name in ended}

    def swap(self) -> None:
        self.version += 1
        self.now += LOAD_S
        if self.recompute:
            self.now += self.decode.prefill_s * sum(read for _, read, _ in self.left.values())

    def poll(self) -> None:
        while self.published.get(self.version + 1, np.inf) <= self.now:
            self.swap()

    def wait(self, version: int) -> None:
        while self.version < version:
            self.now = max(self.now, self.published[self.version + 1])
            self.swap()


def run(rule: BatchAdmission, rows: int, engines: int, update_s: float, shares_steps: bool) -> list[float]:
    """When each step's update is done: engines that the rollout's own code drives, and a trainer that takes batches in order."""
    drawn = LENGTHS.batches(STEPS, rows)
    published: dict[int, float] = {}
    clocks = [Clocked(DECODE, rule.interrupt_rule == "recompute", shares_steps, published) for _ in range(engines)]

    def tasks(engine: int, step: int) -> list[Task]:
        mine = range(rows * engine // engines, rows * (engine + 1) // engines)
        return [Task(Request(f"{step}.{row}", [], rg.Sampling(), int(drawn[step % STEPS, row]))) for row in mine]

    loops: list[DecodeLoop] = [
        DecodeLoop(clock, OneTurn(clock.engine, ""), rule, lambda step, engine=engine: tasks(engine, step))  # type: ignore[arg-type, misc]
        for engine, clock in enumerate(clocks)
    ]
    trained: list[float] = []
    for step in range(STEPS):
        for engine, clock in enumerate(clocks):
            clock.wait(rule.needs(step))
            clock.now += DECODE.start_s
            loops[engine].begin(step, tasks(engine, step))
            loops[engine].take(step, tasks(engine, step))
        begin = max([clock.now for clock in clocks] + [at + PUBLISH_S for at in trained[-1:]])
        trained.append(begin + update_s)
        published[step + 1] = trained[-1] + PUBLISH_S
    return trained


def compiled(rows: int, depth: int, engines: int, update_s: float, engine: Any = "vllm", decode: Decode = DECODE, **more: Any) -> rg.Plan:
    generator = rg.Generator("m", pool=rg.Pool("rollout", gpus=engines), engine=engine)
    policy = rg.Policy("m", pool=rg.Pool("train", gpus=1))
    graph = grpo_graph(generator, policy, name="joining", count=rows // 2, **more, depth=depth)
    seconds: dict[str, float | NodeCost] = {node.name: 0.0 for node in graph.nodes}
    seconds |= {"rollout": NodeCost(decode=decode), "update": NodeCost(parallel_s=update_s)}
    return rg.compile(graph, rg.Cluster(gpus=engines + 1), rg.planning.Costs(seconds, publish_s=PUBLISH_S, swap_s=LOAD_S, lengths=LENGTHS))


def period(ends: list[float]) -> float:
    return (ends[-1] - ends[STEPS // 8 - 1]) / (STEPS - STEPS // 8)


WAYS: list[dict[str, Any]] = [
    {"continuous": True},
    {"interrupt": "keep"},
    {"interrupt": "recompute"},
    {"interrupt": "keep", "continuous": True},
    {"interrupt": "recompute", "continuous": True},
]


RUNS = [(2, 2, "vllm", 0.4), (1, 1, "vllm", 0.1), (3, 1, "transformers", 0.4), (1, 1, "vllm", 0.4), (2, 2, "vllm", 1.3)]


@pytest.mark.parametrize(
    ("more", "depth", "engines", "engine", "update_s"),
    [(way, *RUNS[(number + shift) % 5]) for number, way in enumerate(WAYS) for shift in (0, 2)],
)
def test_a_prediction_is_what_the_rollouts_own_code_does(
    more: dict[str, Any], update_s: float, depth: int, engines: int, engine: str
) -> None:
    plan = compiled(ROWS, depth, engines, update_s, engine, **more)
    rule = BatchAdmission(more.get("interrupt"), more.get("continuous", False), depth)
    truth = period(run(rule, ROWS, engines, update_s, engine == "vllm"))
    assert plan.prediction.step_s == pytest.approx(truth, rel=1e-6)
    assert plan.prediction.left_out == ()


def test_a_batch_that_joins_shortens_a_step_where_generation_sets_it() -> None:
    alone, joined = (compiled(64, 1, 1, 0.1, **more) for more in ({}, {"continuous": True}))
    assert joined.prediction.step_s < 0.85 * alone.prediction.step_s
    assert joined.prediction.period_s <= joined.prediction.step_s * 1.02
    assert max(pool.busy for pool in joined.pools) <= 1.02


@pytest.mark.parametrize(("more", "read_again"), [(WAYS[0], True), (WAYS[1], False), (WAYS[2], True), (WAYS[3], False), ({}, False)])
def test_reading_again_is_named_as_left_out_where_no_cost_has_it(more: dict[str, Any], read_again: bool) -> None:
    left_out = compiled(64, 2, 1, 0.1, decode=Decode(step_s=1e-2), **more).prediction.left_out
    assert len(left_out) == int(read_again)
    assert all("prefill_s" in text for text in left_out)


def test_what_a_rollout_with_refill_decodes_is_not_counted_and_marked() -> None:
    generator, policy = rg.Generator("m", pool=rg.Pool("rollout")), rg.Policy("m", pool=rg.Pool("train"))
    weights = rg.feedback("weights", depth=2)
    source = rg.prompts([{"prompt": "1"}], count=4)
    rollout = generator.rollout(source, weights, group_size=2, interrupt="keep", refill=rg.options.Refill(reward=zero_reward))
    step = policy.update(rollout, rg.advantages(rollout, rollout, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    (said,) = rg.compile(rg.Graph("refill", step.metrics), rg.Cluster(gpus=2)).prediction.left_out
    assert "interrupt='keep'" in said


def test_each_version_that_a_batch_lacks_takes_its_load() -> None:
    machine = Machine(BatchAdmission(None, True, 1), DECODE, np.ones((1, 1)), 0.0, 2.0, never)
    assert [machine.load(step) for step in (0, 3, 3, 4)] == [0.0, 4.0, 0.0, 2.0]


def test_slots_hold_back_what_joins() -> None:
    def machine(slots: int | None) -> Machine:
        lengths = np.array([[4.0, 4.0, 10.0, 10.0]])
        rule = BatchAdmission(None, True, None)
        return Machine(rule, Decode(step_s=1.0, slots=slots), lengths, 0.0, 0.0, never)

    free, held = machine(None), machine(2)
    # Without slots the next batch joins at 4 and is half done as it ends at 10; it leaves with its own long ones at 14.
    assert [free.fire(step, free.now) for step in range(2)] == [10.0, 14.0]
    # Two slots: 4 steps of the short, 10 of the long ones, and so on, one pair after another.
    assert [held.fire(step, held.now) for step in range(2)] == [14.0, 28.0]
    assert held.decoded[0] == [14.0, 28.0, 2.0]


def test_a_firing_without_a_decode_step_tells_nothing_of_how_firings_spread() -> None:
    """All of its responses ended while the batch before was decoded; what it takes is the runtime's own time."""
    assert spread(np.array([1.1, 2e-3, 0.9]), np.array([1.0, 0.0, 1.0])) == (1.1, 0.9)
    assert spread(np.zeros(3), np.zeros(3)) == (1.0,)


@pytest.mark.parametrize("shared", [True, False])
def test_the_cost_of_decoding_is_found_in_a_run_whose_batches_joined(shared: bool) -> None:
    """Its firings hold the tails of one batch and the heads of the next, so they do not follow the lengths of their own batch."""
    plan = compiled(ROWS, 1, 1, 0.1, "vllm" if shared else "transformers", continuous=True)
    steps, drawn = 60, LENGTHS.batches(60, ROWS)
    machine = Machine(BatchAdmission(None, True, None), DECODE, drawn, LENGTHS.prompt_tokens, 0.0, never, shared)
    spans, sampled, at = [], [], 0.0
    for step in range(steps):
        end = machine.fire(step, at)
        spans.append(Span("rollout", "fire", step, "generator", at, end))
        sampled.append(Sampled("rollout", step, "generator", int(ROWS * LENGTHS.prompt_tokens), tuple(drawn[step].astype(int).tolist())))
        at = end
    found = measured_costs(plan, spans, sampled).cost_of("rollout").decode
    assert found is not None
    assert (found.step_s, found.sequence_s) == (pytest.approx(DECODE.step_s, rel=1e-6), pytest.approx(DECODE.sequence_s, rel=1e-6))
