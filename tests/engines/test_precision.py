"""dtype="auto" on this machine, with all its instructions and with AVX2 alone: what the plan says is what the engines compute in."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import PROGRAMS, PYTHONPATH

from rlgraph.engines import precision
from rlgraph.engines.precision import device_precision

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def native() -> str:
    """What this machine's CPU computes in when nothing limits it, read off the kernel's list of its features."""
    text = Path("/proc/cpuinfo").read_text()
    flags, level = text.split(), re.search(r"cpuid level\s*: (\d+)", text)
    if "amx_tile" in flags and level is not None and int(level[1]) < 29:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_tile" in flags else "float32"


def run(folder: Path, engine: str, limits: dict[str, str]) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in AVX2}
    environment |= {"PYTHONPATH": PYTHONPATH, **limits}
    command = [sys.executable, str(PROGRAMS / "precision_process.py"), str(folder), engine]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.stage("jobs")
@pytest.mark.parametrize(
    ("engine", "limits"),
    [("transformers", {}), ("vllm", {}), ("vllm", AVX2)],
    ids=["transformers, all instructions", "vllm, all instructions", "vllm, AVX2 alone"],
)
def test_auto_is_what_the_cpu_computes_in(tied: Path, engine: str, limits: dict[str, str]) -> None:
    found = run(tied, engine, limits)
    expected = "float32" if limits else native()
    assert {dtype for dtype, _ in found["plan"].values()} == {expected}
    assert found["computes"] == f"torch.{expected}"
    assert found["bits"] == dict.fromkeys(["dtype/generator_bits", "dtype/policy_bits"], 32.0 if expected == "float32" else 16.0)
    assert len(found["settings"]) == 2
    assert all(said.startswith(f"{expected} (the CPU has ") for said in found["settings"])
    if limits and native() == "bfloat16":
        assert all("limited to AVX2" in why for _, why in found["plan"].values())


@pytest.mark.parametrize(
    ("features", "pytorch", "onednn", "dtype", "why"),
    [
        ({"amx_tile", "avx512_bf16"}, "AVX512", {}, "bfloat16", "AMX"),
        ({"avx512_bf16"}, "AVX512_VNNI", {"ONEDNN_MAX_CPU_ISA": "all"}, "bfloat16", "AVX512-BF16"),
        (set(), "AVX512", {}, "float32", "neither"),
        ({"amx_tile"}, "AVX2", {}, "float32", "ATEN_CPU_CAPABILITY"),
        ({"amx_tile"}, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, "float32", "ONEDNN_MAX_CPU_ISA"),
        ({"amx_tile"}, "AVX512", {"DNNL_MAX_CPU_ISA": "avx2_vnni"}, "float32", "DNNL_MAX_CPU_ISA"),
        ({"amx_tile"}, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "bfloat16", "AMX"),
        ({"amx_tile", "avx512_bf16"}, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "bfloat16", "AVX512-BF16"),
        ({"amx_tile"}, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "float32", "AVX512_CORE_BF16"),
    ],
)
def test_what_counts_as_computing_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, features: set[str], pytorch: str, onednn: dict[str, str], dtype: str, why: str
) -> None:
    for feature in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{feature}_supported", lambda feature=feature: feature in features)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: pytorch)
    monkeypatch.setattr(precision, "announced_without_tiles", lambda: False)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in onednn.items():
        monkeypatch.setenv(name, value)
    found = device_precision("cpu")
    assert found.dtype == dtype
    assert why in found.why


def test_a_cpu_that_hides_the_tiles_of_its_amx_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(precision, "announced_without_tiles", lambda: True)
    found = device_precision("cpu")
    assert (found.dtype, "hides the tiles" in found.why) == ("float32", True)


@pytest.mark.parametrize(("capabilities", "dtype"), [([(9, 0)], "bfloat16"), ([(8, 0), (7, 5)], "float32")])
def test_gpus_compute_in_bfloat16_from_ampere_on(monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], dtype: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    found = device_precision("cuda")
    assert found.dtype == dtype
    assert f"{capabilities[-1][0]}.{capabilities[-1][1]}" in found.why
