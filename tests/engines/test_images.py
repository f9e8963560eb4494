"""Models that read images: trainers and engines compute with them what transformers does, row by row."""

import copy
import importlib.util
import itertools
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import seeing
from support.tiny import WeightedLikelihood
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead, ValueHead
from rlgraph.engines.fsdp.sharding import local
from rlgraph.engines.hf.images import expand_images, processor_of, read_images
from rlgraph.engines.hf.model_files import in_text_model
from rlgraph.engines.hf.pretrained import parameter_shapes
from rlgraph.engines.lora import PEFT, BaseWeights, SavedAdapter, peft_names, read_adapter, write_config
from rlgraph.engines.transformers.engine import TransformersEngine
from rlgraph.errors import DataError
from rlgraph.runtime.checkpoint.export import language_part
from rlgraph.values.lora import TENSORS

NEAR = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", params=seeing.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.folder_of(kind, tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def net(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_a_prompt_has_the_tokens_that_the_models_processor_writes(kind: str, folder: Path) -> None:
    mark, processor = seeing.SPECIAL[kind][0], processor_of(str(folder))
    text, urls = f"a\n{mark}\n\nb{mark}{mark}\n c\n", seeing.row(2, 3, 4)
    plain = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = processor(text=[text], images=[read_images(urls)], add_special_tokens=False)["input_ids"][0]
    assert expand_images(folder, plain, urls)[0] == list(expected)
    with pytest.raises(DataError, match="writes 3 marks for a prompt with 1 images"):
        expand_images(folder, plain, seeing.row(2))
    with pytest.raises(DataError, match="writes 3 marks for a prompt with 0 images"):
        expand_images(folder, plain, "[]")


def test_a_trainer_scores_rows_with_images_as_transformers_does_each_in_every_layout(kind: str, folder: Path, net: Any) -> None:
    batch = seeing.batch_of(folder, kind)
    with torch.no_grad():
        expected = seeing.direct_log_probs(net, folder, batch)
    for flat, shared in itertools.product((False, True), repeat=2):
        layout = {"flat": flat, "shared": shared, "micro_batch_tokens": 100}
        with closing(fsdp_engine(PolicyHead(folder), optimizer=rg.AdamW(lr=1e-3), dtype=torch.float32, **layout)) as engine:
            torch.testing.assert_close(engine.scores(batch), expected, **NEAR)


@pytest.mark.parametrize("given", [{"recompute": True}, {"train_vision": True, "recompute": "selective"}], ids=str)
def test_an_update_has_the_gradients_of_transformers(kind: str, folder: Path, net: Any, given: dict[str, Any]) -> None:
    """Without `train_vision` the tower has none."""
    batch = seeing.batch_of(folder, kind)
    net.zero_grad()
    loss = -(seeing.direct_log_probs(net, folder, batch) * batch["advantages"]).sum() / batch["response_mask"].sum()
    loss.backward()
    optimizer = rg.AdamW(lr=1e-3, grad_clip=1e9)
    with closing(fsdp_engine(PolicyHead(folder), optimizer=optimizer, dtype=torch.float32, **given)) as engine:
        engine.update(batch, WeightedLikelihood())
        moments = {name: local(moment) for name, moment in engine.state().items() if name.endswith("exp_avg") and local(moment).any()}
    frozen = () if "train_vision" in given else seeing.TOWERS
    gradients = {
        name: p.grad for name, p in net.named_parameters() if p.grad is not None and p.grad.any() and not any(of in name for of in frozen)
    }
    assert len(moments) == len(gradients)
    found, expected = (torch.stack(sorted(each.norm() for each in of.values())) for of in (moments, gradients))
    torch.testing.assert_close(found / 0.1, expected, **NEAR)


@pytest.mark.parametrize("vision", [False, True], ids=["language model", "all"])
def test_an_adapter_is_the_model_with_merged_weights_and_pefts_by_name(
    kind: str, folder: Path, net: Any, tmp_path: Path, vision: bool
) -> None:
    batch, given = seeing.batch_of(folder, kind), {"optimizer": rg.AdamW(lr=1e-2), "dtype": torch.float32, "train_vision": vision}
    with closing(fsdp_engine(PolicyHead(folder), adapter=rg.LoRA(rank=2, alpha=4.0), **given)) as engine:
        engine.update(batch, WeightedLikelihood())
        engine.update(batch, WeightedLikelihood())
        scores, matrices = engine.scores(batch), {box.name: box.tensor.detach().clone() for box in engine.weight_shards()}
    weights = BaseWeights(folder).with_adapter(matrices, 2.0, torch.float32)
    assert (len(weights.changed) > 7 * net.config.get_text_config().num_hidden_layers) == vision
    merged, own = copy.deepcopy(net), dict(net.named_parameters())
    names = peft_names({name: tuple(tensor.shape) for name, tensor in matrices.items()}, language_part(str(folder)))
    assert {peft.removeprefix(PEFT).split(".lora_")[0] + ".weight" for peft in names} <= own.keys()
    named = {name.removeprefix("model."): name for name in own} | {in_text_model(name): name for name in own}
    merged.load_state_dict({named[in_text_model(name)]: weights[name] for name in weights.changed}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(scores, seeing.direct_log_probs(merged, folder, batch), **NEAR)
    save_file({peft: matrices[name] for peft, (name, _) in names.items()}, tmp_path / TENSORS)
    write_config(tmp_path, SavedAdapter.of(rg.LoRA(rank=2, alpha=4.0)), "base", dict.fromkeys(matrices, (1,)))
    with closing(fsdp_engine(PolicyHead(folder), adapter=rg.LoRA.load(tmp_path), **given)) as again:
        assert torch.equal(again.scores(batch), scores)
    assert torch.equal(BaseWeights(folder).with_adapter(read_adapter(tmp_path), 2.0, torch.float32)[weights.changed[0]],
                       weights[weights.changed[0]])  # fmt: skip


def test_a_critic_sees_the_images(folder: Path, kind: str) -> None:
    batch = seeing.batch_of(folder, kind)
    with closing(fsdp_engine(ValueHead(folder), optimizer=rg.AdamW(lr=1e-1), dtype=torch.float32)) as critic:
        batch["returns"], batch["values"] = torch.ones_like(batch["advantages"]), torch.zeros_like(batch["advantages"])
        critic.update(batch, rg.losses.ValueLoss())
        values = critic.scores(batch)
        other = critic.scores({**batch, "images": [*batch["images"][2:4], *batch["images"][2:]]})
    assert not torch.allclose(values[:2], other[:2], atol=1e-3)
    torch.testing.assert_close(values[2:], other[2:], **NEAR)


def test_the_engine_transformers_samples_with_the_log_probs_of_the_trainer(kind: str, folder: Path) -> None:
    prompts, shown = seeing.requests(folder, kind)
    engine = TransformersEngine(folder, dtype=torch.float32, images=True)
    responses = engine.generate(prompts, rg.Sampling(max_tokens=12), [1, 1, 2, 3, 4], shown)
    batch = seeing.rollout_of(folder, kind, responses)
    with closing(fsdp_engine(PolicyHead(folder), optimizer=rg.AdamW(lr=1e-3), dtype=torch.float32)) as trainer:
        torch.testing.assert_close(trainer.scores(batch), batch["rollout_log_probs"], **NEAR)
    assert responses[0].tokens != responses[1].tokens, "the same text and seed, and another image"


def test_a_folder_in_the_layout_in_which_qwen_is_published_is_the_same_model(tmp_path: Path) -> None:
    """Its config.json has the language model's entries beside the tower's, and its tensors older names."""
    scores = []
    for layout in ("nested", "published"):
        folder = seeing.folder_of("qwen2_5_vl", tmp_path / layout)
        if layout == "published":
            file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
            text = config.pop("text_config")
            (folder / "config.json").write_text(json.dumps({**text, **config}))
            old = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
                   for name, tensor in load_file(file).items()}  # fmt: skip
            save_file(old, file, {"format": "pt"})
            assert parameter_shapes(folder).keys() == {name for name in old if not name.startswith("visual.")}
        with closing(fsdp_engine(PolicyHead(folder), optimizer=rg.AdamW(lr=1e-3), dtype=torch.float32)) as engine:
            scores.append(engine.scores(seeing.batch_of(folder, "qwen2_5_vl")))
    assert torch.equal(*scores)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_vllm_needs_torchvision_for_a_processor_that_reads_videos_too(family: str, tmp_path: Path) -> None:
    folder, pool = str(seeing.folder_of(family, tmp_path / family)), rg.Pool("rollout")
    if importlib.util.find_spec("torchvision") is None:
        with pytest.raises(DataError, match="needs torchvision"):
            rg.Generator(folder, pool=pool, engine="vllm", images=1)
    assert rg.Generator(folder, pool=pool, engine="transformers", images=1).images == 1


def test_vllm_is_refused_for_a_model_that_attends_in_both_directions_within_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\(gemma3\) attends in both directions within an image, .* use engine='transformers'"):
        rg.Generator(str(seeing.folder_of("gemma3", tmp_path)), pool=rg.Pool("rollout"), engine="vllm", images=1)


@pytest.mark.stage("families")
@pytest.mark.vllm
def test_vllm_samples_with_the_log_probs_of_the_trainer_before_and_after_new_weights() -> None:
    program = Path(__file__).parents[1] / "gpu" / "images_here.py"
    found = subprocess.run([sys.executable, str(program), "idefics3", "--smoke"], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "equal"
