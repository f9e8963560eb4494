"""The Dockerfiles copy what there is, pin what they start from, and install versions that rlgraph supports. No image is built."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments; lines that continue are one."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def supported() -> dict[str, Requirement]:
    """The requirements of the package by name; the range of an extra counts where the package itself names none."""
    written = [*PROJECT["dependencies"], *(text for texts in PROJECT["optional-dependencies"].values() for text in texts)]
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, written):
        found.setdefault(requirement.name, requirement)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dockerfile_starts_from_a_pinned_image_and_runs_as_a_user(path: Path) -> None:
    steps = instructions(path)
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", dict(steps)["FROM"])
    assert [what for name, what in steps if name == "USER"] == ["trainer"]
    assert ("ENTRYPOINT", '["rlgraph"]') in steps


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dockerfile_copies_what_the_build_needs(path: Path) -> None:
    copied = {source for name, what in instructions(path) if name == "COPY" for source in what.split()[:-1]}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    packages = {path.parent.name for path in ROOT.glob("rlgraph*/__init__.py")}
    assert copied >= {"pyproject.toml", "setup.py", "README.md", "LICENSE", *packages}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dockerfile_installs_versions_that_are_supported(path: Path) -> None:
    ranges = supported()
    text = " ".join(what for name, what in instructions(path) if name == "RUN")
    for wanted in map(Requirement, re.findall(r'"([\w-]+(?:\[\w+\])?[=<>][^"]*)"', text)):
        pinned = [Version(each.version) for each in wanted.specifier if each.operator == "=="]
        assert all(version in ranges[wanted.name].specifier for version in pinned), wanted
        assert pinned or wanted.specifier == ranges[wanted.name].specifier, wanted
    for extras in re.findall(r'"\.\[([\w,]+)\]"', text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_lock_of_the_cpu_image_holds_versions_that_are_supported() -> None:
    ranges = supported()
    locked = dict(line.split("==") for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines() if "==" in line)
    known = {name: version for name, version in locked.items() if name in ranges and name != "vllm"}
    assert len(known) > 15
    assert {name: version for name, version in known.items() if version not in ranges[name].specifier} == {}


def test_the_cpu_image_installs_every_lock_that_the_makefile_does_and_a_compiler_for_it() -> None:
    steps = instructions(ROOT / "docker" / "cpu.Dockerfile")
    locks = {name for name in re.findall(r"requirements/[\w.-]+\.lock", (ROOT / "Makefile").read_text()) if "sglang" not in name}
    runs = " ".join(what for name, what in steps if name == "RUN")
    assert set(re.findall(r"-r (\S+)", runs)) == locks == {"requirements/cpu.lock", "requirements/from_source.lock"}
    assert "g++" in runs.split()
