"""A teacher on vLLM gives the log-probs of one in the trainer, and what it does not give is refused where it is declared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_workers
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import GraphError

NEAR = 1e-4  # in float32; 1.5e-6 was seen


def be_scorer(folder: Path, batch: Path, out: Path) -> None:
    from rlgraph.engines.vllm.scorer import VllmScorer

    engine = VllmScorer(folder, dtype="float32", threads=1, context=64, kv_cache_bytes=64 << 20)
    rows = torch.load(batch)
    torch.save({"top": engine.top_scores(rows, 4), "all": engine.top_scores(rows, 1000), "own": engine.scores(rows)}, out)
    engine.close()


@pytest.mark.stage("jobs")
@pytest.mark.vllm
def test_a_teacher_on_vllm_gives_the_log_probs_of_one_in_the_trainer(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny", vocab=288)
    draw = torch.Generator().manual_seed(0)
    batch = {
        "prompts": torch.randint(3, 280, (3, 4), generator=draw),
        "prompt_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).bool(),
        "responses": torch.randint(3, 280, (3, 5), generator=draw),
        "response_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool(),
    }
    torch.save(batch, tmp_path / "batch.pt")
    scorer = forked_workers.server.Process(target=be_scorer, args=(folder, tmp_path / "batch.pt", tmp_path / "out.pt"))
    scorer.start()
    scorer.join(250)
    assert scorer.exitcode == 0
    found = torch.load(tmp_path / "out.pt")

    trainer = fsdp_engine(PolicyHead(folder), optimizer=rg.AdamW(), dtype=torch.float32, micro_batch_tokens=4096)
    scores, ids, top = trainer.top_scores(batch, 4)
    whole = trainer.top_scores(batch, 1000)[2]
    trainer.close()
    assert torch.equal(found["top"][1], ids)
    for one, other in ((found["top"][0], scores), (found["own"], scores), (found["top"][2], top), (found["all"][2], whole)):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=NEAR, rtol=0)
    assert bool((scores[~batch["response_mask"]] == 0).all())
    assert bool((scores[batch["response_mask"]] < 0).all())


def distilled(folders: tuple[str, str], trainer: str, **settings: Any) -> rg.Graph:
    """A student that follows a teacher on its own answers."""
    student, taught = folders
    sampling = rg.Sampling(max_tokens=6)
    pool = rg.Pool("rollout")
    generator = rg.Generator(student, pool=pool, engine="transformers", sampling=sampling, max_context=64, dtype="float32")
    policy = rg.Policy(student, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    teacher = rg.Teacher(taught, pool=rg.Pool("teacher"), trainer=trainer, dtype="float32", **settings)
    weights = rg.feedback("weights", depth=1)
    answers = generator.rollout(rg.prompts([{"prompt": f"{n} + 1 ="} for n in range(4)], count=4), weights)
    step = policy.update(answers, teacher.top_log_probs(answers, top_k=8), loss=rg.losses.DistillationLoss(divergence="reverse_kl"))
    weights.close(step.weights)
    return rg.Graph("distilled", step.metrics)


@pytest.mark.stage("jobs")
@pytest.mark.vllm
def test_a_student_learns_from_a_teacher_on_vllm_what_it_learns_from_one_in_the_trainer(tmp_path: Path) -> None:
    folders = str(tiny_model(tmp_path / "student", vocab=288)), str(tiny_model(tmp_path / "teacher", vocab=288, tied=False))
    with rg.compile(distilled(folders, "fsdp"), rg.Cluster(cpus=2)).run_here() as job:
        expected = [step.metrics for step in job.steps(2)]
    with forked_workers.job(distilled(folders, "vllm", max_context=64), deadline_s=240.0) as job:
        found = list(job.steps(2))
    assert found[1].staleness == 1
    for step, like in zip(found, expected, strict=True):
        for name in ("actor/distillation", "actor/grad_norm", "response_length/mean"):
            assert step.metrics[name] == pytest.approx(like[name], rel=1e-3), name
    assert expected[0]["actor/distillation"] > 0.01, "the teacher is another model"


def rollout(**sampling: Any) -> rg.Output:
    generator = rg.Generator("tiny", pool=rg.Pool("rollout"), sampling=rg.Sampling(max_tokens=4, **sampling))
    return generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=2))


def test_a_teacher_on_vllm_is_one_process_of_its_pool() -> None:
    teacher = rg.Teacher("tiny", pool=rg.Pool("teacher"), trainer="vllm")
    plan = rg.compile(rg.Graph("scored", teacher.top_log_probs(rollout(), top_k=4)), rg.Cluster(cpus=4))
    assert len(plan.node("teacher_top_log_probs").workers) == 1


def refused(model: Any, **settings: Any) -> Any:
    return model("tiny", pool=rg.Pool("train"), trainer="vllm", **settings)


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: refused(rg.Policy), r"Policy\(trainer='vllm'\): it only scores"),
        (lambda: refused(rg.Critic), r"Critic\(trainer='vllm'\): it only scores"),
        (lambda: refused(rg.Teacher, data_parallel=2), r"data_parallel=2\): it is one process"),
        (lambda: refused(rg.Teacher).log_probs(rollout(temperature=0.5)), "sampled at temperature 0.5"),
        (lambda: rg.Teacher("tiny", pool=rg.Pool("train"), max_context=64), r"'fsdp' has no such setting; .* use trainer='vllm'"),
        (lambda: refused(rg.Teacher).top_log_probs(rollout(), top_k=None), "has top_k=None"),
        (
            lambda: refused(rg.Reference).old_log_probs(rollout(), weights=rg.feedback("weights", depth=1)),
            "keeps the weights of its folder",
        ),
    ],
)
def test_what_vllm_does_not_score_is_refused_where_it_is_declared(declare: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        declare()


def test_a_teacher_with_less_room_than_a_row_may_have_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folders = str(tiny_model(tmp_path / "student", vocab=288)), str(tiny_model(tmp_path / "teacher", vocab=288))
    for room, words in ((None, None), (64, None), (63, "'rollout', which may have 64 tokens, but its model has room for 63")):
        graph = distilled(folders, "vllm", max_context=room)
        node = next(node for node in graph.nodes if node.name == "teacher_top_log_probs")
        if words is None:
            node.operation.check(node)
        else:
            with pytest.raises(GraphError, match=words):
                node.operation.check(node)
