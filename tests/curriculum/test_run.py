"""Graphs that run one after the other hand their weights on, go on after a kill, and are all checked before the first one starts."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support import forked_programs, forked_workers

import rlgraph as rg
from rlgraph import curriculum as running
from rlgraph.curriculum import digest, planned_stages
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import CheckpointError, DataError, ExportError, PlanError, RlgraphError
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES

SUMS = [{"prompt": f"{a} + 1 =", "completion": f" {a + 1}"} for a in range(4)]
HOST = rg.Cluster(cpus=2)
STEPS = [3, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "model", vocab=288))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)


def imitation(folder: str, name: str, lr: float = 1e-3) -> rg.Graph:
    """All rows in each batch, so that its loss depends on the weights alone."""
    policy = rg.Policy(folder, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=lr), dtype="float32")
    return rg.Graph(name, policy.update(rg.examples(SUMS, len(SUMS), policy), loss=rg.SFTLoss()).metrics)


def stages(model: str, lr: float = 1e-3) -> list[Any]:
    return [imitation(model, "first", lr), lambda first: imitation(first, "second")]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["actor/nll"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("here")
def test_the_second_graph_begins_with_the_weights_that_the_first_one_left(model: str, tmp_path: Path) -> None:
    first, second = rg.run(stages(model), tmp_path, steps=STEPS, cluster=HOST, quiet=True)
    with rg.compile(imitation(model, "alone"), HOST).run_here() as job:
        alone = [step.metrics["actor/nll"] for step in job.steps(4)]
    assert losses(first.folder) == pytest.approx(alone[:3], rel=1e-6)
    assert losses(second.folder)[0] == pytest.approx(alone[3], rel=1e-6), "of weights in float32"
    assert (first.model, second.model) == (tmp_path / "first" / "model", None)
    assert second.metrics["actor/nll"] == losses(second.folder)[-1] < losses(first.folder)[0]
    page = ElementTree.fromstring((tmp_path / "run.html").read_text())
    said = " ".join("".join(page.itertext()).split())
    assert [s.get("id") for s in page.iter("section")] == ["graphs", "curves", "graph-first", "graph-second"]
    assert "3 of 3" in said
    assert "4 of 4" in said
    assert "the weights of 'first'" in said
    assert all((tmp_path / name / "run.html").exists() for name in ("first", "second"))


@pytest.mark.usefixtures("here")
def test_a_graph_gets_the_weights_of_each_earlier_one_under_its_name(model: str, tmp_path: Path) -> None:
    def third(other: str, first: str) -> rg.Graph:
        assert Path(first).name == Path(other).name
        return imitation(other, "third")

    graphs = [imitation(model, "first"), imitation(model, "other", lr=3e-3), third]
    with pytest.raises(PlanError, match="no later graph starts from the weights of 'first'"):
        rg.run([*graphs[:2], lambda other: third(other, other)], tmp_path, steps=[2, 1, 1], cluster=HOST, quiet=True)
    rg.run(graphs, tmp_path, steps=[2, 1, 1], cluster=HOST, quiet=True)
    with rg.compile(imitation(model, "alone", lr=3e-3), HOST).run_here() as job:
        alone = [step.metrics["actor/nll"] for step in job.steps(2)]
    assert losses(tmp_path / "third") == pytest.approx(alone[1:], rel=1e-6)
    began = json.loads((tmp_path / "third" / "began.json").read_text())
    assert began == {name: digest(tmp_path / name / "model") for name in ("first", "other")}


@pytest.mark.usefixtures("here")
def test_a_reward_model_that_learns_margins_rewards_the_policy_of_the_next_graph(model: str, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{a} + 1 =", "chosen": f" {a + 1}", "rejected": f" {a}", "by": 0.5 + a} for a in range(4)]

    def learnt() -> rg.Graph:
        judge = rg.LearnedReward(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
        return rg.Graph("judge", judge.update(rg.pairs(pairs, 4, judge, margin="by"), loss=rg.losses.BradleyTerry()).metrics)

    def rewarded(judge: str) -> rg.Graph:
        sampling, weights = rg.Sampling(max_tokens=4), rg.feedback("weights", depth=0)
        generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, max_context=64, dtype="float32")
        policy = rg.Policy(model, pool=rg.Pool("train"), dtype="float32")
        rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=2), weights, group_size=4)
        rewards = rg.LearnedReward(judge, pool=rg.Pool("judge"), dtype="float32").rewards(rollout)
        step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss())
        weights.close(step.weights)
        return rg.Graph("policy", step.metrics)

    judge, policy = rg.run([learnt, rewarded], tmp_path, steps=[3, 1], cluster=HOST, quiet=True)
    first = json.loads((judge.folder / "metrics.jsonl").read_text().splitlines()[0])
    margins = torch.tensor([row["by"] for row in pairs])
    assert first["critic/vf_loss"] == pytest.approx(torch.nn.functional.softplus(margins).mean().item(), abs=1e-4), "a head of zeros"
    assert policy.metrics["critic/rewards/max"] > policy.metrics["critic/rewards/min"], "responses are told apart"


@pytest.mark.usefixtures("here")
def test_a_curriculum_that_stopped_in_its_second_graph_goes_on_there(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rg.run(stages(model), tmp_path / "whole", steps=STEPS, cluster=HOST, quiet=True)
    began: list[tuple[str, int]] = []

    def record(job: Any, steps: int, out: Path, **settings: Any) -> Iterator[Any]:
        began.append((job.plan.graph, job.finished_steps))
        yield from rg.record(job, 3 if began == [("first", 0), ("second", 0)] else steps, out, **settings)

    def killed(self: running.StageFolder, stage: Any, plan: rg.Plan) -> None:
        if began[-1] == ("second", 0):
            raise KeyboardInterrupt
        mark_done(self, stage, plan)

    mark_done = running.StageFolder.mark_done
    monkeypatch.setattr(running, "record", record)
    monkeypatch.setattr(running.StageFolder, "mark_done", killed)
    with pytest.raises(KeyboardInterrupt):
        rg.run(stages(model), tmp_path / "cut", steps=STEPS, cluster=HOST, quiet=True)
    assert "under way" in (tmp_path / "cut" / "run.html").read_text()
    rg.run(stages(model), tmp_path / "cut", steps=STEPS, cluster=HOST, quiet=True)
    assert began == [("first", 0), ("second", 0), ("second", 3)]
    assert [losses(tmp_path / "cut" / name) for name in ("first", "second")] == [
        losses(tmp_path / "whole" / name) for name in ("first", "second")
    ]
    rg.run(stages(model), tmp_path / "cut", steps=STEPS, cluster=HOST, quiet=True)
    assert len(began) == 3, "all graphs are done: none starts"
    with pytest.raises(CheckpointError, match="'steps' was 4 and is 5; pass another folder"):
        rg.run(stages(model), tmp_path / "cut", steps=[3, 5], cluster=HOST, quiet=True)


@pytest.mark.usefixtures("here")
def test_checkpoints_of_other_weights_are_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.StageFolder, "mark_done", lambda self, stage, plan: None)
    rg.run(stages(model)[:1], tmp_path, steps=[1], cluster=HOST, quiet=True)
    (tmp_path / "first" / "began.json").write_text('{"zeroth": "other weights"}')
    with pytest.raises(CheckpointError, match="belong to a run from other weights: 'zeroth' is missing now"):
        rg.run(stages(model)[:1], tmp_path, steps=[1], cluster=HOST, quiet=True)


def no_rows(first: str) -> rg.Graph:
    policy = rg.Policy(first, pool=rg.Pool("train"))
    return rg.Graph("second", policy.update(rg.examples([{"prompt": "1"}], 1, policy), loss=rg.SFTLoss()).metrics)


def without_update(model: str) -> rg.Graph:
    return rg.Graph("first", rg.prompts([{"prompt": "1 + 1 ="}], count=4))


MISTAKES: dict[str, tuple[Any, Any, type[RlgraphError], str]] = {
    "no graph": (lambda m: [], [], PlanError, "pass at least one graph"),
    "steps of one": (stages, [3], PlanError, r"run\(steps=\[3\]\) of 2 graphs"),
    "a name": (lambda m: ["first"], [1], PlanError, "graph 1 of 1, is 'first'; it is a graph, or a function"),
    "no graph in return": (lambda m: [lambda: 3], [1], PlanError, "its function returned 3"),
    "a function that fails": (lambda m: [lambda: 1 / 0], [1], PlanError, "its function failed, ZeroDivisionError"),
    "an unknown parameter": (
        lambda m: [imitation(m, "first"), lambda sft: imitation(sft, "second")],
        STEPS,
        PlanError,
        r"the parameter 'sft', which is not the name of an earlier graph; these are \['first'\]",
    ),
    "one name twice": (lambda m: [imitation(m, "first"), lambda first: imitation(first, "first")], STEPS, PlanError, "of an earlier graph"),
    "a name that is no folder": (lambda m: [imitation(m, "../first")], [1], PlanError, "use letters, digits"),
    "weights that nobody takes": (
        lambda m: [imitation(m, "first"), imitation(m, "second")],
        STEPS,
        PlanError,
        "no later graph starts from",
    ),
    "nothing to hand on": (
        lambda m: [without_update(m), lambda first: imitation(first, "x")],
        STEPS,
        ExportError,
        "the graph trains no model",
    ),
    "a row of the second graph": (lambda m: [imitation(m, "first"), no_rows], STEPS, DataError, "completion"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_anywhere_is_refused_before_the_first_graph_starts(what: str, model: str, tmp_path: Path) -> None:
    made, steps, error, message = MISTAKES[what]
    with pytest.raises(error, match=message):
        rg.run(made(model), tmp_path / "run", steps=steps, cluster=HOST, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_folder_where_only_a_later_graph_is_done_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.StageFolder, "has_run", lambda self, stage: stage.name == "second")
    monkeypatch.setattr(running, "_run", lambda *arguments: None)
    with pytest.raises(PlanError, match="a later graph is finished but an earlier one is not"):
        rg.run(stages(model), tmp_path / "run", steps=STEPS, cluster=HOST, quiet=True)


def test_parameters_with_a_default_are_left_alone(model: str) -> None:
    def second(first: str, lr: float = 0.5) -> rg.Graph:
        assert lr == 0.5
        return imitation(first, "second", lr)

    found = planned_stages([imitation(model, "first"), second], STEPS, HOST)
    assert [(stage.name, stage.takes, stage.stand_in) for stage in found] == [("first", (), model), ("second", ("first",), None)]


PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from support import forked_workers
import rlgraph as rg
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES
sys.path.insert(0, {tests!r})
from test_run import stages
DISPATCHES["compiled_graph"] = forked_workers.Forked  # a program on Ray is killed in tests/runtime/test_resume.py
out = Path({out!r})
def watch():
    while not list((out / "second" / "checkpoints").glob("step-*")):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    if sys.argv[1:] == ["killed"]:
        threading.Thread(target=watch, daemon=True).start()
    print(rg.run(stages({model!r}), out, steps=[2, 40], cluster=rg.Cluster(cpus=2), every=2, quiet=True)[1].metrics["actor/nll"])
"""


def test_a_program_that_is_killed_in_its_second_graph_goes_on_from_its_checkpoint(model: str, tmp_path: Path) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent), out=str(out), model=model))
    killed = forked_programs.run(str(program), "killed", cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert (out / "first" / "done.json").exists()
    before = (out / "first" / "model" / "model.safetensors").stat().st_mtime_ns
    whole = forked_programs.run(str(program), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert "resuming from the checkpoint after" in whole.stderr
    assert (out / "first" / "model" / "model.safetensors").stat().st_mtime_ns == before, "the first graph did not run again"
    assert len(losses(out / "second")) == 40


def test_the_digest_of_weights_tells_them_apart(model: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    zeros = digest(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert len({zeros, digest(tmp_path), digest(Path(model))}) == 3
