"""Exports of runs: from a job, from its checkpoints, and one every few steps, all with the same bytes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import fakes, forked_workers
from support.digests import ITEMS, odd_tokens
from support.tiny import tiny_llama

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES
from rlgraph.runtime.local import LocalJob


def local_job(graph: rg.Graph, folder: Path | None, every: int = 1) -> LocalJob:
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    return LocalJob(graph, plan, Checkpoints(graph, plan, Recovery(folder, every, 2)) if folder else None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def graph_of(model: Path, depth: int = 1, *, ranks: int | None = None, critic: Path | None = None) -> rg.Graph:
    sampling = rg.Sampling(max_tokens=6, temperature=0.9)
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32")
    policy = rg.Policy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32", data_parallel=ranks)
    weights = rg.feedback("weights", depth=depth)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4)
    rewards = odd_tokens(rollout)
    outputs = []
    if critic is None:
        advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    else:
        judge = rg.Critic(str(critic), pool=rg.Pool("critic"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
        values = judge.values(rollout)
        advantages = rg.advantages(rollout, rewards, values, estimator=rg.GAE())
        outputs.append(judge.update(rollout, advantages, values, loss=rg.losses.ValueLoss()).metrics)
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("tiny", step.metrics, *outputs)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def live_weights(job: LocalJob, model: str = "policy") -> dict[str, torch.Tensor]:
    engine = next(p.worker.context.engine for p in job.progress.values() if p.worker.spec.worker.model == model)
    return {shard.name: shard.tensor.clone() for shard in engine.weight_shards()}


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two steps: `live` and `live32` exported from the job, its checkpoints beside them, and its weights at that moment."""
    folder = tmp_path_factory.mktemp("trained")
    with local_job(graph_of(model), folder / "checkpoints", every=2) as job:
        assert len(list(job.steps(2))) == 2
        told = job.export(folder / "live")
        assert (told.step, told.dtype, told.folder) == (2, "bfloat16", folder / "live")
        assert told.parameters == sum(tensor.numel() for tensor in live_weights(job).values())
        job.export(folder / "live32", dtype="float32")
        return folder, live_weights(job)


def test_an_export_is_the_live_weights_bit_for_bit(trained: tuple[Path, dict[str, torch.Tensor]], model: Path) -> None:
    folder, live = trained
    rounded, plain, before = weights_in(folder / "live"), weights_in(folder / "live32"), weights_in(model)
    assert rounded.keys() == plain.keys() == live.keys() == before.keys() - {"lm_head.weight"}
    assert any(not torch.equal(plain[name], before[name]) for name in plain)
    for name, tensor in live.items():
        assert torch.equal(plain[name], tensor)
        assert torch.equal(rounded[name], tensor.bfloat16())


PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
engine = LLM(sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True)
greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
answers = engine.generate([{"prompt_token_ids": [3, 5, 8]}, {"prompt_token_ids": [40, 2]}], greedy, use_tqdm=False)
print("answers", json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""


@pytest.mark.vllm
def test_plain_vllm_answers_from_an_export_as_transformers_does(trained: tuple[Path, dict[str, torch.Tensor]]) -> None:
    from transformers import AutoModelForCausalLM

    exported = trained[0] / "live32"
    alone = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    ended = subprocess.run([sys.executable, "-c", PLAIN_VLLM, str(exported)], env=alone, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers = json.loads(ended.stdout.split("answers ")[1])
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for prompt, answer in zip([[3, 5, 8], [40, 2]], answers, strict=True):
        whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, min_new_tokens=8)
        assert answer == whole[0, len(prompt) :].tolist()


def test_a_checkpoint_exports_the_same_files_as_the_job(trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, _ = trained
    told = rg.runs.export(folder / "checkpoints", tmp_path / "newest")
    assert told.step == 2
    rg.runs.export(folder / "checkpoints" / "step-00000002", tmp_path / "named", dtype="float32")
    for found, live in (("newest", "live"), ("named", "live32")):
        ours, theirs = bytes_in(tmp_path / found), bytes_in(folder / live)
        assert ours.keys() == theirs.keys()
        assert {name for name in ours if ours[name] != theirs[name]} <= {"README.md"}


def test_transformers_loads_an_export_and_its_tokenizer(trained: tuple[Path, dict[str, torch.Tensor]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, live = trained
    loaded = AutoModelForCausalLM.from_pretrained(folder / "live32")
    assert loaded.dtype == torch.float32
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, live[name])
    assert AutoModelForCausalLM.from_pretrained(folder / "live").dtype == torch.bfloat16
    assert (
        AutoTokenizer.from_pretrained(folder / "live")("ab")["input_ids"]
        == AutoTokenizer.from_pretrained(folder / "live32")("ab")["input_ids"]
    )
    assert GenerationConfig.from_pretrained(folder / "live").eos_token_id == 0


def test_the_card_has_graph_settings_and_figures_and_no_folder_of_this_machine(
    trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, _ = trained
    rg.runs.export(folder / "checkpoints", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for said in ("# tiny: policy after 2 steps", "```mermaid", "| actor/pg_loss |", "### policy of update", "| optimizer.lr | 0.001 |"):
        assert said in card
    assert str(folder.parent.parent) not in card


def test_chat_templates_are_kept_and_what_is_no_part_of_a_model_is_not(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    (own / "chat_template.jinja").write_text("{{ messages }}")
    (own / "generation_config.json").unlink()
    (own / "training_args.bin").touch()
    with rg.compile(graph_of(own), rg.Cluster(cpus=2)).run_here() as job:
        job.export(tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "out" / "training_args.bin").exists()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_a_checkpoint_exports_from_another_folder_than_that_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tiny_llama(tmp_path).relative_to(tmp_path)
    with local_job(graph_of(own), Path("checkpoints"), every=1) as job:
        list(job.steps(1))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert rg.runs.export(tmp_path / "checkpoints", "out").step == 1


def test_a_critic_is_exported_by_its_name_and_is_a_critic_again(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    with local_job(graph_of(model, critic=tiny_llama(tmp_path)), tmp_path / "checkpoints", every=1) as job:
        list(job.steps(1))
        job.export(tmp_path / "policy")
        job.export(tmp_path / "critic", policy="critic", dtype="float32")
        live = live_weights(job, "critic")
        with pytest.raises(rg.errors.ExportError, match=r"the trained models are \['policy', 'critic'\]|\['critic', 'policy'\]"):
            job.export(tmp_path / "other", policy="actor")
    rg.runs.export(tmp_path / "checkpoints", tmp_path / "again", "float32", "critic")
    assert weights_in(tmp_path / "again").keys() == weights_in(tmp_path / "critic").keys()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(loaded.score.weight, live["score.weight"])
    with rg.compile(graph_of(model, critic=tmp_path / "critic"), rg.Cluster(cpus=2)).run_here() as job:
        assert all(torch.equal(tensor, live[name]) for name, tensor in live_weights(job, "critic").items())


def test_what_cannot_be_exported_is_one_error_before_anything_is_written(
    trained: tuple[Path, dict[str, torch.Tensor]], model: Path, tmp_path: Path
) -> None:
    folder, _ = trained
    with pytest.raises(rg.errors.CheckpointError, match="does not exist"):
        rg.runs.export(tmp_path / "none", tmp_path / "out")
    with pytest.raises(rg.errors.CheckpointError, match="holds none"):
        rg.runs.export(tmp_path, tmp_path / "out")
    with pytest.raises(rg.errors.ExportError, match="does not overwrite"):
        rg.runs.export(folder / "checkpoints", tmp_path)
    with pytest.raises(rg.errors.PlanError, match="dtype is one of"):
        rg.runs.export(folder / "checkpoints", tmp_path / "out", dtype="float16")  # type: ignore[arg-type]
    broken = tmp_path / "broken"
    shutil.copytree(folder / "checkpoints" / "step-00000002", broken)
    shard = next((broken / "policy").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(rg.errors.CheckpointError, match="was changed after it was written"):
        rg.runs.export(broken, tmp_path / "out")
    with local_job(fakes.vector_loop(0), None) as job, pytest.raises(rg.errors.ExportError, match="nothing to export"):
        job.export(tmp_path / "out")
    gone = tmp_path / "gone"
    shutil.copytree(model, gone)
    with local_job(graph_of(gone), tmp_path / "checkpoints") as job:
        list(job.steps(1))
        shutil.rmtree(gone)
        with pytest.raises(rg.errors.ExportError, match="which cannot be used"):
            job.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_exports_every_few_steps_need_a_folder_of_checkpoints_and_one_policy(model: Path) -> None:
    with pytest.raises(rg.errors.PlanError, match="pass checkpoint="):
        rg.compile(graph_of(model), rg.Cluster(cpus=2)).launch(export_every=2)
    with pytest.raises(rg.errors.ExportError, match="nothing to export"):
        rg.compile(fakes.vector_loop(0), rg.Cluster(cpus=2)).launch(checkpoint="never made", export_every=2)


@pytest.mark.stage("jobs")
def test_two_ranks_export_between_steps_what_their_checkpoint_holds(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    plan = rg.compile(graph_of(model, ranks=2), rg.Cluster(cpus=3))
    with plan.launch(checkpoint=tmp_path / "checkpoints", every=2, export_every=2) as job:
        for step in job.steps(5):
            exports = sorted(path.name for path in (tmp_path / "checkpoints" / "exports").glob("*"))
            assert exports == [f"step-{done:08d}" for done in (2, 4) if done <= step.index + 1]
            if step.index == 2:
                assert 3 <= job.export(tmp_path / "between").step <= 4
                with pytest.raises(rg.errors.ExportError, match="does not overwrite"):
                    job.export(tmp_path / "between")
        job.export(tmp_path / "last")
    rg.runs.export(tmp_path / "checkpoints", tmp_path / "last again")
    rg.runs.export(tmp_path / "checkpoints" / "step-00000004", tmp_path / "4 again")
    for live, stored in ((tmp_path / "last", "last again"), (tmp_path / "checkpoints" / "exports" / "step-00000004", "4 again")):
        assert (live / "model.safetensors").read_bytes() == (tmp_path / stored / "model.safetensors").read_bytes()
    with rg.compile(graph_of(model), rg.Cluster(cpus=2)).run_here() as here:
        list(here.steps(2))
        alone = {name: tensor.bfloat16() for name, tensor in live_weights(here).items()}
    found = weights_in(tmp_path / "checkpoints" / "exports" / "step-00000002")
    assert all(torch.allclose(found[name].float(), tensor.float(), atol=1e-2) for name, tensor in alone.items())


def test_an_export_that_fails_leaves_the_run_going(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    plan = rg.compile(graph_of(model), rg.Cluster(cpus=2))
    with plan.launch(checkpoint=tmp_path / "checkpoints", every=1, export_every=1) as job:
        (tmp_path / "checkpoints" / "exports").touch()  # no folder can be made there
        assert [step.index for step in job.steps(2)] == [0, 1]
    assert "the run continues without this export" in capfd.readouterr().err
