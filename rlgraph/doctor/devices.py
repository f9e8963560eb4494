"""GPUs with their links, cores, memory, and the dtype that dtype="auto" becomes on each."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from rlgraph.analysis import words
from rlgraph.doctor.check import Check
from rlgraph.plan.cluster import Cluster, Precision
from rlgraph.runtime.driver.machine import local_cluster

MEASURED = (9, 0)  # the compute capability of the GPUs that rlgraph was measured on
DEMO_BYTES = 8 << 30  # of memory, for training the smallest real model on cores
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
QUERY_S = 20.0
TRIAL = "import torch; torch.nn.Linear(64, 64, dtype=torch.bfloat16)(torch.ones(64, 64, dtype=torch.bfloat16))"
SMALLER = ("AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX2")  # limits of oneDNN, the fastest first; the first two leave bfloat16


def device_checks() -> Iterator[Check]:
    """Check GPUs, links, cores, memory and dtypes."""
    cluster = local_cluster()
    topology = _asked("nvidia-smi", "topo", "-m")
    yield gpu_check(cluster.gpus, topology is not None, torch.version.cuda)
    for gpu in range(cluster.gpus):
        yield _one_gpu(gpu)
    if cluster.gpus > 1:
        yield links_check(topology or "", cluster.gpus)
    yield Check(
        "cores", "ok" if cluster.cpus >= 2 else "warning", str(cluster.cpus), "" if cluster.cpus >= 2 else "give it 2 cores or more"
    )
    yield _memory_check(cluster)
    if cluster.gpu_precision is not None:
        yield precision_check("dtype auto on GPUs", cluster.gpu_precision)
    if cluster.cpu_precision is not None:
        yield precision_check("dtype auto on cores", cluster.cpu_precision)
        if cluster.cpu_precision.dtype == "bfloat16":
            yield trial_check(_multiplies)


def gpu_check(gpus: int, driver: bool, cuda: str | None) -> Check:
    """Count the GPUs that torch sees, and say why it sees none where a driver is installed.

    >>> gpu_check(0, driver=True, cuda=None).found
    'none: an NVIDIA driver is here, but this torch is built for CPUs'
    """
    if gpus:
        return Check("GPUs", "ok", f"{gpus}, torch built for CUDA {cuda}")
    if not driver:
        return Check("GPUs", "ok", "none: everything runs on the cores")
    if cuda is None:
        fix = "install the CUDA build of torch: pip install --force-reinstall torch"
        return Check("GPUs", "problem", "none: an NVIDIA driver is here, but this torch is built for CPUs", fix)
    fix = "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this CUDA"
    return Check("GPUs", "problem", f"none: an NVIDIA driver is here, but torch for CUDA {cuda} sees no GPU", fix)


def _one_gpu(gpu: int) -> Check:
    properties = torch.cuda.get_device_properties(gpu)
    capability = (properties.major, properties.minor)
    found = f"{properties.name}, {words.size(properties.total_memory)}, compute capability {capability[0]}.{capability[1]}"
    if capability == MEASURED:
        return Check(f"GPU {gpu}", "ok", found)
    return Check(f"GPU {gpu}", "warning", f"{found}; rlgraph was measured on 9.0 alone", "run the tests here: make test-gpu")


def links_check(topology: str, gpus: int) -> Check:
    """Sum up what `nvidia-smi topo -m` says of the links between GPUs.

    >>> links_check("     GPU0  GPU1  CPU Affinity\\nGPU0   X   SYS  0-15\\nGPU1  SYS   X   0-15", 2).found
    '1 pair by SYS'
    """
    rows = [line.split() for line in topology.splitlines() if line.startswith("GPU") and " X " in f"{line} "]
    pairs = Counter(row[1 + other] for index, row in enumerate(rows[:gpus]) for other in range(index + 1, min(gpus, len(row) - 1)))
    if not pairs:
        return Check("links", "warning", "unknown: nvidia-smi topo -m says nothing", "install nvidia-smi, to see how the GPUs are linked")
    found = ", ".join(f"{words.counted(count, 'pair')} by {link}" for link, count in sorted(pairs.items()))
    if all(link.startswith("NV") for link in pairs):
        return Check("links", "ok", found)
    fix = "expect slower weights and FSDP2 than over NVLink (NV); keep pools that talk to each other on linked GPUs"
    return Check("links", "warning", found, fix)


def _memory_check(cluster: Cluster) -> Check:
    total = cluster.host_memory_bytes or 0
    few = total < DEMO_BYTES
    fix = "raise the memory of the machine or the limit of its container (memory.max)" if few else ""
    return Check("memory", "warning" if few else "ok", words.size(total), fix)


def precision_check(name: str, precision: Precision) -> Check:
    """Say what dtype="auto" becomes and why; a limit that the environment sets is a warning.

    >>> precision_check("dtype auto on cores", Precision("float32", "the CPU has neither AVX512-BF16 nor AMX")).found
    'float32: the CPU has neither AVX512-BF16 nor AMX'
    """
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    limited = precision.dtype == "float32" and "limited" in precision.why
    fix = f"unset {', '.join(limits)}" if limited and limits else ""
    return Check(name, "warning" if fix else "ok", f"{precision.dtype}: {precision.why}", fix)


def trial_check(works: Callable[[str], bool]) -> Check:
    """Multiply in bfloat16 in a process of its own. A virtual machine may name instructions, as AMX, that end the process.

    `works` tells whether the trial succeeds under a limit of oneDNN; "" is none.

    >>> trial_check(lambda limit: limit == "AVX512_CORE_FP16").fix
    'export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, before anything starts'
    """
    if works(""):
        return Check("bfloat16 on cores", "ok", "a trial works")
    limit = next((limit for limit in SMALLER if works(limit)), None)
    fix = f"export ONEDNN_MAX_CPU_ISA={limit}, before anything starts" if limit else "give models dtype='float32'"
    return Check("bfloat16 on cores", "problem", "a trial ends its process: the CPU names instructions that it does not run", fix)


def _multiplies(limit: str) -> bool:
    variables = os.environ | ({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})
    return subprocess.run([sys.executable, "-c", TRIAL], env=variables, capture_output=True, check=False).returncode == 0


def _asked(*command: str) -> str | None:
    """The output of a program; None if it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None
