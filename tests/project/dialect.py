"""Count the words of our dialect in README, docs and public docstrings; `dialect.json` has the words, what to write, and how many are left.

python tests/project/dialect.py           # print the places, file by file
python tests/project/dialect.py --lower   # write the counts again where they have fallen
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".json")
GENERATED = {"docs/api/settings.md"}  # from docstrings, which are counted
DOCSTRINGS = "public docstrings"


def table() -> dict[str, str]:
    """The patterns, each with what to write instead."""
    found: dict[str, str] = json.loads(FILE.read_text())["write"]
    return found


def left() -> dict[str, int]:
    """How many places each file may have; a file that is not listed has none."""
    found: dict[str, int] = json.loads(FILE.read_text())["left"]
    return found


def prose(text: str) -> str:
    """The text without its code: blocks are left out, and code within a line is an empty pair of quotes."""
    text = re.sub(r"```.*?```|<!--.*?-->|^ *>>>.*?(?=\n *\n|\Z)", "", text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "``", text)


def docstrings() -> str:
    """Those of all public names, and of the methods that their classes define."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.public import unique_values

    def members(value: Any) -> Iterator[Any]:
        yield value
        if inspect.isclass(value) and value.__module__.startswith("rlgraph"):
            yield from (member for name, member in vars(value).items() if inspect.isfunction(member) and not name.startswith("_"))

    found = [inspect.getdoc(member) for value in unique_values() for member in members(value) if callable(value)]
    return "\n\n".join(dict.fromkeys(text for text in found if text))


def texts() -> dict[str, str]:
    pages = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    return {page: (ROOT / page).read_text() for page in pages if page not in GENERATED} | {DOCSTRINGS: docstrings()}


def places(text: str) -> list[str]:
    """Each place as `words around it -> what to write`."""
    plain, found = prose(text), []
    for pattern, write in table().items():
        for match in re.finditer(pattern, plain, re.M):
            around = plain[max(match.start() - 40, 0) : match.end() + 30].replace("\n", " ")
            found.append(f"…{around}…  ->  {write}")
    return found


def lower(counts: dict[str, int]) -> None:
    """Write the counts that have fallen."""
    whole = json.loads(FILE.read_text())
    whole["left"] = {
        name: min(count, whole["left"].get(name, 0)) for name, count in sorted(counts.items()) if count and whole["left"].get(name)
    }
    FILE.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    found = {name: places(text) for name, text in texts().items()}
    if "--lower" in sys.argv:
        lower({name: len(each) for name, each in found.items()})
    else:
        for name, each in found.items():
            print(f"{name}: {len(each)}", *each, sep="\n  ")
