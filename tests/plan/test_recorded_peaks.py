"""Peaks of updates that were recorded on GPUs are within a tenth of what plans estimate, and plans say which instant is the peak."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.lib.predicted_update import planned_update, predicted
from benchmarks.speed import parallel

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BY_RANKS = (  # of parallel.py
    "experts_16k_h100",
    "experts_h100",
    "parallel_16k_h100",
    "parallel_32k_h100",
    "parallel_4b_h100",
    "parallel_4k_h100",
    "parallel_8b_kept_h200",
    "parallel_8b_selective_h200",
)
LONG = 8, 4096  # sequences of training.py, and their length
SMALL = 8, 2048  # of small_gpu_training.py


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def runs() -> Iterator[Any]:
    """Each recorded update: its peak, and what `predicted` is given."""
    for name in BY_RANKS:
        found = recorded(name)
        for spec, run in found["runs"].items():
            asked, size = parallel.Run.of(spec), (found["sequences"], found["length"])
            settings, tokens = {**asked.settings, "trainer": asked.trainer}, found.get("pass_tokens", size[1]) // asked.way["cp"]
            yield pytest.param(run["peak_bytes"], (asked.shape, size, "H100", asked.way, tokens, settings), id=f"{name} {spec}")
    for name in ("training_flash2_h200", "training_flash4_h200", "training_h100", "training_h200"):
        for spec, run in recorded(name)["runs"].items():
            shape, ranks, *options = spec.split(":")
            settings = {"compiled": "compiled" in options, "fused_head": False}
            yield pytest.param(run["peak_bytes"], (shape, LONG, "H200", {"dp": int(ranks)}, 8192, settings), id=f"{name} {spec}")
    parts, few = recorded("small_gpu_h200")["parts"], {"recompute": True, "fused_head": True}
    for way, run in parts["lora_memory"]["runs"].items():
        settings = {"adapter": rg.LoRA(rank=32), "recompute": run["recompute"], "fused_head": True}
        yield pytest.param(run["peak_bytes"], ("8B", SMALL, "H200", {"dp": 1}, run["micro_batch_tokens"], settings), id=f"8B LoRA, {way}")
    for name, run in parts["moments_8bit"]["runs"].items():
        shape, moments = name.split(", ")
        settings = {**few, "optimizer": rg.AdamW(moments=moments)}
        yield pytest.param(run["peak_bytes"], (shape, SMALL, "H200", {"dp": 1}, 8192, settings), id=name)
    for name, run in parts["moments"]["runs"].items():
        settings = {**few, "offload": "moments" if "host" in name else None}
        yield pytest.param(run["peak_bytes"], ("4B", SMALL, "H200", {"dp": 1}, 8192, settings), id=name)
    for way, run in recorded("shared_prompts_h100")["0.6B"]["update"].items():
        if isinstance(run, dict):
            yield pytest.param(
                run["peak_bytes"], ("0.6B", (128, 1280), "H100", {"dp": 1}, 16384, {"fused_head": True}), id=f"prompts, {way}"
            )


@pytest.mark.parametrize(("peak", "given"), list(runs()))
def test_a_recorded_peak_is_within_a_tenth_of_the_plan(peak: int, given: tuple[Any, ...]) -> None:
    assert peak / predicted(*given)["peak_bytes"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("shape", "tokens", "settings", "instant"),
    [("4B", 8192, {"fused_head": False}, "head"), ("1.7B", 16384, {"recompute": True}, "backward of a layer")],
)
def test_the_peak_is_that_of_the_largest_instant_and_prints(shape: str, tokens: int, settings: dict[str, Any], instant: str) -> None:
    need, *_ = planned_update(shape, (4, 16384), "H200", {"dp": 1}, tokens, settings)
    sizes = {name: sum(size for _, size in parts) for name, parts in need.instants}
    assert max(sizes, key=lambda name: sizes[name]) == instant
    stays = sum(size for part, size in need.parts if part in ("weights", "optimizer", "weights in staging"))
    assert need.peak_bytes == stays + sizes[instant]
    lines = str(need).splitlines()
    assert lines[0].startswith("a GPU of 'train': ")
    assert {line.split("  ")[1].strip() for line in lines[2:]} == set(sizes)


def test_recomputing_changes_the_instant_of_the_peak() -> None:
    def parts_of(recompute: bool | str) -> dict[str, dict[str, int]]:
        need, *_ = planned_update("4B", LONG, "H200", {"dp": 1}, 8192, {"recompute": recompute, "fused_head": True})
        return {name: dict(parts) for name, parts in need.instants}

    kept, part, whole = map(parts_of, (False, "selective", True))
    assert [found["head"]["activations"] for found in (kept, part, whole)] == pytest.approx(
        [36 * 8192 * 2 * numbers for numbers in (64512, 15360, 2560)]
    )
    layer = "backward of a layer"  # which then has all that it would have kept
    assert kept[layer]["activations"] == kept["head"]["activations"]
    assert part[layer]["activations"] - part["head"]["activations"] == 8192 * 2 * (64512 - 15360)
    assert whole[layer]["activations"] - whole["head"]["activations"] == 8192 * 2 * (64512 - 2560)
