"""What a plan knows of the part of a model that reads images, before anything is loaded: its memory, and its time in a step."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import seeing
from support.tiny import WeightedLikelihood
from support.trainer_engines import fsdp_engine
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.hf.image_costs import tower_of_folder
from rlgraph.engines.hf.image_tower import ImageTower
from rlgraph.engines.hf.images import KEPT
from rlgraph.plan.estimates import PREFILL
from rlgraph.plan.memory import loading_peaks
from rlgraph.plan.model_shapes import kept_by_layer, shapes_of
from rlgraph.plan.roofline import DEVICES, TRAINING, priced_for, roofline

H100, SIZES = DEVICES["H100"], ((112, 56), (40, 24))
ROWS = [{"prompt": "<image>what?", "images": [seeing.picture(seed, *SIZES[seed])], "answer": "1"} for seed in (0, 1)]
ASKED = [{"prompt": "<image>or<image>?", "images": [image for row in ROWS for image in row["images"]]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(seeing.folder_of("llava", tmp_path_factory.mktemp("llava")))


def length(response: str) -> float:
    return float(len(response))


def graph(model: str, *, prompts: int = 2, **given: Any) -> rg.Graph:
    generator = rg.Generator(model, pool=rg.Pool("rollout"), images=2, sampling=rg.Sampling(max_tokens=6))
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), **given)
    weights = rg.feedback("weights", depth=1)
    asked = rg.prompts(ROWS, count=prompts)
    sampled = generator.rollout(asked, weights, group_size=4)
    reference = rg.Reference(model, pool=rg.Pool("reference")).log_probs(sampled)
    advantages = rg.advantages(sampled, rg.reward(length, sampled), estimator=rg.GRPO())
    step = policy.update(sampled, advantages, reference, policy.log_probs(sampled), loss=rg.ClippedLoss(kl_coef=0.1))
    weights.close(step.weights)
    score = rg.evaluate(generator, ASKED, weights, reward=length, every=2, samples=3, sampling=rg.Sampling(max_tokens=6))
    return rg.Graph("sees", step.metrics, score)


@pytest.mark.parametrize("kind", seeing.KINDS)
def test_a_tower_is_counted_as_it_is_loaded_and_as_it_computes(kind: str, tmp_path: Path) -> None:
    folder = str(seeing.folder_of(kind, tmp_path))
    found = tower_of_folder(folder, (SIZES[:1], SIZES[1:]))
    weights = load_file(tmp_path / "model.safetensors")
    assert found.parameters == sum(each.numel() for name, each in weights.items() if any(part in name for part in seeing.TOWERS))
    tower = ImageTower(folder, torch.device("cpu"), torch.float32)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:  # which does not see the kernels of a CPU
        seen = [tower.see(f'["{row["images"][0]}"]') for row in ROWS]
    assert found.kept == KEPT * sum(part.numel() for each in seen for part in (each.features, *each.deep)) / len(seen)
    assert found.operations == pytest.approx(counted.get_total_flops() / len(seen), rel=0.05)  # class tokens and windows at edges


def kept_by_update(model: str, **given: Any) -> int:
    """Count the bytes that the backward pass of an update finds in memory, besides parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = 0 if isinstance(tensor, torch.nn.Parameter) else storage.nbytes()
        return tensor

    given |= {"optimizer": rg.AdamW(lr=1e-3), "dtype": torch.float32, "micro_batch_tokens": 4096}
    with closing(fsdp_engine(PolicyHead(model), **given)) as engine, saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.update(seeing.batch_of(Path(model), "llava"), WeightedLikelihood())
    return sum(kept.values())


def test_recompute_frees_what_the_layers_of_a_trained_tower_keep(model: str) -> None:
    kept = {(vision, way): kept_by_update(model, train_vision=vision, recompute=way) for vision in (False, True) for way in (False, True)}
    by_tower = kept[True, False] - kept[True, True] - (kept[False, False] - kept[False, True])
    tower = tower_of_folder(model, (SIZES[1:] * 6,))  # the six images of the batch
    a_layer = kept_by_layer(tower.shape) - kept_by_layer(tower.shape, True)
    assert by_tower / 4 == pytest.approx(tower.patches * tower.shape.layers * a_layer, rel=0.25)


def test_a_folder_without_a_processor_has_a_tower_and_no_work(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(model) / "config.json").read_text())
    found, whole = (tower_of_folder(str(folder), (SIZES,)) for folder in (tmp_path, model))
    assert (found.parameters, found.operations, found.tokens, found.kept) == (whole.parameters, 0.0, 0.0, 0)


def test_each_node_that_reads_images_needs_memory_for_the_tower_and_those_that_keep_features_for_them(model: str) -> None:
    tower = tower_of_folder(model, (SIZES[:1], SIZES[1:]))
    plan = rg.compile(graph(model), rg.Cluster(gpus=3, gpu="H100"))
    memory = {need.pool: dict(need.parts) for need in plan.memory if not need.loading}
    expected = {"image tower": 2 * tower.parameters, "features of images": 2 * tower.kept}
    assert {part: memory["rollout"].get(part) for part in expected} == {"image tower": 2 * tower.parameters, "features of images": None}
    for pool in ("train", "reference"):
        assert {part: memory[pool][part] for part in expected} == expected
    assert "image tower" in str(plan)


def test_an_engine_loads_and_sleeps_with_its_tower(model: str) -> None:
    made, shapes = graph(model), shapes_of(graph(model))
    whole = 2 * (shapes[model].parameters + tower_of_folder(model, ()).parameters)
    plan = rg.compile(made, rg.Cluster(gpus=3, gpu="H100"))
    loading = {need.pool: dict(need.parts) for need in loading_peaks(made, plan.cluster, plan.workers, shapes)}
    assert loading["rollout"] == {"whole weights of generator": whole}
    assert priced_for(made, plan.cluster, None, shapes).sleep["generator"].bytes == whole


def test_an_estimate_counts_the_images_of_a_step_once_for_each_prompt_and_model(model: str) -> None:
    made = graph(model)
    costs, more = (roofline(each, H100, shapes_of(each)) for each in (made, graph(model, prompts=4)))
    tower = tower_of_folder(model, (SIZES[:1], SIZES[1:]))
    a_prompt = tower.operations / H100.flops

    def shared_s(name: str) -> float:
        return costs.cost_of(name).parallel_s

    assert shared_s("rollout") == pytest.approx(2 * a_prompt / PREFILL)
    assert shared_s("evaluate") == shared_s("rollout")  # one question with two images
    scored = next(node.name for node in made.nodes if node.writes == ("old_log_probs",))
    compared = next(node.name for node in made.nodes if node.writes == ("ref_log_probs",))
    assert shared_s(scored) == shared_s(compared) == pytest.approx(2 * a_prompt / TRAINING)
    assert shared_s("update") == more.cost_of("update").parallel_s  # its model has kept the features
    assert more.cost_of("rollout").parallel_s == 2 * shared_s("rollout")
    assert costs.lengths is not None
    assert costs.lengths.prompt_tokens == pytest.approx(len("what?") / 3 + tower.tokens)


def test_a_tower_that_is_trained_is_sharded_and_computes_in_each_node_and_backwards(model: str) -> None:
    made, tower = graph(model, train_vision=True), tower_of_folder(model, (SIZES[:1], SIZES[1:]))
    plan = rg.compile(made, rg.Cluster(gpus=4, gpu="H100"))
    ranks = sum(worker.model == "policy" for worker in plan.workers)
    train = next(dict(need.parts) for need in plan.memory if need.pool == "train" and not need.loading)
    assert train["image tower"] == (4 + 4 + 8) * tower.parameters // ranks
    assert "features of images" not in train
    assert train["activations of images"] == 2 * 2 * tower.activations(False)  # of both prompts
    again = rg.compile(graph(model, train_vision=True, recompute=True), rg.Cluster(gpus=4, gpu="H100"))
    less = next(dict(need.parts) for need in again.memory if need.pool == "train" and not need.loading)
    assert less["activations of images"] == 2 * 2 * tower.activations(True) < train["activations of images"]
    whole = 2 * (shapes_of(made)[model].parameters + tower.parameters)  # of a version, of which two are on their way
    assert train["weights in staging"] == 2 * whole // ranks
    costs, frozen = (roofline(each, H100, shapes_of(each)) for each in (made, graph(model)))
    assert costs.publish_bytes - frozen.publish_bytes == 2 * tower.parameters
    more = costs.cost_of("update").parallel_s - frozen.cost_of("update").parallel_s
    assert more == pytest.approx(3 * 2 * tower.operations / (H100.flops * TRAINING))
