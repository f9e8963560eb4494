"""The dtype of an engine on this machine, what some need there (AMX, bitsandbytes), and products whose rows depend on their number."""

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlgraph.plan.cluster import Precision

# Virtual machines that announce AMX without describing its tiles: nothing may use it there.
#
# oneDNN and vLLM ask the CPU for the sizes of a tile (CPUID leaf 0x1D). Some hypervisors hide that leaf and still announce AMX. The
# libraries then configure tiles of no size, and the first bfloat16 product ends the process with SIGILL.

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


# The precision that the devices of this machine compute in: bfloat16 if they have instructions for it, else float32.

CAPABILITY = (8, 0)  # of the first CUDA devices with bfloat16
INSTRUCTIONS = {"AMX": "amx_tile", "AVX512-BF16": "avx512_bf16"}  # that multiply in bfloat16, the fastest first
# Limits of oneDNN that leave them, by the words in their names; without them it emulates, 100 times slower than float32.
ALLOWS = {"AMX": ("AMX",), "AVX512-BF16": ("BF16", "FP16", "AMX", "AVX10")}
UNLIMITED = ("", "ALL", "DEFAULT")


def device_precision(device: str) -> Precision:
    """Choose the precision of models with dtype="auto" on a device of this machine, "cuda" or "cpu", with the reason.

    A limit that the environment sets for PyTorch (`ATEN_CPU_CAPABILITY`) or oneDNN (`ONEDNN_MAX_CPU_ISA`) counts as the CPU's own.
    """
    return _of_gpus() if device == "cuda" else _of_cpu()


def _of_gpus() -> Precision:
    least = min(torch.cuda.get_device_capability(gpu) for gpu in range(torch.cuda.device_count()))
    said = f"the GPU has compute capability {least[0]}.{least[1]}"
    return Precision("bfloat16", said) if least >= CAPABILITY else Precision("float32", f"{said}; bfloat16 begins at 8.0")


def _of_cpu() -> Precision:
    has = [name for name, feature in INSTRUCTIONS.items() if _has(feature)]
    if not has:
        return Precision("float32", "the CPU has neither AVX512-BF16 nor AMX")
    if announced_without_tiles():  # AVX512-BF16 alone took 1.3 to 1.8 times as long as float32 on such a CPU
        return Precision("float32", f"the CPU has {has[0]}, but hides the tiles of its AMX, and bfloat16 is slower without them")
    pytorch = torch.backends.cpu.get_cpu_capability()
    if not pytorch.startswith("AVX512"):
        return Precision("float32", f"the CPU has {has[0]}, but PyTorch is limited to {pytorch} (ATEN_CPU_CAPABILITY)")
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        limit = os.environ.get(variable, "").upper()
        allowed = [name for name in has if limit in UNLIMITED or any(word in limit for word in ALLOWS[name])]
        if not allowed:
            return Precision("float32", f"the CPU has {has[0]}, but oneDNN is limited to {limit} ({variable})")
        has = allowed
    return Precision("bfloat16", f"the CPU has {has[0]}")


def _has(feature: str) -> bool:
    """Whether the CPU has a set of instructions; False if this PyTorch cannot tell."""
    asked = getattr(torch.cpu, f"_is_{feature}_supported", None)  # private, of some versions
    return bool(asked and asked())


# Rows of a product on a CPU: oneDNN sums one row alone in another order than a row among several, so one is computed as two.
#
# Seen with 1,536 and 3,072 summands, not with 1,024. Else the last response of a batch would depend on the others having ended.


def in_company(product: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """Compute a `product` of states [..., K], with a second row beside one that is alone.

    >>> in_company(lambda states: states * len(states), torch.ones(1, 3))
    tensor([[2., 2., 2.]])
    """
    if states.numel() > states.shape[-1]:
        return product(states)
    flat = states.reshape(1, -1)
    return product(torch.cat([flat, flat]))[:1].view(*states.shape[:-1], -1)


# bitsandbytes, which computes with moments of 8 bits and weights of 4: whether it is there, and its import.

INSTALL = "pip install 'rlgraph-dataflow[lowbit]'"
NAME = "bitsandbytes"


def is_installed() -> bool:
    """Whether the package is there, without importing it."""
    return importlib.util.find_spec(NAME) is not None


def bitsandbytes() -> Any:
    """Import the package.

    On some CPUs it asks the package `kernels` for a faster product, which downloads code, and warns where it gets none. Nothing here calls
    that product, and rlgraph downloads no code: the package is hidden while it is imported.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    before = {"kernels": sys.modules["kernels"]} if "kernels" in sys.modules else {}
    sys.modules["kernels"] = None  # type: ignore[assignment] # so an import of it fails, which the type of the table does not know
    try:
        return importlib.import_module(NAME)
    finally:
        del sys.modules["kernels"]
        sys.modules |= before
