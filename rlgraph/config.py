"""Configuration: a dataclass gives names, types and defaults; a YAML file and key=value arguments override them."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlgraph.errors import ConfigError

T = TypeVar("T")


def config(cls: type[T], arguments: Sequence[str] | None = None) -> T:
    """Build an instance of the dataclass `cls`: its defaults < `config=FILE.yaml` < `key=value` arguments.

        >>> import dataclasses
        >>> Config = dataclasses.make_dataclass("Config", [("steps", int, 100), ("lr", float, 1e-6)])
        >>> config(Config, ["lr=1e-5"])
        Config(steps=100, lr=1e-05)

    With None, `arguments` come from the command line. `--help` prints the keys with their defaults and ends the program.

    Raises ConfigError for an unknown key, a value of the wrong type, a missing file, or an argument without `=`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    base = OmegaConf.structured(cls)
    if any(a in ("-h", "--help") for a in given):
        print(f"Settings, as key=value, or in a file given as config=FILE.yaml:\n\n{OmegaConf.to_yaml(base)}")
        raise SystemExit(0)
    for argument in given:
        if "=" not in argument or argument.startswith("-"):
            raise ConfigError(f"argument '{argument}' is not a setting; write key=value, where key is one of {sorted(base)}")
    files = [a.removeprefix("config=") for a in given if a.startswith("config=")]
    pairs = [a for a in given if not a.startswith("config=")]
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"config={file}: there is no such file")
    loaded = [_read_settings(file, list(base)) for file in files]
    for file, found in zip(files, loaded, strict=True):
        _check_texts(f"config={file}", cls, found)
    try:
        merged = OmegaConf.merge(base, *loaded, OmegaConf.from_dotlist([_quote_text_setting(cls, pair) for pair in pairs]))
        instance = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"setting '{error.full_key}': {reason}; the keys are {sorted(base)}") from error
    assert isinstance(instance, cls)
    return instance


def _read_settings(file: str, keys: list[str]) -> DictConfig:
    """Read a file of settings. Raises ConfigError if it is not YAML, or not a mapping."""
    try:
        found = OmegaConf.load(file)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"config={file}: the file is not valid YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(found, DictConfig):
        raise ConfigError(
            f"config={file}: it holds a {type(found).__name__.removesuffix('Config').lower()}; write a line `key: value` for each of {keys}"
        )
    return found


def _quote_text_setting(cls: type, pair: str) -> str:
    """Quote the value of an argument whose setting is text, where YAML would read something else: `name=007`, or nothing: `name=`."""
    key, _, text = pair.partition("=")
    if not text and get_type_hints(cls).get(key) is str:
        return f'{key}=""'
    found = OmegaConf.from_dotlist([pair])
    if [name for name, _ in _misread(cls, OmegaConf.to_container(found))] == [key]:
        return f"{key}={json.dumps(text)}"
    _check_texts(f"argument '{pair}'", cls, found)
    return pair


def _check_texts(where: str, cls: type, found: DictConfig) -> None:
    """Raise ConfigError for a setting that is text, and that YAML read as a number or a truth."""
    for key, value in _misread(cls, OmegaConf.to_container(found)):
        raise ConfigError(f"{where}: setting '{key}' is text, but YAML reads {value!r} there: put it in quotes")


def _misread(kind: Any, value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Find the texts of a setting of this type that YAML read as something else: their keys and what was read."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if isinstance(value, dict):
        fields = next((get_type_hints(option) for option in options if is_dataclass(option)), None)
        of = next((get_args(option)[1] for option in options if get_origin(option) is dict), Any)
        for name, entry in value.items():
            yield from _misread(of if fields is None else fields.get(name, Any), entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        of = next((get_args(option)[0] for option in options if get_origin(option) in (list, tuple)), Any)
        for number, entry in enumerate(value):
            yield from _misread(of, entry, f"{key}[{number}]")
    elif str in options and not isinstance(value, (str, type(None), *(option for option in options if isinstance(option, type)))):
        yield key, value
