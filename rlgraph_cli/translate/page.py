"""A recipe while it is written: its settings, its lines, and how Python is laid out."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any


@dataclass
class Page:
    """The parts of a recipe while it is written: the fields of its Config, its imports, and the lines of its functions."""

    fields: dict[str, tuple[str, str]] = field(default_factory=dict)
    imports: list[str] = field(default_factory=lambda: ["from dataclasses import dataclass"])
    body: list[str] = field(default_factory=list)

    def setting(self, name: str, value: Any, comment: str = "", *, none: bool = False) -> str:
        """Declare a field of Config, which may also be None if `none` says so, and return how the graph reads it."""
        kind = {bool: "bool", int: "int", float: "float"}.get(type(value), "str")
        self.fields[name] = (f"{name}: {kind}{' | None' if none else ''} = {show(value)}", comment)
        return f"cfg.{name}"


def show(value: Any) -> str:
    """Write a value as Python, with double quotes as the recipes have."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        shown = ", ".join(map(show, value))
        return f"({shown},)" if len(value) == 1 else f"({shown})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(name)}: {show(each)}" for name, each in value.items()) + "}"
    return repr(value)


def call(function: str, /, *positional: str, **options: str | None) -> str:
    """Write a call; options that are None are left out."""
    given = [*positional, *(f"{option}={value}" for option, value in options.items() if value is not None)]
    return f"{function}({', '.join(given)})"


def spread(line: str) -> list[str]:
    """Lay a long call out with an argument a line, and long ones of these in turn, as formatters do."""
    start = line[: len(line) - len(line.lstrip())]
    if len(line) <= 120 or not line.endswith((")", "),")):
        return [line]
    head, _, rest = line.rstrip(",").partition("(")
    parts, level, last = [], 0, ""
    for sign in rest[:-1]:
        level += (sign in "([{") - (sign in ")]}")
        if sign == "," and level == 0:
            parts.append(last.strip())
            last = ""
        else:
            last += sign
    parts.append(last.strip())
    inner = [each for part in parts for each in spread(f"{start}    {part},")]
    return [f"{head}(", *inner, f"{start})" + ("," if line.endswith(",") else "")]


def unless(default: Any, value: Any) -> str | None:
    """Write a value as Python, None for the default, which a recipe leaves out."""
    return None if value == default else show(value)


def assemble(page: Page, main: Sequence[str], name: str, source: str, library: str) -> str:
    """Put the parts together as a file of Python."""
    body = page.body
    if "epochs" not in page.fields:
        main, body = ([line.replace("steps(cfg)", "cfg.steps") for line in lines] for lines in (main, body))
    fields = [f"    {declared}  # {comment}" if comment else f"    {declared}" for declared, comment in page.fields.values()]
    text = "\n".join(part for line in body for part in spread(line))
    script = re.sub(r"[^\w.-]", "_", PurePath(source).name)
    return "\n".join(
        [
            f'"""What {script} starts with {library}, as a graph. Written by `rlgraph from-{library.lower()}`.',
            "",
            f"    python {name}.py [key=value ...] [config=FILE.yaml]",
            "",
            '`--help` lists the settings."""',
            "",
            *sorted(set(page.imports), key=lambda line: (line.startswith("from"), line)),
            "",
            "import rlgraph as rg",
            "",
            "",
            "@dataclass",
            "class Config:",
            *fields,
            "",
            "",
            text,
            "",
            "",
            'if __name__ == "__main__":',
            *(f"    {line}" for line in main),
            "",
        ]
    )
