"""An extension of griffe: the examples and blocks of docstrings become blocks of code, which Markdown would read as quotations."""

import re
from typing import Any

import griffe

BLOCK = re.compile(r"(?m)^(?P<indent> *)>>> .*(?:\n(?! *$).*)*")


class Examples(griffe.Extension):
    """Fence each run of lines that begins with `>>>`, up to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Fence the doctests of a docstring."""

    def fence(found: re.Match[str]) -> str:
        indent = len(found["indent"])
        lines = [line[indent:] for line in found[0].splitlines()]
        return "\n".join(["", "```pycon", *lines, "```"])

    return BLOCK.sub(fence, text)
