"""The README as the wheel's description: an index shows it alone, so links into the repository become their text, and its picture goes.

All else stands in pyproject.toml. The project has no public address yet; where it has one, make these links absolute instead.
"""

import re
from pathlib import Path

from setuptools import setup

ELSEWHERE = r"(?!https?://|mailto:|#)"  # a target in the repository


def standalone(readme: str) -> str:
    """Take the links into the repository out of Markdown: `[text](docs/x.md)` becomes `text`, `![picture](docs/x.svg)` nothing."""
    without_pictures = re.sub(rf"!\[[^\]]*\]\({ELSEWHERE}[^)]*\)\n*", "", readme)
    return re.sub(rf"\[([^\]]*)\]\({ELSEWHERE}[^)]*\)", r"\1", without_pictures)


setup(
    long_description=standalone((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
