"""Graphs with teachers: what they teach, whose rows they score, and the gradient of whole distributions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.direct_forward import SUMS, forward_log_probs, norm_of, policy, read_first_batch, run

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab=288))


def student_and_teachers(model: str, **update: Any) -> rg.Graph:
    sampling = rg.Sampling(max_tokens=4)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, max_context=64, dtype="float32")
    trained, weights = policy(model, micro_batch_tokens=40), rg.feedback("weights", depth=0)
    teachers = {name: rg.Teacher(update.pop(name, model), pool=rg.Pool(name), dtype="float32") for name in ("maths", "code")}
    prompts = rg.prompts([{"prompt": "1 + 1 =", "data_source": "maths"}, {"prompt": "def f", "data_source": "code"}], count=2)
    rollout = generator.rollout(prompts, weights, group_size=2)
    scored = rg.options.by_source(prompts, rollout, teachers=teachers, top_k=update.pop("top_k"))
    if "loss" not in update:
        scored = rg.advantages(rollout, scored, estimator=rg.estimators.TeacherKL())
    step = trained.update(rollout, scored, loss=update.get("loss", rg.ClippedLoss()))
    weights.close(step.weights)
    return rg.Graph("distill", step.metrics)


@pytest.mark.parametrize("top_k", [8, None])
def test_a_teacher_with_the_students_weights_teaches_nothing_and_another_one_does(model: str, top_k: int | None, tmp_path: Path) -> None:
    loss = {} if top_k is None else {"loss": rg.losses.DistillationLoss(divergence="reverse_kl")}
    with rg.compile(student_and_teachers(model, top_k=top_k, **loss), rg.Cluster(cpus=2)).run_here() as job:
        (same,) = job.steps(1)
    assert same.metrics["actor/grad_norm"] < 1e-3
    assert (same.metrics["teachers/maths"], same.metrics["teachers/code"]) == (2, 2)
    other = tiny_model(tmp_path / "other", vocab=288, tied=False)
    with rg.compile(student_and_teachers(model, top_k=top_k, maths=str(other), **loss), rg.Cluster(cpus=2)).run_here() as job:
        (apart,) = job.steps(1)
    assert apart.metrics["actor/grad_norm"] > 10 * same.metrics["actor/grad_norm"] + 1e-3


@pytest.mark.parametrize("top_k", [8, 1000])
def test_a_teacher_without_a_row_of_its_source_scores_nothing(model: str, top_k: int) -> None:
    """The first one too, whose columns the rows of the others go to; a source may be any text."""
    for own in ("a", "a.b"):
        teachers = {name: rg.Teacher(model, pool=rg.Pool(name), dtype="float32") for name in ("a", "a.b")}
        trained = policy(model)
        source = rg.examples([{**row, "data_source": own} for row in SUMS], 4, trained)
        scored = rg.options.by_source(source, teachers=teachers, top_k=top_k)
        (metrics,) = run(trained.update(source, scored, loss=rg.losses.DistillationLoss()).metrics)
        assert metrics["actor/distillation"] == pytest.approx(0.0, abs=1e-5)
        assert [metrics[f"teachers/{name}"] for name in teachers] == [4.0 * (name == own) for name in teachers]


@pytest.mark.parametrize("top_k", [None, 8])
def test_each_row_is_scored_by_the_teacher_of_its_source(model: str, tmp_path: Path, top_k: int | None) -> None:
    folders = {"maths": model, "code": str(tiny_model(tmp_path / "other", vocab=288, tied=False))}
    teachers = {name: rg.Teacher(folder, pool=rg.Pool(name), dtype="float32") for name, folder in folders.items()}
    source = rg.examples([{**row, "data_source": ("maths", "code")[n % 3 == 0]} for n, row in enumerate(SUMS)], 8, policy(model))
    seen: dict[str, Any] = {}

    @rg.node(reads=["data_sources", "teacher_log_probs"], writes="rewards")
    def look(batch: Any) -> Any:
        seen.update(batch)
        return {"rewards": torch.zeros(len(batch["data_sources"]))}

    run(look(source, rg.options.by_source(source, teachers=teachers, top_k=top_k)))
    of_each = {name: forward_log_probs(folder, read_first_batch(source))[1].detach() for name, folder in folders.items()}
    assert not torch.allclose(*of_each.values(), atol=1e-2)
    assert set(seen["data_sources"]) == set(folders)
    expected = torch.stack([of_each[name][row] for row, name in enumerate(seen["data_sources"])])
    torch.testing.assert_close(seen["teacher_log_probs"], expected, atol=1e-4, rtol=0)


def test_whole_distributions_reach_the_loss_as_the_models_own_forward_gives_them(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    other = str(tiny_model(tmp_path / "other", vocab=288, tied=False))
    trained, teacher = policy(model, micro_batch_tokens=40), rg.Teacher(other, pool=rg.Pool("teacher"), dtype="float32")
    source = rg.examples(SUMS, 4, trained)
    step = trained.update(source, teacher.top_log_probs(source, top_k=None), loss=rg.losses.DistillationLoss())
    (metrics,) = run(step.metrics)
    columns = read_first_batch(source)
    nets = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, other)]
    loss: Any = 0.0
    for row, mask in enumerate(columns["response_mask"]):
        prompt = columns["prompts"][row][columns["prompt_mask"][row]]
        whole = torch.cat([prompt, columns["responses"][row]])[None]
        student, taught = (net(input_ids=whole).logits[0, len(prompt) - 1 : -1][mask].log_softmax(-1) for net in nets)
        loss = loss + (taught.detach().exp() * (taught.detach() - student)).sum() / columns["response_mask"].sum()
    assert metrics["actor/distillation"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm_of(nets[0], loss), rel=1e-3)
