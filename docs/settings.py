"""Write the reference of settings: each public class with its arguments, their types, defaults and sentences.

python docs/settings.py docs/api/settings.md
"""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import rlgraph as rg

HEAD = """# Settings

`python docs/settings.py docs/api/settings.md` writes this page. It lists the arguments of each public class: type,
default and effect. `help(rg.Policy)` prints the same. The pages of the API have examples.
"""
SUBJECTS = ("losses", "estimators", "optim", "options", "agents", "planning", "runs")
BUILT = (rg.Plan, rg.Output)  # by rlgraph, not by users


def classes() -> dict[str, list[tuple[str, type]]]:
    """Group the public classes of settings by subject; a class that `rlgraph` itself names stands first."""
    found: dict[str, list[tuple[str, type]]] = {}
    listed: set[type] = set(BUILT)
    for subject, names in {"": sorted(rg.__all__), **{subject: sorted(vars(getattr(rg, subject))) for subject in SUBJECTS}}.items():
        for name in names:
            value = getattr(getattr(rg, subject) if subject else rg, name)
            if inspect.isclass(value) and dataclasses.is_dataclass(value) and value not in listed and arguments(value):
                listed.add(value)
                found.setdefault(subject, []).append((f"rg.{subject}.{name}" if subject else f"rg.{name}", value))
    return found


def arguments(cls: type) -> list[inspect.Parameter]:
    return list(inspect.signature(cls).parameters.values())


def plain_type(parameter: inspect.Parameter) -> str:
    """Write a type without modules, and its choices with "or": a pipe would end the cell of a table."""
    text = inspect.formatannotation(parameter.annotation)
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")
    return re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text).replace(" | ", " or ")


def sentence(cls: type, name: str) -> str:
    """Find what the docstring says of an argument: its entry in a list, or else the first sentence that names it."""
    text = cls.__doc__ or ""
    blocks = [re.sub(r"\s+", " ", block) for block in re.split(r"\n\s*\n|\n(?=\s*\* )", text) if ">>>" not in block]
    for block in blocks:
        if found := re.search(rf"\* (?:`\w+`,? (?:and )?)*`{name}`(?:,? (?:and )?`\w+`)*: (.*)", block):
            return found[1]
    for block in blocks:
        for part in re.split(r"(?<=[.;]) ", block):
            if re.search(rf"`{name}\b", part):
                return part.lstrip("* ")
    return ""


def table(cls: type) -> str:
    rows = ["| setting | type | default | effect |", "|---|---|---|---|"]
    for parameter in arguments(cls):
        named = parameter.default.__name__ if inspect.isfunction(parameter.default) else repr(parameter.default)
        default = "required" if parameter.default is parameter.empty else f"`{named}`"
        cells = (
            f"`{parameter.name}`",
            f"`{plain_type(parameter)}`",
            default,
            sentence(cls, parameter.name).rstrip(".").replace("|", "\\|"),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def page() -> str:
    parts = [HEAD]
    for subject, members in classes().items():
        parts.append(f"## rg.{subject}\n" if subject else "## rg\n")
        parts += [f"### {name}\n\n{(cls.__doc__ or '').strip().splitlines()[0]}\n\n{table(cls)}\n" for name, cls in members]
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
