"""The result of a check, and all of them together."""

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import msgspec

from rlgraph.render.tables import aligned

State: TypeAlias = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """One check: its subject, its result, and how to fix it. A `problem` stops some graph from running, a `warning` stops none."""

    name: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks of a machine; prints as a table."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """The checks that found a problem."""
        return tuple(check for check in self.checks if check.state == "problem")

    def __str__(self) -> str:
        rows = []
        for check in self.checks:
            rows.append([check.state, check.name, check.found])
            rows += [["", "", f"fix: {check.fix}"]] if check.fix else []
        warnings = sum(check.state == "warning" for check in self.checks)
        counts = f"{len(self.problems)} problems, {warnings} warnings, {len(self.checks)} checks"
        return "\n".join([*(line.rstrip() for line in aligned(["state", "what", "found"], rows)), "", counts])

    def to_json(self) -> str:
        """Write the checks as JSON: a list of objects with `name`, `state`, `found` and `fix`."""
        return msgspec.json.format(msgspec.json.encode([asdict(check) for check in self.checks]), indent=1).decode()
