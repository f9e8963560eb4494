"""The samples of a run are those of its batches, drawn by the seed, each exactly once whoever is killed."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import recorded_program
from programs.recorded_program import run
from support import fakes, forked_programs, forked_workers  # noqa: F401 (a way of dispatch)

import rlgraph as rg
from rlgraph.analysis.samples import FIELDS, read_samples, sample_files
from rlgraph.engines.hf.model_files import load_tokenizer
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import PlanError
from rlgraph.recording.samples import TokenTexts
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.messages import SampleRequest
from rlgraph.runtime.worker.executor import chosen_rows

ITEMS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(3)]
PROGRAM = Path(recorded_program.__file__)


def job_of(graph: rg.Graph) -> Job:
    return Job(graph, rg.compile(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=60.0)


def recorded(graph: rg.Graph, folder: Path, steps: int, samples: Any) -> list[Any]:
    with job_of(graph) as job:
        list(rg.record(job, steps, folder, samples=samples, quiet=True))
    return list(read_samples(folder))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def letters(responses: list[str], answers: list[str]) -> list[float]:
    return [len(response) + len(answer) / 8 for response, answer in zip(responses, answers, strict=True)]


def tiny_graph(model: str, chunks: int) -> rg.Graph:
    generator = rg.Generator(
        model, pool=rg.Pool("rollout"), engine="transformers", dtype="float32", sampling=rg.Sampling(max_tokens=6, stop_token_ids=(3, 5))
    )
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights = rg.feedback("weights", depth=1)
    prompts = rg.prompts(ITEMS, count=4, seed=3)
    rollout = generator.rollout(prompts, weights, group_size=4, chunks=chunks)
    rewards = rg.reward(letters, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, policy.log_probs(rollout), loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("tiny", step.metrics)


@pytest.fixture(scope="module")
def everything(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return recorded(tiny_graph(model, 1), tmp_path_factory.mktemp("all"), 3, 1.0)


def test_all_responses_of_a_run_are_recorded_with_what_their_nodes_wrote(everything: list[Any], model: str) -> None:
    assert [(sample["step"], sample["row"]) for sample in everything] == [(step, row) for step in range(3) for row in range(16)]
    tokenizer = load_tokenizer(model)
    texts = {item["prompt"]: item["answer"] for item in ITEMS}
    for sample in everything:
        assert list(sample) == list(FIELDS)
        assert texts[sample["prompt"]] == sample["columns"]["answers"]
        assert sample["response"] == tokenizer.decode(sample["token_ids"]) == "".join(sample["token_texts"])
        assert len(sample["token_ids"]) == len(sample["token_advantages"]) == sample["response_tokens"] > 0
        assert sample["reward"] == pytest.approx(
            len(tokenizer.decode(sample["token_ids"], skip_special_tokens=True)) + len(sample["columns"]["answers"]) / 8
        )
        assert sample["version_min"] == sample["version_max"] == max(sample["step"] - 1, 0)
        assert sample["finish"] == ("stop" if sample["token_ids"][-1] in (0, 3, 5) else "length")
        differences = [abs(value) for value in sample["token_log_prob_diffs"]]
        assert max(differences) < 1e-4 if sample["step"] == 0 else max(differences) > 1e-3  # from step 1 on the trainer is a version ahead
    for first in range(0, len(everything), 4):
        group = everything[first : first + 4]
        assert len({sample["group"] for sample in group}) == 1
        rewards = torch.tensor([sample["reward"] for sample in group])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        assert [sample["advantage"] for sample in group] == pytest.approx(expected.tolist(), abs=1e-3)


def evaluated_graph(model: str, apart: bool) -> rg.Graph:
    sampling = rg.Sampling(max_tokens=5)
    generators = [
        rg.Generator(model, pool=rg.Pool(name), engine="transformers", dtype="float32", sampling=sampling) for name in ("rollout", "apart")
    ]
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights = rg.feedback("weights", depth=1)
    prompts = rg.prompts(ITEMS, count=2, seed=3)
    rollout = generators[0].rollout(prompts, weights, group_size=2)
    advantages = rg.advantages(rollout, rg.reward(letters, prompts, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    score = rg.evaluate(generators[apart], ITEMS[:4], weights, reward=letters, every=2, samples=3, at_start=True)
    weights.close(step.weights)
    return rg.Graph("tiny", step.metrics, score)


@pytest.mark.parametrize("apart", [False, True])
def test_answers_of_evaluations_are_recorded_with_their_scores_and_marked(model: str, apart: bool, tmp_path: Path) -> None:
    graph = evaluated_graph(model, apart)
    with Job(graph, rg.compile(graph, rg.Cluster(cpus=3)), dispatch_name="forked", deadline_s=60.0) as job:
        steps = list(rg.record(job, 4, tmp_path, samples=1.0, quiet=True))
    found = list(read_samples(tmp_path))
    assert [s["kind"] for s in found if s["rollout"] == "rollout"] == ["training"] * 16
    answers = [s for s in found if s["kind"] == "evaluation"]
    assert [(s["step"], s["row"], s["group"]) for s in answers] == [(step, row, row // 3) for step in (0, 1, 3) for row in range(12)]
    tokenizer = load_tokenizer(model)
    for each in answers:
        item = ITEMS[each["group"]]
        assert each["prompt"] == item["prompt"]
        said = tokenizer.decode(each["token_ids"], skip_special_tokens=True)
        assert each["reward"] == len(said) + len(item["answer"]) / 8
        assert each["version_max"] == steps[each["step"]].metrics["val/version"]
    for step in (0, 1, 3):
        rewards = [s["reward"] for s in answers if s["step"] == step]
        assert steps[step].metrics["val/reward/mean@3"] == pytest.approx(sum(rewards) / 12)


def test_samples_do_not_depend_on_the_chunks_of_a_rollout(everything: list[Any], model: str, tmp_path: Path) -> None:
    assert recorded(tiny_graph(model, 2), tmp_path, 3, 1.0) == everything


def test_a_share_is_drawn_by_the_seed_and_is_part_of_all(everything: list[Any], model: str, tmp_path: Path) -> None:
    few = recorded(tiny_graph(model, 1), tmp_path / "few", 3, rg.runs.Samples(share=0.25, seed=1))
    assert Counter(sample["step"] for sample in few) == {0: 4, 1: 4, 2: 4}
    assert all(sample in everything for sample in few)
    rows = [sample["row"] for sample in few]
    assert rows != [sample["row"] for sample in everything if chosen_rows(SampleRequest(0.25, None, 0, []), "rollout", 16, 0)]
    for step in range(3):
        assert [s["row"] for s in few if s["step"] == step] == list(chosen_rows(SampleRequest(0.25, None, 1, []), "rollout", 16, step))


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_several_ranks_are_numbered_as_in_the_batch(ranks: int, tmp_path: Path) -> None:
    graph = fakes.vector_loop(1, count=6, ranks=ranks, chunks=2 if ranks == 1 else 1)
    cluster = rg.Cluster(cpus=4)
    with Job(graph, rg.compile(graph, cluster), dispatch_name="forked", deadline_s=60.0) as job:
        list(rg.record(job, 2, tmp_path, samples=1.0, quiet=True))
    found = list(read_samples(tmp_path))
    assert [(sample["step"], sample["row"]) for sample in found] == [(step, row) for step in range(2) for row in range(6)]
    assert all(sample["prompt"] == f"item {sample['columns']['answers']}" for sample in found)
    expected = {0: [(value % 8) * 0.5 + 0.01 * value for value in (sample["group"] for sample in found[:6])]}
    assert [sample["reward"] for sample in found[:6]] == pytest.approx(expected[0])


def test_no_samples_make_no_folder_and_ask_no_worker(tmp_path: Path) -> None:
    with job_of(fakes.vector_loop(1)) as job:
        list(rg.record(job, 2, tmp_path, samples=0, quiet=True))
        assert job.recorder.idle
    assert not (tmp_path / "samples").exists()


@pytest.mark.parametrize(("depth", "format"), [(2, "jsonl"), (1, "parquet")])
def test_each_sample_is_there_exactly_once_after_a_kill(depth: int, format: str, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with forked_programs.Program(str(PROGRAM), str(killed), "100", str(depth), format, cwd=tmp_path) as program:
        next(line for line in program.stdout if line == "did 10\n")
        os.killpg(program.pid, signal.SIGKILL)
    steps = list(run(killed, 20, depth, format))
    assert 0 < steps[0] < 11, "it was to go on from a checkpoint"
    assert list(run(tmp_path / "whole", 20, depth, format)) == list(range(20))
    found, expected = list(read_samples(killed)), list(read_samples(tmp_path / "whole"))
    assert Counter(sample["step"] for sample in expected) == dict.fromkeys(range(20), 2)
    assert found == expected
    assert len(sample_files(tmp_path / "whole")) > 2, "files were to be rotated"
    assert {path.suffix for path in sample_files(tmp_path / "whole")} == {f".{format}"}


def test_a_killed_worker_leaves_each_sample_once(tmp_path: Path) -> None:
    graph = fakes.vector_loop(1, generate_s=0.02, train_s=0.02)
    from rlgraph.runtime.checkpoint.store import Recovery

    plan = rg.compile(graph, rg.Cluster(cpus=2))
    with Job(graph, plan, dispatch_name="forked", deadline_s=60.0, recovery=Recovery(tmp_path / "checkpoints", 3, 2, 1)) as job:
        for step in rg.record(job, 12, tmp_path, samples=1.0, quiet=True):
            if step.index == 7:
                os.kill(job.pids["generator"], signal.SIGKILL)
    assert Counter(sample["step"] for sample in read_samples(tmp_path)) == dict.fromkeys(range(12), 4)


def test_samples_that_cannot_be_written_are_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Any, samples: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlgraph.recording.samples.SampleFiles.write", full)
    with job_of(fakes.vector_loop(1)) as job:
        assert len(list(rg.record(job, 6, tmp_path, quiet=True))) == 6
    assert capsys.readouterr().err.count("no more samples are recorded: OSError: [Errno 28] No space left on device") == 1
    assert len(job.notices) == 1


def test_texts_of_tokens_add_up_to_the_text_also_within_characters(model: str) -> None:
    tokenizer = load_tokenizer(model)  # a tokenizer of bytes
    ids = tokenizer.encode("héllo → 漢字!", add_special_tokens=False)
    texts = TokenTexts(tokenizer).texts(ids)
    assert len(texts) == len(ids) > len("héllo → 漢字!")
    assert "".join(texts) == "héllo → 漢字!"
    assert TokenTexts(tokenizer).texts(ids[:2]) == ["h", "\ufffd"]
    assert TokenTexts(tokenizer).texts([ids[0], ids[1], 287, ids[2]]) == ["h", "é", "", ""], "an id without a text comes between"


def test_a_file_that_was_cut_off_loses_its_last_line_alone(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    lines = [json.dumps({"step": 0}), json.dumps({"step": 1}), '{"step": 2, "prom']
    (tmp_path / "samples" / "samples-00000.jsonl").write_text("\n".join(lines))
    assert [sample["step"] for sample in read_samples(tmp_path)] == [0, 1]


def test_a_bad_share_and_a_bad_format_are_errors() -> None:
    with pytest.raises(PlanError, match=r"Samples\(share=2\)"):
        rg.runs.Samples(share=2)
    with pytest.raises(PlanError, match="format"):
        rg.runs.Samples(format="csv")  # type: ignore[arg-type]
