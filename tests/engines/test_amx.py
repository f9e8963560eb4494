"""A CPU that announces AMX without describing its tiles computes without AMX; a bfloat16 product there would end the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlgraph.engines import precision

FLAGS = "fpu avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8"
PRODUCT = """
import torch
from rlgraph.runtime.driver.hosts import local_cluster
local_cluster()
a = torch.ones(256, 256, dtype=torch.bfloat16)
assert (a @ a).eq(256).all()
"""


def cpuinfo(folder: Path, flags: str, level: int) -> Path:
    core = f"processor\t: 0\nmodel name\t: a CPU\ncpuid level\t: {level}\nflags\t\t: {flags}\n"
    file = folder / "cpuinfo"
    file.write_text(f"{core}\n{core}\n")
    return file


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in precision.LIMITS:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize(("flags", "level", "left_out"), [(FLAGS, 28, True), (FLAGS, 32, False), ("fpu avx2", 13, False)])
def test_amx_is_left_out_where_its_tiles_are_hidden(tmp_path: Path, flags: str, level: int, left_out: bool) -> None:
    assert precision.leave_out_broken_amx(cpuinfo(tmp_path, flags, level)) is left_out
    assert torch.cpu._is_amx_tile_supported() is not left_out
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == (precision.WITHOUT_AMX if left_out else "")


@pytest.mark.usefixtures("unlimited")
def test_a_limit_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert precision.leave_out_broken_amx(cpuinfo(tmp_path, FLAGS, 28))
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == ""


@pytest.mark.usefixtures("unlimited")
def test_a_machine_without_the_file_keeps_what_it_has(tmp_path: Path) -> None:
    assert not precision.leave_out_broken_amx(tmp_path / "none")


@pytest.mark.stage("families")
def test_a_bfloat16_product_works_on_this_machine() -> None:
    own = {name: value for name, value in os.environ.items() if name not in precision.LIMITS}
    subprocess.run([sys.executable, "-c", PRODUCT], env=own, check=True, timeout=250)
