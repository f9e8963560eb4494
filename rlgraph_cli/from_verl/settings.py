"""What becomes of each setting of verl, as data: settings.yaml."""

import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from omegaconf import OmegaConf

from rlgraph.errors import ConfigError
from rlgraph_cli.from_verl.script import Call, Setting

OFF = (None, False, 0, "", "null", "None", "none", "disabled")  # values that turn a setting off
Number = TypeVar("Number", int, float)
Kind = Literal["becomes", "no effect", "not possible", "unknown"]


@dataclass(frozen=True)
class Outcome:
    """What becomes of a setting, and the words for it."""

    setting: Setting
    kind: Kind
    text: str


@functools.cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Read the tables once."""
    return cast("Mapping[str, Mapping[str, Any]]", OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("settings.yaml"))))


def outcome_of(setting: Setting) -> Outcome:
    """Look up what becomes of a setting: the longest pattern that fits its key counts."""
    key = name_of(setting.key)
    found = {kind: _longest(key, tables()[kind]) for kind in ("becomes", "no_effect", "refused")}
    pattern = max(found.values(), key=lambda pattern: len(pattern.replace("*", "")))
    if not pattern:
        near = difflib.get_close_matches(key, [*tables()["becomes"], *tables()["no_effect"]], 1, 0.85)
        return Outcome(setting, "unknown", f"verl 0.9.1 has no such setting; {f'did you mean {near[0]}?' if near else 'look for its name'}")
    if pattern == found["refused"]:
        why, *harmless = tables()["refused"][pattern]
        off = setting.value in OFF or setting.value in harmless or setting.value in ([], {})
        return Outcome(setting, "no effect", "off, or as by default") if off else Outcome(setting, "not possible", why)
    if key in tables()["accepted"] and setting.value not in tables()["accepted"][key]:
        known = ", ".join(map(str, tables()["accepted"][key]))
        return Outcome(setting, "not possible", f"{setting.value} has no counterpart; known are {known}")
    if pattern == found["becomes"]:
        return Outcome(setting, "becomes", tables()["becomes"][pattern])
    return Outcome(setting, "no effect", tables()["no_effect"][pattern])


def name_of(key: str) -> str:
    """Follow the other spellings of a setting to the one that the tables have."""
    aliases = tables()["aliases"]
    pattern = _longest(key, aliases)
    return key if not pattern else aliases[pattern].replace("*", key[len(pattern) - 1 :]) if "*" in pattern else aliases[pattern]


def _longest(key: str, patterns: Mapping[str, Any]) -> str:
    return max((pattern for pattern in patterns if fnmatchcase(key, pattern)), key=len, default="")


@dataclass
class Values:
    """The values of verl's settings, by the names that the tables have: those given, else verl's defaults. It notes what is read."""

    given: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    @staticmethod
    def of(call: Call, outcomes: Sequence[Outcome]) -> "Values":
        """Take the last value of each setting that has a counterpart, and the trainer that the configuration's name says."""
        taken = [each.setting for each in outcomes if each.kind in ("becomes", "no effect")]
        return Values({name_of(each.key): each.value for each in taken} | {"megatron": "megatron" in call.config})

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.given.get(key, tables()["defaults"].get(key))

    def whole(self, key: str, otherwise: int | None = None) -> int:
        """Read a whole number, `otherwise` where there is none. Raises ConfigError for what is none."""
        return self._number(int, "whole number", key, otherwise)

    def count(self, key: str) -> int:
        """Read a whole number of at least 1. Raises ConfigError for another."""
        if (found := self.whole(key)) < 1:
            raise ConfigError(f"from-verl: {key}={found} is no number of at least 1")
        return found

    def decimal(self, key: str) -> float:
        """Read a number, 0 where there is none. Raises ConfigError for what is none."""
        return self._number(float, "number", key, 0.0)

    def text(self, key: str) -> str:
        """Read a text, empty where there is none. Raises ConfigError for a list or a mapping."""
        value = self[key]
        if isinstance(value, list | dict):
            raise ConfigError(f"from-verl: {key}={value} is no text")
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
        rounded = isinstance(value, float) and read != value  # 2.5 is no number of responses
        if read is None or rounded or isinstance(value, bool) or not math.isfinite(read):
            raise ConfigError(f"from-verl: {key}={value} is no {name}")
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
