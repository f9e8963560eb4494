"""The precision that the devices of this machine compute in: bfloat16 if they have instructions for it, else float32."""

import os

import torch

from rlgraph.engines import amx
from rlgraph.plan.cluster import Precision

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
    if amx.announced_without_tiles():  # AVX512-BF16 alone took 1.3 to 1.8 times as long as float32 on such a CPU
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
    asked = getattr(torch.cpu, f"_is_{feature}_supported", None)
    return bool(asked and asked())
