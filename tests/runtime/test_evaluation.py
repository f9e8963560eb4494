"""Evaluation sees exactly its version, changes no bit of the training, and beside the training never holds it up."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import digests, forked_workers
from support.digests import ITEMS, DigestPolicy, odd_tokens

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model

DATA = [{**item, "data_source": "even" if i % 2 == 0 else "odd"} for i, item in enumerate(ITEMS[:5])]


def odd_length(response: str, answer: str, prompt: str) -> float:
    return float((len(response) + prompt.startswith("1")) % 2)


@dataclass(frozen=True, eq=False, kw_only=True)
class MeetingGenerator(rg.Generator):
    """A generator whose first answers wait for the seventh update, at a pipe that both open."""

    pipe: str

    def load(self, context: Any) -> Any:
        engine = super().load(context)
        generate, calls = engine.generate, itertools.count()

        def meeting(prompts: Any, *arguments: Any) -> Any:
            if prompts and next(calls) == 0:
                Path(self.pipe).read_bytes()
            return generate(prompts, *arguments)

        engine.generate = meeting
        return engine


@dataclass(frozen=True, eq=False, kw_only=True)
class MeetingPolicy(DigestPolicy):
    """The policy whose seventh update waits for the first evaluation."""

    pipe: str = ""

    def load(self, context: Any) -> Any:
        engine = super().load(context)
        update, calls = engine.update, itertools.count()

        def meeting(*arguments: Any, **settings: Any) -> Any:
            if self.pipe and next(calls) == 6:
                Path(self.pipe).write_bytes(b"")
            return update(*arguments, **settings)

        engine.update = meeting
        return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def graph(model: str, where: str, *, depth: int = 1, pipe: str = "", **settings: Any) -> rg.Graph:
    settings = {"every": 2, "samples": 4, **settings}

    def generator(pool: str, kind: Any = rg.Generator, **more: str) -> rg.Generator:
        made: rg.Generator = kind(
            model, pool=rg.Pool(pool), engine="transformers", sampling=rg.Sampling(max_tokens=6), dtype="float32", **more
        )
        return made

    rollouts = generator("rollout")
    policy = MeetingPolicy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32", pipe=pipe)
    weights = rg.feedback("weights", depth=depth)
    rollout = rollouts.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4)
    evaluations: list[rg.Output] = []
    if where != "nowhere":
        examined = (
            rollouts if where == "time-shared" else generator("evaluate", MeetingGenerator, pipe=pipe) if pipe else generator("evaluate")
        )
        evaluations = [rg.evaluate(examined, DATA, weights, **{"reward": odd_length, **settings})]
    advantages = rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("evaluated", step.metrics, *evaluations)


def versions(steps: list[dict[str, float]]) -> dict[int, float]:
    return {index: step["val/version"] for index, step in enumerate(steps) if "val/version" in step}


@pytest.mark.parametrize("where", ["time-shared", "apart"])
def test_evaluation_changes_no_bit_of_the_training(model: str, where: str) -> None:
    plain, evaluated = digests.run_here(graph(model, "nowhere"), 5), digests.run_here(graph(model, where), 5)
    for name in ("digest/batch", "digest/weights", "actor/pg_loss"):
        assert [step[name] for step in evaluated] == [step[name] for step in plain]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_time_shared_evaluation_sees_the_rollouts_version_and_one_apart_the_version_that_the_step_publishes(
    model: str, depth: int
) -> None:
    settings = {"every": 2, "steps": 5, "at_start": True}
    shared = digests.run_here(graph(model, "time-shared", depth=depth, **settings), 5)
    apart = digests.run_here(graph(model, "apart", depth=depth, **settings), 5)
    assert versions(shared) == {step: max(0, step - depth) for step in (0, 1, 3, 4)}
    assert versions(apart) == {0: 0, 1: 2, 3: 4, 4: 5}


def test_the_same_version_gives_the_same_metrics_wherever_it_is_evaluated(model: str) -> None:
    shared = digests.run_here(graph(model, "time-shared", depth=1, every=1), 4)
    apart = digests.run_here(graph(model, "apart", depth=1, every=1), 4)
    seen = [{step["val/version"]: {k: v for k, v in step.items() if k.startswith("val/")} for step in steps} for steps in (shared, apart)]
    assert seen[0].keys() & seen[1].keys() == {1.0, 2.0}
    assert all(seen[0][version] == seen[1][version] for version in (1.0, 2.0))
    assert seen[1][2.0] != seen[1][4.0]


def test_an_evaluation_alone_is_of_the_folders_weights(model: str) -> None:
    settings = {"every": 1, "samples": 4, "at_start": True}
    sampling = rg.Sampling(max_tokens=6)
    generator = rg.Generator(model, pool=rg.Pool("gpus"), engine="transformers", sampling=sampling, dtype="float32")
    alone = digests.run_here(rg.Graph("alone", rg.evaluate(generator, DATA, None, reward=odd_length, **settings)), 2)
    first = digests.run_here(graph(model, "time-shared", depth=0, **settings), 1)[0]
    seen = [{name: value for name, value in step.items() if name.startswith("val/")} for step in (first, *alone)]
    assert seen[0] == seen[1] == seen[2] != {}


def test_metrics_are_those_of_each_source_and_of_all(model: str) -> None:
    step = digests.run_here(graph(model, "time-shared", every=1), 1)[0]
    assert {name for name in step if "pass@" in name} == {f"val/{source}pass@{k}" for source in ("", "even/", "odd/") for k in (1, 2, 4)}
    assert step["val/acc/mean@4"] == step["val/pass@1"] == step["val/reward/mean@4"]
    assert step["val/acc/worst@4/mean"] <= step["val/acc/mean@4"] <= step["val/acc/best@4/mean"] <= step["val/pass@4"]
    assert step["val/reward/mean@4"] == pytest.approx((3 * step["val/even/reward/mean@4"] + 2 * step["val/odd/reward/mean@4"]) / 5)


def graded(response: str, answer: str) -> dict[str, Any]:
    return {"score": odd_length(response, answer, "0"), "pred": response[:1]}


def test_two_evaluations_report_apart_and_a_scorer_as_verls_has_a_majority(model: str) -> None:
    def both() -> rg.Graph:
        generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=rg.Sampling(max_tokens=6), dtype="float32")
        policy = DigestPolicy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
        weights = rg.feedback("weights", depth=1)
        rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4)
        first = rg.evaluate(generator, DATA, weights, reward=odd_length, every=1, samples=2)
        second = rg.evaluate(generator, DATA, weights, reward=graded, every=2, samples=2, name="again")
        step = policy.update(rollout, rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO()), loss=rg.ClippedLoss())
        weights.close(step.weights)
        return rg.Graph("evaluated", step.metrics, first, second)

    steps = digests.run_here(both(), 2)
    assert "val/again/acc/mean@2" not in steps[0]
    assert {"val/acc/mean@2", "val/again/acc/mean@2", "val/again/even/acc/maj@2/mean"} <= steps[1].keys()
    assert not any("maj" in name and "again" not in name for name in steps[1])


def test_an_evaluation_apart_that_takes_several_steps_holds_none_of_them_up(model: str, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)  # the evaluation of step 3 ends once update 6 runs, which a training that waits for it never reaches
    with forked_workers.job(graph(model, "apart", pipe=pipe, every=4)) as job:
        steps = [digests.clockless_metrics(step) for step in job.steps(8)]
    assert versions(steps) == {3: 4, 7: 8}
    assert [step["digest/weights"] for step in steps] == [step["digest/weights"] for step in digests.run_here(graph(model, "nowhere"), 8)]


def test_a_reward_of_an_evaluation_that_fails_names_its_item(model: str) -> None:
    with pytest.raises(rg.RlgraphError, match=r"for response 4 \(prompt 1 of the data order: '1 \+ 2 ='\)"):
        digests.run_here(graph(model, "time-shared", every=1, reward=lambda response, answer: float("nan") if answer == "3" else 0.0), 1)


def test_a_prompt_that_does_not_fit_is_named_before_anything_starts(model: str, tmp_path: Path) -> None:
    long = graph(model, "apart", sampling=rg.Sampling(max_tokens=100_000))
    with pytest.raises(rg.RlgraphError, match="node 'evaluate' samples 100000 tokens in a context of"):
        digests.run_here(long, 1)
