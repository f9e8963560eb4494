"""The site builds strictly, so each of its links leads somewhere; it has every page and every public name."""

import html.parser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.public import PUBLIC

import rlgraph as rg

pytestmark = pytest.mark.stage("recipes")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from site_docstrings import fenced  # noqa: E402


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))]
    left_out = [page for page in pages if not re.search(rf"[ :]{re.escape(page)}$", text, re.M)]
    assert [page for page in left_out if not page.startswith("developers/")] == ["architecture.md", "structure.md"]


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    there = {line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", text, re.M)}
    assert {spelling.rpartition(".")[2] for spelling in PUBLIC} - there - {*rg._SUBJECTS} == set(), "name it in docs/api/"


def test_examples_of_docstrings_become_blocks_of_code() -> None:
    text = "Does it.\n\n    >>> f(1)\n    2\n    >>> f(2)\n    3\n\nRaises nothing.\n\n>>> g()\n4"
    block = "```pycon\n>>> f(1)\n2\n>>> f(2)\n3\n```"
    assert fenced(text) == f"Does it.\n\n\n{block}\n\nRaises nothing.\n\n\n```pycon\n>>> g()\n4\n```"


class Text(html.parser.HTMLParser):
    """The text of a page outside of its blocks of code."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.said = 0, ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.inside += tag in ("pre", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag in ("pre", "script", "style")

    def handle_data(self, data: str) -> None:
        self.said += "" if self.inside else data


def test_the_site_builds_strictly_and_shows_what_it_should(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    index = (tmp_path / "index.html").read_text()
    assert 'href="quickstart.html"' in index
    assert 'href="concepts.html"' in index, "links of README to docs/ are not the site's"
    assert 'src="grpo.svg"' in index
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://[^"]*', index), "the page loads something from elsewhere"
    for page in (tmp_path / "api").glob("*.html"):
        text = Text()
        text.feed(page.read_text())
        assert ">>>" not in text.said, f"an example is no block of code on {page.name}"
    assert 'id="rlgraph.Generator"' in (tmp_path / "api" / "models.html").read_text()
