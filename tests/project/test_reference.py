"""The pages that list what rlgraph prints and accepts hold what there is: settings, metrics, messages of errors."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import settings  # noqa: E402

HOLE = "\0"  # where a text has a value
KINDS = (
    "actor|agent|critic|data|dtype|exact|guards|moe|perf|preference|response|response_length|reward|rollout|rollout_corr"
    "|staleness|timing_s|tools|training|val"
)
BEGINNINGS = {"critic/vf", "guards/critic_", "reward/mean@", f"reward/{HOLE}"}  # parts of the names of metrics


def text_of(node: ast.AST) -> str | None:
    """A text as it stands in the source, with a hole for each value; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    return None


@functools.cache
def texts() -> frozenset[str]:
    """All texts of the package, docstrings left out."""
    found: set[str] = set()
    for path in (*ROOT.glob("rlgraph/**/*.py"), *ROOT.glob("rlgraph_cli/**/*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found |= {text for node in ast.walk(tree) if id(node) not in docstrings and (text := text_of(node))}
    return frozenset(found)


def cells(page: str, column: int = 0) -> list[str]:
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| `")]
    return [re.split(r"(?<!\\) \| ", line.strip("| "))[column] for line in lines]


def test_the_reference_of_settings_is_what_the_classes_say() -> None:
    assert (ROOT / "docs" / "api" / "settings.md").read_text() == settings.page(), "python docs/settings.py docs/api/settings.md"
    unsaid = [
        f"{name}({each.name})"
        for members in settings.classes().values()
        for name, cls in members
        for each in settings.arguments(cls)
        if not settings.sentence(cls, each.name)
    ]
    assert unsaid == [], "say it in the docstring of the class"


def quoted_but_unknown(messages: list[str]) -> list[str]:
    """The messages whose parts are in no text of the package, one after the other."""
    patterns = {said: re.compile(".*?".join(map(re.escape, said.split("…"))), re.S) for said in messages}
    return [said for said, pattern in patterns.items() if not any(pattern.search(text) for text in texts())]


def test_each_message_that_troubleshooting_quotes_is_one_of_the_package() -> None:
    messages = [cell.strip("`") for cell in cells("troubleshooting.md")]
    assert len(messages) >= 30
    assert quoted_but_unknown(messages) == []
    assert quoted_but_unknown(["nobody says … so"]) == ["nobody says … so"]


def metrics_of_the_package() -> set[str]:
    whole = re.compile(rf"(?:{KINDS})/[\w@/.{HOLE}]*[^/]")
    return {text for text in texts() if whole.fullmatch(text)} - BEGINNINGS


LISTED = [name for cell in cells("api/metrics.md") for name in re.findall(r"`([^`]+)`", cell)]


def covers(listed: str, reported: str) -> bool:
    """Whether two names are of one metric: X and n of the page, and the values of the package, stand for any name."""
    of_page, of_package = re.sub(r"(?<![a-z])X(?![a-z])|(?<=/)n$", HOLE, listed), reported
    return any(re.fullmatch(re.escape(one).replace(HOLE, ".+"), other) for one, other in ((of_page, of_package), (of_package, of_page)))


def test_each_metric_of_the_package_is_explained() -> None:
    assert {name for name in metrics_of_the_package() if not any(covers(listed, name) for listed in LISTED)} == set()


@pytest.mark.parametrize("name", LISTED)
def test_each_metric_that_is_explained_is_one_of_the_package(name: str) -> None:
    kind = name.partition("/")[0]
    texts_of_kind = [text for text in texts() if text.startswith(f"{kind}/") or (text.startswith(f"{HOLE}/") and text.count(HOLE) == 1)]
    assert any(covers(name, text) for text in texts_of_kind), f"nothing reports '{name}'"
