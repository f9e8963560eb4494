"""Each rank reads its own boxes of the weights, and together they are bit for bit what transformers loads."""

import json
import logging
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.families import folder_of
from support.forked_ranks import process_group, run_ranks
from support.forked_workers import server
from support.tiny import tiny_llama, tiny_qwen
from support.trainer_engines import fsdp_engine
from transformers import AutoModel, AutoModelForCausalLM

from rlgraph.engines.forward.head import PolicyHead, ValueHead
from rlgraph.engines.fsdp.sharding import own_box
from rlgraph.engines.hf import folder_weights
from rlgraph.engines.hf.folder_weights import FolderWeights, PieceReader
from rlgraph.engines.hf.unloaded import skeleton
from rlgraph.errors import DataError
from rlgraph.values.optimizers import AdamW

HEADS = {"policy": PolicyHead, "critic": ValueHead}
Held = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]  # by parameter: whole shape, offsets, this rank's box


def load_shards(kind: str, folder: Path, rank: int, world: int) -> Held:
    """Load a model, and copy the boxes that this rank has of it."""
    engine = fsdp_engine(HEADS[kind](folder), optimizer=AdamW(), rank=rank, world=world, dtype=torch.float32)
    boxes = {name: own_box(name, parameter) for name, parameter in engine.trained_parameters().items()}
    found = {name: (box.global_shape, box.offsets, box.tensor.clone()) for name, box in boxes.items()}
    engine.close()
    return found


def be_rank(models: list[tuple[str, Path]], out: Path, rank: int, world: int) -> None:
    with process_group(out, rank, world):
        found = {(kind, folder.name): load_shards(kind, folder, rank, world) for kind, folder in models}
        torch.save(found, out / f"{rank}.pt")
        dist.barrier()


def load_forever(folder: Path, reading: Any) -> None:
    """Load a model, but stop in the middle of a file, once `reading` is set."""
    read, done = PieceReader._read, []

    def halting(*given: Any) -> Any:
        done.append(1)
        if len(done) > 3:
            reading.set()
            time.sleep(600)
        return read(*given)

    PieceReader._read = halting  # type: ignore[method-assign]
    load_shards("policy", folder, 0, 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tied and untied heads, biases, norms of heads, a soft cap, experts that transformers fuses, and weights in several files."""
    parent = tmp_path_factory.mktemp("models")
    logging.disable()
    found = {
        path.name: path
        for path in (tiny_llama(parent), tiny_llama(parent, tied=False), tiny_qwen(parent, "qwen2"), tiny_qwen(parent, "qwen3"))
    }
    found |= {name: folder_of(name, parent) for name in ("gemma2", "qwen3_moe")}
    several = parent / "several"
    AutoModelForCausalLM.from_pretrained(found["qwen3"]).save_pretrained(several, max_shard_size="200KB")
    assert len(list(several.glob("*.safetensors"))) > 3
    logging.disable(logging.NOTSET)
    return found | {"several": several}


def loaded(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers loads, in float32, and the head of a critic, which begins at 0."""
    auto: Any = AutoModelForCausalLM if kind == "policy" else AutoModel
    model = auto.from_pretrained(folder, dtype=torch.float32)
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found | ({"score.weight": torch.zeros(1, model.config.hidden_size)} if kind == "critic" else {})


def check_boxes(ranks: list[Held], expected: dict[str, torch.Tensor]) -> None:
    for held in ranks:
        assert list(held) == list(expected)
    for name, whole in expected.items():
        assert all(rank[name][0] == tuple(whole.shape) for rank in ranks)
        assert torch.equal(torch.cat([rank[name][2] for rank in ranks]), whole), name


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_shards_of_all_ranks_are_what_transformers_loads(folders: dict[str, Path], tmp_path: Path, world: int) -> None:
    models = [("policy", folder) for folder in folders.values()] + [("critic", folders[name]) for name in ("tied", "qwen3_moe")]
    if world == 1:
        found = [{(kind, folder.name): load_shards(kind, folder, 0, 1) for kind, folder in models}]
    else:
        found = run_ranks(be_rank, world, models, out=tmp_path / "ranks")
    for kind, folder in models:
        check_boxes([rank[kind, folder.name] for rank in found], loaded(kind, folder))


def test_tables_that_no_file_holds_are_those_of_transformers(folders: dict[str, Path]) -> None:
    for name in ("gemma2", "qwen3_moe", "tied"):
        built, plain = skeleton(AutoModelForCausalLM, folders[name]), AutoModelForCausalLM.from_pretrained(folders[name])
        expected = dict(plain.named_buffers())
        assert expected
        assert all(torch.equal(buffer, expected[name]) for name, buffer in built.named_buffers())
        assert all(parameter.is_meta for parameter in built.parameters())


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is read from now on: in rows, and piece by piece."""
    found, read, pieces = list[int](), FolderWeights._read, folder_weights._pieces

    def count_rows(*given: Any) -> Any:
        for rows, piece in read(*given):
            found.append(piece.numel())
            yield rows, piece

    def count_pieces(box: folder_weights.FileBox) -> list[folder_weights.FileBox]:
        boxes = list(pieces(box))
        found.extend(piece.out.numel() for piece in boxes)
        return boxes

    monkeypatch.setattr(FolderWeights, "_read", count_rows)
    monkeypatch.setattr(folder_weights, "_pieces", count_pieces)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pieces_of_several_threads_are_cast_as_torch_casts(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.randn(300, 7).to(dtype) for name in ("a", "b")}
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(folder_weights, "PIECE_BYTES", 512)
    reader, out = folder_weights.PieceReader([tmp_path / "model.safetensors"]), {name: torch.zeros(200, 7) for name in tensors}
    boxes = [reader.box(name, (50, 0), into) for name, into in out.items()]
    reader.read(box for box in boxes if box is not None)
    assert all(torch.equal(into, tensors[name][50:250].float()) for name, into in out.items())
    assert reader.box("a", (0, 2), torch.zeros(10, 3)) is None  # columns don't lie together
    os.truncate(tmp_path / "model.safetensors", 3000)
    with pytest.raises(DataError, match=r"ends at byte 3000, within a tensor"):
        reader.read(box for box in boxes if box is not None)


def test_a_rank_reads_no_more_than_its_boxes_and_no_more_than_a_piece_at_once(
    folders: dict[str, Path], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = FolderWeights(folders["qwen3"], skeleton(AutoModelForCausalLM, folders["qwen3"]))
    monkeypatch.setattr(folder_weights, "PIECE_BYTES", 1000)
    name, expected = "model.embed_tokens.weight", loaded("policy", folders["qwen3"])["model.embed_tokens.weight"]
    for offsets, shape in (((100, 3), (7, 20)), ((0, 0), tuple(expected.shape)), ((0, 0), (0, 128))):
        sizes.clear()
        out = torch.empty(shape)
        weights.fill(name, offsets, out)
        assert torch.equal(out, expected[offsets[0] : offsets[0] + shape[0], offsets[1] : offsets[1] + shape[1]])
        assert sum(sizes) == out.numel()
        assert all(4 * size <= 1000 for size in sizes)


def test_a_rank_reads_no_more_of_fused_experts_than_its_own(
    folders: dict[str, Path], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = FolderWeights(folders["qwen3_moe"], skeleton(AutoModelForCausalLM, folders["qwen3_moe"]))
    monkeypatch.setattr(FolderWeights, "_convert_parameter", None)
    for name in ("gate_up_proj", "down_proj"):
        whole = loaded("policy", folders["qwen3_moe"])[f"model.layers.1.mlp.experts.{name}"]
        sizes.clear()
        out = torch.empty(2, whole.shape[1] // 2, whole.shape[2])
        weights.fill(f"model.layers.1.mlp.experts.{name}", (1, whole.shape[1] // 4, 0), out)
        assert torch.equal(out, whole[1:3, whole.shape[1] // 4 : whole.shape[1] // 4 * 3])
        assert sum(sizes) == out.numel()


def test_an_engine_trains_from_the_weights_that_it_read(folders: dict[str, Path]) -> None:
    from support.tiny import LENGTHS, WeightedLikelihood, batch_of

    batch, results = batch_of(LENGTHS), []
    for head in (PolicyHead(folders["tied"]), PolicyHead(AutoModelForCausalLM.from_pretrained(folders["tied"], dtype=torch.float32))):
        with closing(fsdp_engine(head, optimizer=AdamW(lr=1e-2), dtype=torch.float32)) as engine:
            metrics = [engine.update(batch, WeightedLikelihood()) for _ in range(2)]
            results.append((metrics, {name: weight.clone() for name, weight in engine.weights().items()}))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(weight, results[1][1][name]) for name, weight in results[0][1].items())


def changed(source: Path, target: Path, change: Any) -> Path:
    """Copy a folder of one file, with other tensors."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_critic_begins_with_the_head_of_a_reward_model(folders: dict[str, Path], tmp_path: Path) -> None:
    head = torch.randn(1, 64).bfloat16()
    folder = changed(folders["tied"], tmp_path / "reward", lambda tensors: tensors.update({"score.weight": head}))
    assert torch.equal(load_shards("critic", folder, 0, 1)["score.weight"][2], head.float())


def test_a_folder_without_a_weight_is_refused_by_its_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["untied"], tmp_path / "lacking", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(DataError, match=r"hold no weights for \['lm_head.weight'\].*another model than config.json"):
        PolicyHead(folder)
    ValueHead(folder)  # which has no language head


def test_a_weight_of_another_shape_is_refused_by_its_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["tied"], tmp_path / "other", lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(DataError, match=r"'model.norm.weight' has the shape \[3\], but by config.json it is \[64\]"):
        PolicyHead(folder)


def test_a_tied_head_that_the_folder_holds_with_other_values_is_one_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    for number, differs in enumerate((True, False)):

        def add(tensors: dict[str, torch.Tensor], differs: bool = differs) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0.5 if differs else 0)

        folder = changed(folders["tied"], tmp_path / str(number), add)
        held = load_shards("policy", folder, 0, 1)
        assert ("lm_head.weight" in held) == differs
        check_boxes([held], loaded("policy", folder))


def test_quantised_weights_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["tied"], tmp_path / "fp8", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has a quantization_config; a trainer requires weights in"):
        PolicyHead(folder)


def test_a_rank_that_is_killed_while_it_loads_leaves_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    left = {folder: set(folder.iterdir()) for folder in (Path("/dev/shm"), folders["qwen3"])}
    reading = server.Event()
    rank = server.Process(target=load_forever, args=(folders["qwen3"], reading), daemon=True)
    rank.start()
    mine = f"/proc/{rank.pid}/fd"
    assert reading.wait(200)
    assert any(os.readlink(f"{mine}/{number}").startswith(str(folders["qwen3"])) for number in os.listdir(mine)) or any(
        str(folders["qwen3"]) in line for line in Path(f"/proc/{rank.pid}/maps").read_text().splitlines()
    )
    rank.kill()
    rank.join(60)
    assert rank.exitcode == -signal.SIGKILL
    assert set(folders["qwen3"].iterdir()) == left[folders["qwen3"]]
    made = {file.name for file in set(Path("/dev/shm").iterdir()) - left[Path("/dev/shm")] if f"{rank.pid}" in file.name}
    assert not made
