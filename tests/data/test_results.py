"""Curricula by results: exact rewards of earlier steps over an edge of columns, and the same bits after a kill."""

import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fakes, forked_workers  # noqa: F401 (a way of dispatch)

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.data.rows import Results
from rlgraph.errors import RlgraphError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Output, declare
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.local import LocalJob

EASY = [{"prompt": f"easy {n}"} for n in range(5)]
HARD = [{"prompt": f"hard {n}"} for n in range(11)]
COUNT = 4
Curriculum = Callable[[int, int, Results], Mapping[str, float]]


def graph(curriculum: Curriculum, depth: int, *, behind: int | None = None, chunks: int = 1, middle: Any = fakes.score) -> Graph:
    """A loop whose results come back `behind` steps late, by default as late as the weights."""
    weights = rg.feedback("weights", depth=depth)
    results = rg.feedback("results", depth=depth if behind is None else behind, columns="rewards")
    source = rg.prompts(rg.data.mix({"easy": EASY, "hard": HARD}, weights=curriculum), COUNT, seed=1, results=results)
    generator, writes = fakes.VectorGenerator("vector", pool=rg.Pool("rollout")), ("values", "response_mask", "weight_version", "group_ids")
    operation = fakes.Generate(0.0, chunks)
    made = declare("rollout", operation, (source,), reads=("prompt_ids",), writes=writes, model=generator, feedback=weights, chunks=chunks)
    rollout = Output(made)
    rewards = middle(source, rollout) if middle is not fakes.score else fakes.score(rollout)
    results.close(rewards)
    policy, reads = fakes.VectorPolicy("vector", pool=rg.Pool("train")), ("values", "response_mask", "weight_version", "rewards")
    update = declare("update", fakes.Train(0.0), (rollout, rewards), reads=reads, writes=(), model=policy)
    weights.close(update.weights)
    return rg.Graph("curriculum", update.metrics)


def by_results(depth: int) -> Curriculum:
    """Draw what is learned less the more often, and fail unless the results are those of the steps before max(0, step - depth)."""

    def weights(seed: int, step: int, results: Results) -> Mapping[str, float]:
        assert results.steps in (0, max(0, step - depth)), "0 where the mixture is checked"
        means = [results.mean(name) for name in ("easy", "hard")]
        rows = [results.row("hard", row) or 0.0 for row in range(len(HARD))]
        return {"easy": 1.0, "hard": 1.0 + math.tanh((means[1] or 0.0) ** 2 + sum(rows)) - math.tanh(means[0] or 0.0) / 2}

    return weights


Bits = tuple[int, dict[str, float], int]


def bits(step: Any) -> Bits:
    return step.index, {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}, step.staleness


def oracle(made: Graph, steps: int) -> list[Bits]:
    with LocalJob(made, compile_plan(made, Cluster(cpus=2))) as here:
        return [bits(step) for step in here.steps(steps)]


def job(made: Graph, folder: Path, restarts: int = 0) -> Job:
    plan = compile_plan(made, Cluster(cpus=2))
    return Job(made, plan, dispatch_name="forked", deadline_s=60.0, recovery=Recovery(folder, 3, 2, restarts))


@pytest.mark.parametrize(("depth", "behind", "chunks"), [(0, 0, 1), (2, 2, 2), (1, 3, 1)])
def test_a_job_that_is_left_and_goes_on_has_the_bits_of_one_process(depth: int, behind: int, chunks: int, tmp_path: Path) -> None:
    made = graph(by_results(behind), depth, behind=behind, chunks=chunks)
    with job(made, tmp_path) as first:
        found = [bits(step) for step in first.steps(4)]
    with job(made, tmp_path) as second:
        found += [bits(step) for step in second.steps(11)]
    assert found == oracle(made, 11)
    shares = {metrics["data/mix/hard"] for _, metrics, _ in found}
    assert len(shares) > 1


def test_a_worker_that_is_killed_changes_no_bit(tmp_path: Path) -> None:
    made, found = graph(by_results(1), 1), []
    with job(made, tmp_path, restarts=2) as running:
        for step in running.steps(14):
            found.append(bits(step))
            if step.index in (5, 9):
                os.kill(running.pids["prompts" if step.index == 5 else "score"], signal.SIGKILL)
    assert found == oracle(made, 14)


@pytest.mark.parametrize("depth", [0, 1])
def test_means_are_those_of_the_rewards_that_were_given(depth: int) -> None:
    given: list[tuple[list[str], list[float]]] = []
    seen: list[int] = []

    def scored(columns: Columns) -> Columns:
        rewards = (columns["values"].double().mean(-1) + columns["group_ids"]) / 7  # type: ignore[union-attr]
        given.append((list(columns["prompt_texts"]), rewards.tolist()))  # type: ignore[arg-type]
        return {"rewards": rewards}

    def weights(seed: int, step: int, results: Results) -> Mapping[str, float]:
        known = [pair for texts, rewards in given[: results.steps] for pair in zip(texts, rewards, strict=True)]
        for name in ("easy", "hard"):
            assert results.mean(name) == mean([reward for text, reward in known if text.startswith(name)])
        for row in range(len(HARD)):
            assert results.row("hard", row) == mean([reward for text, reward in known if text == f"hard {row}"])
        last = [pair for texts, rewards in given[max(results.steps - 2, 0) : results.steps] for pair in zip(texts, rewards, strict=True)]
        assert results.mean("easy", last=2) == mean([reward for text, reward in last if text.startswith("easy")])
        seen.append(results.steps)
        return {"easy": 1.0, "hard": 1.0}

    made = graph(weights, depth, middle=rg.node(reads="values group_ids prompt_texts", writes="rewards")(scored))
    with LocalJob(made, compile_plan(made, Cluster(cpus=2))) as here:
        assert len(list(here.steps(9))) == 9
    assert seen[-9:] == [max(0, step - depth) for step in range(9)]


def mean(values: Sequence[float]) -> Any:
    return pytest.approx(sum(values) / len(values)) if values else None


def test_the_rewards_of_a_group_count_as_one_mean() -> None:
    source = rg.prompts(
        rg.data.mix({"easy": EASY}, weights=lambda seed, step, results: {"easy": 1.0}),
        2,
        results=rg.feedback("results", depth=0, columns="rewards"),
    )
    stage = source.node.operation.start(None)  # type: ignore[arg-type]
    first, _ = stage(0, {})
    stage(1, {"rewards": torch.tensor([1.0, 0.0, 1.0, 1.0])})
    rows = [int(text.split()[1]) for text in first["prompt_texts"]]
    assert [stage.results.row("easy", row) for row in rows] == [0.5, 1.0]
    again = source.node.operation.start(None)  # type: ignore[arg-type]
    again.load_state(stage.state())
    later = [each(2, {"rewards": torch.ones(6)}) for each in (stage, again)]
    assert later[0][0]["prompt_texts"] == later[1][0]["prompt_texts"]
    with pytest.raises(RlgraphError, match="5 rewards came back for 2 prompts"):
        stage(3, {"rewards": torch.ones(5)})


def test_the_plan_shows_the_edge_and_predicts_what_it_costs() -> None:
    late, fresh = (graph(by_results(behind), 1, behind=behind) for behind in (1, 0))
    costs = rg.planning.Costs({"prompts": 0.0, "rollout": 0.4, "score": 0.3, "update": 0.2})
    plans = [rg.compile(made, Cluster(cpus=4), costs) for made in (late, fresh)]
    assert [plan.prediction.step_s for plan in plans] == [pytest.approx(0.45), pytest.approx(0.7)]  # fresh results wait for the reward
    assert all(plan.certificate.deadlock_free and plan.certificate.staleness_bound == 1 for plan in plans)
    assert rg.Plan.from_json(plans[0].to_json()) == plans[0]
    assert "feedback results: score -> prompts: rewards of 2 steps before" in str(plans[0])
    assert "results: rewards of 2 steps before" in rg.api.mermaid(plans[0])
    assert "gets rewards of 2 steps before, of score" in rg.api.svg(plans[0])


PLAIN = rg.data.mix({"easy": EASY}, weights={"easy": 1.0})
BY_RESULTS = rg.data.mix({"easy": EASY}, weights=lambda seed, step, results: {"easy": 1.0})
EDGE: dict[str, Any] = {"depth": 1, "columns": "rewards"}


def open_edge() -> Any:
    return rg.feedback("results", **EDGE)


def closed_with_what_comes_first() -> Graph:
    results = open_edge()
    other = rg.prompts([{"prompt": "a"}], 4, name="other")
    rewards = rg.node(reads="prompt_texts", writes="rewards")(lambda columns: {"rewards": torch.zeros(4)})(other, name="first")
    results.close(rewards)
    return rg.Graph("wrong", rg.prompts(BY_RESULTS, 4, results=results))


def continuous() -> Graph:
    results, weights = open_edge(), rg.feedback("weights", depth=1)
    prompts = rg.prompts(BY_RESULTS, 4, results=results)
    rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts, weights, continuous=True, group_size=2)
    rewards = rg.reward(lambda response: 1.0, rollout)
    results.close(rewards)
    step = rg.Policy("tiny", pool=rg.Pool("train")).update(
        rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss()
    )
    weights.close(step.weights)
    return rg.Graph("wrong", step.metrics)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no edge": (lambda: rg.prompts(BY_RESULTS, 4), "the curriculum of the mixture reads results: pass results="),
    "nobody reads them": (lambda: rg.prompts(PLAIN, 4, results=open_edge()), "results='results' has no effect"),
    "no mixture": (lambda: rg.prompts(EASY, 4, results=open_edge()), "results='results' has no effect"),
    "an edge of weights": (
        lambda: rg.prompts(BY_RESULTS, 4, results=rg.feedback("w", depth=1)),
        "carries weights; give it columns='rewards'",
    ),
    "an edge of other columns": (
        lambda: rg.prompts(BY_RESULTS, 4, results=rg.feedback("w", depth=1, columns="values")),
        r"carries \['values'\]; give it columns='rewards'",
    ),
    "one argument": (lambda: rg.data.mix({"easy": EASY}, weights=lambda seed: {"easy": 1.0}), r"a function of \(seed, step\), or of"),
    "buffers": (lambda: rg.feedback("results", depth=1, columns="rewards", buffers=2), "are about weights and have no effect"),
    "closed with weights": (
        lambda: open_edge().close(rg.prompts(EASY, 4)),
        r"close it with the output of a node that carries \['rewards'\]",
    ),
    "left open": (
        lambda: rg.Graph("wrong", rg.prompts(BY_RESULTS, 4, results=open_edge())),
        r"an open feedback 'results'; close it with results.close\(output\)",
    ),
    "no cycle": (closed_with_what_comes_first, "'results' closes no cycle: 'first' does not depend on 'prompts'"),
    "prompts that are drawn ahead": (continuous, "draws its prompts ahead of the steps: use a rollout without continuous="),
    "weights where columns are": (
        lambda: rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(rg.prompts(EASY, 4), open_edge()),
        "loads weights from feedback 'results', which carries columns",
    ),
    "an unknown data set": (lambda: Results({"easy": 5}).mean("hard"), r"results of data set 'hard': the mixture has \['easy'\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_results_that_cannot_come_back_are_an_error(name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(RlgraphError, match=words):
        make()
