"""Exported weights: files that safetensors reads, written box by box; a folder that is whole or absent."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from programs.data_parallel_ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from support.tiny import tiny_llama

from rlgraph.channels.weights.shards import WeightShard, unsharded_weights
from rlgraph.engines.fsdp import distributed_checkpoint
from rlgraph.engines.fsdp.spec import TRAINER
from rlgraph.engines.hf.export import INDEX, ExportDtype, ExportLayout, GrowingExport, check_target, export_names, plan_files, write_shards
from rlgraph.errors import CheckpointError, ExportError

WEIGHTS = {"a.0.w": torch.randn(5, 3), "a.10.w": torch.randn(7), "a.2.w": torch.randn(2, 3, 4), "b": torch.randn(())}


def layout_of(weights: dict[str, torch.Tensor], dtype: ExportDtype = "float32", most_bytes: int = 10**9) -> ExportLayout:
    return plan_files({name: (name, tuple(tensor.shape)) for name, tensor in weights.items()}, dtype, most_bytes)


def written(folder: Path, layout: ExportLayout, *ranks: list[WeightShard]) -> dict[str, torch.Tensor]:
    with GrowingExport(folder, layout) as growing:
        for shards in ranks:
            write_shards(growing.path, layout, shards)
        growing.finish()
    return {name: tensor for file in layout.files for name, tensor in load_file(folder / file.name).items()}


def cut(name: str, tensor: torch.Tensor, cuts: list[list[int]]) -> Iterator[WeightShard]:
    """Cut a tensor into boxes at these places of each dim."""
    spans = [list(pairwise([0, *places, size])) for places, size in zip(cuts, tensor.shape, strict=True)]
    for box in product(*spans):
        part = tensor[tuple(slice(begin, end) for begin, end in box)]
        yield WeightShard(name, tuple(tensor.shape), tuple(begin for begin, _ in box), part)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_has_the_bits_of_the_weights_rounded_once(dtype: ExportDtype, tmp_path: Path) -> None:
    found = written(tmp_path / "out", layout_of(WEIGHTS, dtype), list(unsharded_weights(WEIGHTS)))
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_files_are_bounded_numbered_and_indexed(tmp_path: Path) -> None:
    layout = layout_of(WEIGHTS, "float32", 100)
    assert [file.name for file in layout.files] == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [slot.name for slot in layout.slots] == ["a.0.w", "a.2.w", "a.10.w", "b"]
    found = written(tmp_path / "out", layout, list(unsharded_weights(WEIGHTS)))
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in WEIGHTS.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)


@pytest.mark.parametrize("cuts", [[[2], [], []], [[], [1, 3], []], [[], [], [2]], [[1, 2], [2], [1, 4]]])
@pytest.mark.parametrize("chunk_bytes", [1 << 25, 24, 2])
def test_boxes_cut_in_any_dim_come_to_their_places(
    cuts: list[list[int]], chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlgraph.engines.hf.export.CHUNK_BYTES", chunk_bytes)
    weights = {"w": torch.randn(4, 5, 6)}
    boxes = list(cut("w", weights["w"], cuts))
    found = written(tmp_path / "out", layout_of(weights, "bfloat16"), boxes[::2], boxes[1::2])
    assert torch.equal(found["w"], weights["w"].bfloat16())


def test_what_several_ranks_hold_is_written_by_the_first(tmp_path: Path) -> None:
    wrong = replace(next(unsharded_weights({"w": torch.zeros(3)})), replica=1)
    found = written(tmp_path / "out", layout_of({"w": torch.ones(3)}), list(unsharded_weights({"w": torch.ones(3)})), [wrong])
    assert torch.equal(found["w"], torch.ones(3))


def test_two_gloo_ranks_and_what_they_saved_give_the_bytes_of_one(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    ranks = run_ranks("policy", model, tmp_path, 2)
    shards = [[WeightShard(*shard) for shard in rank["shards"]] for rank in ranks]
    saved = [replace(shard.box, tensor=shard.read()) for shard in TRAINER.saved_shards(tmp_path / "stored")]  # type: ignore[misc]
    assert len(saved) == sum(len(rank) for rank in shards)
    layout = plan_files(export_names({shard.name: shard.global_shape for shard in saved}, model, "log_probs", "export"), "bfloat16")
    live, stored = written(tmp_path / "live", layout, *shards), written(tmp_path / "of_state", layout, saved)
    one = {name: torch.cat([rank["weights"][name] for rank in ranks]) for name in ranks[0]["weights"]}
    assert live.keys() == one.keys()
    for name, tensor in one.items():
        assert torch.equal(live[name], tensor.bfloat16())
        assert torch.equal(stored[name], live[name])


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="metadata"):
        list(TRAINER.saved_shards(tmp_path))  # type: ignore[misc]


MEASURE = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from rlgraph.channels.weights.shards import unsharded_weights
from rlgraph.engines.fsdp.spec import TRAINER
from rlgraph.engines.hf.export import GrowingExport
from rlgraph.engines.hf.export import plan_files
from rlgraph.engines.hf.export import write_shards

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10

live = {"w": torch.ones(64 << 20)} if sys.argv[2] == "live" else None
saved = list(unsharded_weights(live)) if live else list(TRAINER.saved_shards(Path(sys.argv[1])))
layout = plan_files({s.name: (s.name, s.global_shape) for s in (saved if live else [each.box for each in saved])}, "float32")
torch.ones(1 << 20).bfloat16()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
with GrowingExport(sys.argv[1] + sys.argv[2], layout) as growing:
    write_shards(growing.path, layout, saved if live else (replace(each.box, tensor=each.read()) for each in saved))
    growing.finish()
print(peak() - before)
"""


@pytest.mark.parametrize("source", ["live", "saved"])
def test_the_peak_of_memory_is_a_part_of_the_model(source: str, tmp_path: Path) -> None:
    mib = {"live": 256, "saved": 576}[source]
    if source == "saved":
        state = {f"weights.{number}": torch.ones(4 << 20) for number in range(36)}  # 16 MiB each
        distributed_checkpoint.write(tmp_path / "state", state, 0, None)
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path / "state"), source], capture_output=True, text=True, check=True)
    assert 0 <= int(run.stdout) < mib / 2, f"{run.stdout} MiB for a model of {mib} MiB"


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_an_export_replaces_nothing(make: object, tmp_path: Path) -> None:
    make(tmp_path / "out")  # type: ignore[operator]
    with pytest.raises(ExportError, match="does not overwrite"):
        check_target(tmp_path / "out")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="pass another folder"):
        check_target(tmp_path / "file" / "out")


def test_a_disk_without_room_is_found_before_a_weight_is_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the system then refuses the file, as a full disk does
    try:
        with (
            pytest.raises(ExportError, match=r"it takes 0.004 GB as float32.*Nothing is left there"),
            GrowingExport(tmp_path / "out", layout_of({"w": torch.zeros(1 << 20)})),
        ):
            raise AssertionError("the export began")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_an_export_whose_name_is_taken_meanwhile_leaves_the_other_one(tmp_path: Path) -> None:
    with GrowingExport(tmp_path / "out", layout_of(WEIGHTS)) as growing:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
        with pytest.raises(ExportError, match="meanwhile"):
            growing.finish()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["out", "out/theirs"]


STOPPED = """
import os, sys, time
import torch
from rlgraph.channels.weights.shards import unsharded_weights
from rlgraph.engines.hf.export import GrowingExport
from rlgraph.engines.hf.export import plan_files
from rlgraph.engines.hf.export import write_shards
layout = plan_files({"w": ("w", (64,))}, "float32")
with GrowingExport(sys.argv[1], layout) as growing:
    write_shards(growing.path, layout, unsharded_weights({"w": torch.zeros(64)}))
    print("half", flush=True)
    time.sleep(60)
"""


def test_a_killed_export_leaves_nothing_of_its_name_and_the_next_one_removes_the_rest(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    growing = [path.name for path in tmp_path.iterdir()]
    assert len(growing) == 1
    assert growing[0].startswith(".out-")
    with GrowingExport(tmp_path / "out", layout_of(WEIGHTS)):  # it is alive: its folder stays
        assert (tmp_path / growing[0]).exists()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert [path.name for path in tmp_path.iterdir()] == growing
    written(tmp_path / "out", layout_of(WEIGHTS), list(unsharded_weights(WEIGHTS)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_names_are_those_of_the_folder_and_a_tied_head_is_left_out(tmp_path: Path) -> None:
    tied, untied = tiny_llama(tmp_path), tiny_llama(tmp_path, tied=False)
    shapes = {"model.embed_tokens.weight": (288, 64), "lm_head.weight": (288, 64)}
    known = set(export_names(_all_shapes(tied) | shapes, tied, "log_probs", "export"))
    assert "lm_head.weight" not in known
    assert "lm_head.weight" in export_names(_all_shapes(untied) | shapes, untied, "log_probs", "export")


def test_a_critics_backbone_gets_the_prefix_of_its_folder(tmp_path: Path) -> None:
    shapes = {"embed_tokens.weight": (288, 64), "norm.weight": (64,), "score.weight": (1, 64)}
    found = export_names(shapes, tiny_llama(tmp_path), "values", "export")
    assert {name: source for name, (source, _) in found.items()} == {
        "model.embed_tokens.weight": "embed_tokens.weight",
        "model.norm.weight": "norm.weight",
        "score.weight": "score.weight",
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": (65,)}, "has the shape"),
        ({"experts": (2, 2)}, "no such name"),
        ({"model.norm.weight": None}, "the trainer lacks"),
    ],
)
def test_parameters_of_another_model_are_refused(change: dict[str, tuple[int, ...] | None], said: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    shapes = {name: shape for name, shape in (_all_shapes(model) | change).items() if shape is not None}
    with pytest.raises(ExportError, match=said):
        export_names(shapes, model, "log_probs", "export")


def _all_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
