"""What becomes of each setting of another library, as data: the file settings.yaml of its command."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import OmegaConf

from rlgraph.errors import ConfigError

OFF = (None, False, 0, "", "null", "None", "none", "disabled")  # values that turn a setting off
SECTIONS = ("aliases", "defaults", "becomes", "no_effect", "refused", "accepted")
Number = TypeVar("Number", int, float)
Kind = Literal["becomes", "no effect", "not possible", "unknown"]


@dataclass(frozen=True)
class Setting:
    """One setting as it was given: `text` is what the script says, `line` its line, 0 where there is none."""

    key: str
    value: Any
    text: str
    line: int = 0


@dataclass(frozen=True)
class Unread:
    """A value that only running the script would tell, and why."""

    why: str


@dataclass(frozen=True)
class Outcome:
    """What becomes of a setting, and the words for it."""

    setting: Setting
    kind: Kind
    text: str


@dataclass(frozen=True)
class Tables:
    """The tables of a library, and the name by which errors speak of it."""

    library: str
    rules: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def read(library: str, file: Path, *parts: str) -> "Tables":
        """Read the tables of a file, or join those of its parts."""
        read: Any = OmegaConf.to_container(OmegaConf.load(file))
        found = [read[part] for part in parts] if parts else [read]
        return Tables(library, {name: {k: v for part in found for k, v in part.get(name, {}).items()} for name in SECTIONS})

    def outcome_of(self, setting: Setting) -> Outcome:
        """Look up what becomes of a setting: the longest pattern that fits its key counts."""
        key, rules, value = self.name_of(setting.key), self.rules, setting.value
        found = {kind: _longest(key, rules[kind]) for kind in ("becomes", "no_effect", "refused")}
        pattern = max(found.values(), key=lambda pattern: len(pattern.replace("*", "")))
        if not pattern:
            near = difflib.get_close_matches(key, [*rules["becomes"], *rules["no_effect"], *rules["refused"]], 1, 0.85)
            fix = f"did you mean {near[0]}?" if near else "look for its name"
            return Outcome(setting, "unknown", f"{self.library} has no such setting; {fix}")
        if isinstance(value, Unread) and pattern == found["becomes"]:
            return Outcome(setting, "not possible", value.why)
        if pattern == found["refused"]:
            why, *as_here = rules["refused"][pattern]
            off = value in OFF or value in as_here or value in ([], {})
            return Outcome(setting, "no effect", "off, or as by default") if off else Outcome(setting, "not possible", why)
        if key in rules["accepted"] and not isinstance(value, Unread) and value not in rules["accepted"][key]:
            known = ", ".join(map(str, rules["accepted"][key]))
            return Outcome(setting, "not possible", f"{value} has no counterpart; known are {known}")
        kind: Kind = "becomes" if pattern == found["becomes"] else "no effect"
        return Outcome(setting, kind, rules[kind.replace(" ", "_")][pattern])

    def name_of(self, key: str) -> str:
        """Follow the other spellings of a setting to the one that the tables have."""
        aliases = self.rules["aliases"]
        pattern = _longest(key, aliases)
        return key if not pattern else aliases[pattern].replace("*", key[len(pattern) - 1 :]) if "*" in pattern else aliases[pattern]


def _longest(key: str, patterns: Mapping[str, Any]) -> str:
    return max((pattern for pattern in patterns if fnmatchcase(key, pattern)), key=len, default="")


@dataclass
class Values:
    """The values of settings by the names that the tables have: those given, else the library's defaults. It notes what is read."""

    tables: Tables
    source: str
    given: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)  # of the source, where a setting has one
    read: set[str] = field(default_factory=set)

    @staticmethod
    def of(tables: Tables, source: str, outcomes: Sequence[Outcome], **more: Any) -> "Values":
        """Take the last value of each setting that has a counterpart or no effect, and `more` of them."""
        taken = {tables.name_of(each.setting.key): each.setting for each in outcomes if each.kind in ("becomes", "no effect")}
        values = {key: each.value for key, each in taken.items()} | more
        return Values(tables, source, values, {key: each.line for key, each in taken.items()})

    def error(self, key: str, rule: str) -> ConfigError:
        """Make the error of a value that breaks a rule, with its place."""
        line = self.lines.get(key)
        return ConfigError(f"{self.source}{f':{line}' if line else ''}: {key}={self[key]} {rule}")

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.given.get(key, self.tables.rules["defaults"].get(key))

    def whole(self, key: str, otherwise: int | None = None) -> int:
        """Read a whole number, `otherwise` where there is none. Raises ConfigError for what is none."""
        return self._number(int, "whole number", key, otherwise)

    def count(self, key: str) -> int:
        """Read a whole number of at least 1. Raises ConfigError for another."""
        if (found := self.whole(key)) < 1:
            raise self.error(key, "must be a number of at least 1")
        return found

    def decimal(self, key: str) -> float:
        """Read a number, 0 where there is none. Raises ConfigError for what is none."""
        return self._number(float, "number", key, 0.0)

    def text(self, key: str) -> str:
        """Read a text, empty where there is none. Raises ConfigError for a list or a mapping."""
        value = self[key]
        if isinstance(value, list | dict):
            raise self.error(key, "is not text")
        return "" if value is None else str(value)

    def files(self, key: str) -> str:
        """Read one file, or a list of them, as a text with commas."""
        value = self[key]
        return ",".join(map(str, value)) if isinstance(value, list) else self.text(key)

    def _number(self, kind: type[Number], name: str, key: str, otherwise: Number | None) -> Number:
        value = self[key]
        if value in (None, "", "null") and otherwise is not None:
            return otherwise
        try:
            read: Number | None = kind(value)
        except (TypeError, ValueError, OverflowError):
            read = None
        rounded = isinstance(value, float) and read != value  # 2.5 is not a number of responses
        if read is None or rounded or isinstance(value, bool) or not math.isfinite(read):
            raise self.error(key, f"is not a {name}")
        return read

    def has(self, key: str) -> bool:
        """Tell whether a setting is given and on."""
        self.read.add(key)
        value = self.given.get(key)
        return value not in OFF and value not in ([], {}) and value != -1

    def below(self, prefix: str) -> dict[str, Any]:
        """Take all settings whose names begin so, by the rest of their names."""
        self.read.add(f"{prefix}*")
        return {key[len(prefix) :]: value for key, value in self.given.items() if key.startswith(prefix)}
