"""Virtual machines that announce AMX without describing its tiles: nothing may use it there.

oneDNN and vLLM ask the CPU for the sizes of a tile (CPUID leaf 0x1D). Some hypervisors hide that leaf and still announce AMX. The
libraries then configure tiles of no size, and the first bfloat16 product ends the process with SIGILL.
"""

import os
from pathlib import Path

import torch

TILES_LEAF = 0x1D
WITHOUT_AMX = "AVX512_CORE_FP16"  # the most that oneDNN may use then; it holds AVX512-BF16
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


CPUINFO = Path("/proc/cpuinfo")


def leave_out_broken_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Keep oneDNN and vLLM from AMX in this process and its children, if the CPU announces AMX but hides its tiles.

    Call it before the first product. A limit that the environment already sets for oneDNN stays. Returns whether AMX is left out.
    """
    if not announced_without_tiles(cpuinfo):
        return False
    if not any(os.environ.get(name) for name in LIMITS):
        os.environ[LIMITS[0]] = WITHOUT_AMX
    torch.cpu._is_amx_tile_supported = lambda: False  # vLLM chooses its kernels by this
    return True


def announced_without_tiles(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the flags of the first core name AMX although its highest CPUID leaf lies below that of the tiles."""
    try:
        first_core = cpuinfo.read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return False
    rows = dict(line.split(":", 1) for line in first_core.splitlines() if ":" in line)
    said = {name.strip(): value.strip() for name, value in rows.items()}
    return "amx_tile" in said.get("flags", "").split() and int(said.get("cpuid level", TILES_LEAF)) < TILES_LEAF
