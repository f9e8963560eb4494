"""What the pages point at is there: links, headings, paths, modules and public names."""

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlgraph as rg

ROOT = Path(__file__).parents[2]
WHERE = ("*.md", "docs/**/*.md", "benchmarks/*.md", "benchmarks/*/*.md", "recipes/*.md", "tests/*.md")
PAGES = sorted(str(page.relative_to(ROOT)) for pattern in WHERE for page in ROOT.glob(pattern))
NOW = [page for page in PAGES if page != "CHANGELOG.md"]  # whose older sections name what was there then
PARTS = sorted(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").iterdir() if path.is_dir())
FOLDERS = ("", "rlgraph", "benchmarks", *PARTS, "recipes", "tests")  # where a path in a page may begin
ENDINGS = "py|md|json|jsonl|lock|npz|svg|toml|txt"
WRITTEN = {  # by a run, a user or another library, in a folder of theirs
    *("run.json", "run.html", "report.html", "timeline.json", "trace.json", "metrics.jsonl", "plan.json", "manifest.json", "config.json"),
    *(
        "tokenizer.json",
        "generation_config.json",
        "costs.yaml",
        "my.yaml",
        "plan.svg",
        "RECIPE.py",
        "SCRIPT.py",
        "FILE.yaml",
        "sums.py",
        "gpus.py",
        "train.py",
        "task.py",
        "make_data.py",
        "train.jsonl",
        "held_out.jsonl",
    ),
}


def prose(page: str) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def missing_paths(page: str) -> Iterator[str]:
    for quoted in re.findall(r"`([^`\n]+)`", prose(page)):
        for path in re.findall(rf"(?<![\w*/.<{{-])[\w.-]+(?:/[\w.-]+)*\.(?:{ENDINGS})\b", quoted):
            bases = [ROOT / folder for folder in FOLDERS] + [(ROOT / page).parent]
            if not path.startswith("rg.") and Path(path).name not in WRITTEN and not any((base / path).exists() for base in bases):
                yield path
        for folder in re.findall(r"(?<![\w/.])(?:rlgraph|benchmarks|tests|recipes|docs)/[\w/]*/?(?=\s|$)", quoted):
            if not (ROOT / folder).exists():
                yield folder


def missing_names(page: str) -> Iterator[str]:
    """Names of the public module, in prose and in code, and dotted names of the library."""
    subjects = "|".join(rg._SUBJECTS)
    for name in sorted(set(re.findall(rf"\brg\.((?:(?:{subjects})\.)?[a-zA-Z_]\w*)", (ROOT / page).read_text()))):
        if not resolves(["rlgraph", *name.split(".")]):
            yield f"rg.{name}"
    for dotted in sorted(set(re.findall(r"\brlgraph(?:\.\w+)+", (ROOT / page).read_text()))):
        if not resolves(dotted.split(".")):
            yield dotted


def resolves(parts: list[str]) -> bool:
    """Whether the first parts are a module and the others are attributes of it."""
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    assert not list(broken_links(page))


@pytest.mark.parametrize("page", NOW)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    assert not list(missing_paths(page))


@pytest.mark.parametrize("page", NOW)
def test_every_name_that_a_page_uses_is_public(page: str) -> None:
    assert not list(missing_names(page))


def test_what_is_not_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(
        "# One heading\n[here](#one-heading) [there](#two-headings) [file](gone.md)\n"
        "`rlgraph/planning/` and `planning/plan.py`, `page.md`; `rlgraph.planning.plan`, `rg.Gone`, `rg.GRPO`\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert list(broken_links("page.md")) == ["#two-headings", "gone.md"]
    assert list(missing_paths("page.md")) == ["rlgraph/planning/", "planning/plan.py"]
    assert list(missing_names("page.md")) == ["rg.Gone", "rlgraph.planning.plan"]
