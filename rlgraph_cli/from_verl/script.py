"""Reads what starts a training of verl: a shell script, a configuration file, or overrides as hydra takes them."""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlgraph.errors import ConfigError
from rlgraph_cli.translate.settings import Setting

LIMIT_S = 10.0  # for a script that only sets variables
MODULE = re.compile(r"(verl|recipe)(\.\w+)+|\S*main_ppo\.py|\S*sft_trainer\.py")
UNSET = re.compile(r"line (\d+): (\w+): (unbound variable|parameter null or not set|.*)")
LAST = "\1"  # ends the words of a command in the record

# What bash reads before a script, which it then reads restricted: programs by path and files to write are refused, and PATH has none. What
# would start Python, Ray or any other program writes its words to the record instead.
BEFORE_SCRIPT = r"""
trap '' PIPE
__record() { printf '%s\0' "$@" $'\1' >&RECORD; }
python3() { if [ "${1:-}" = -c ]; then return 1; fi; __record python3 "$@"; }
python() { python3 "$@"; }
command_not_found_handle() { __record "$@"; }
cd() { :; }
source() { :; }
ulimit() { :; }
kill() { :; }
wait() { :; }
exec() { "$@"; }
basename() { local name="${1%/}"; name="${name##*/}"; echo "${name%"${2:-}"}"; }
dirname() { case "$1" in */*) echo "${1%/*}";; *) echo .;; esac; }
PATH=/nonexistent
"""


@dataclass(frozen=True)
class Call:
    """What starts a training: the module of verl that runs, the configuration it names, and its settings."""

    source: str
    module: str
    config: str
    settings: tuple[Setting, ...]


def read_call(path: Path | None, overrides: Sequence[str]) -> Call:
    """Read a script (*.sh), a configuration (*.yaml) or nothing but overrides; `overrides` come last, as behind verl's own command.

    Raises ConfigError for a file that is missing, starts no training of verl or needs a variable, and for words that are not overrides.
    """
    if path is None:
        if not overrides:
            raise ConfigError("from-verl: give a script (*.sh), a configuration (*.yaml), or overrides behind `--`, as verl takes them")
        return Call("overrides", "verl.trainer.main_ppo", "", tuple(parse_override(text, 0) for text in overrides))
    if not path.is_file():
        raise ConfigError(f"from-verl: file '{path}' not found; pass a script (*.sh) or a configuration (*.yaml) of verl")
    if path.suffix in (".yaml", ".yml"):
        return _read_config(path, overrides)
    words = _last_training(path, *_run_shell(path, overrides))
    at = next(index for index, word in enumerate(words) if MODULE.fullmatch(word))
    lines = path.read_text(encoding="utf-8").splitlines()
    config, settings = "", []
    for word, key in (
        ("--nnodes", "trainer.nnodes"),
        ("--nproc_per_node", "trainer.n_gpus_per_node"),
        ("--nproc-per-node", "trainer.n_gpus_per_node"),
    ):
        if size := _option(words[:at], word):
            settings.append(parse_override(f"{key}={size}", _find_line(lines, word)))
    rest = iter(words[at + 1 :])
    for word in rest:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            value = value or next(rest, "")
            config = value if name == "--config-name" else config
        else:
            settings.append(parse_override(word, _find_line(lines, word.partition("=")[0]), path))
    return Call(str(path), words[at], config.removesuffix(".yaml"), tuple(settings))


def parse_override(text: str, line: int, path: Path | None = None) -> Setting:
    """Read `key=value`, `+key=value`, `++key=value` or `~key`, with the value as YAML. Raises ConfigError for anything else.

    >>> parse_override("+trainer.logger=['console','wandb']", 7)
    Setting(key='trainer.logger', value=['console', 'wandb'], text="+trainer.logger=['console','wandb']", line=7)
    """
    key, sign, value = text.lstrip("+").partition("=")
    if key.startswith("~"):
        return Setting(key[1:], None, text, line)
    if not sign or not re.fullmatch(r"[\w@./-]+", key):
        where = f"{path}:{line}" if path and line else str(path or "from-verl")
        raise ConfigError(f"{where}: '{text}' is not an override of verl; write key=value, +key=value or ~key")
    quoted = re.fullmatch(r"'(\[.*\])'|\"(\[.*\])\"", value)  # a list in quotes of hydra's own
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={(quoted[1] or quoted[2]) if quoted else value}"]), resolve=False)
    except OmegaConfBaseException:
        return Setting(key, value, text, line)
    return Setting(key, read["value"] if isinstance(read, dict) else value, text, line)


def _read_config(path: Path, overrides: Sequence[str]) -> Call:
    """Read a configuration as a list of its leaves."""
    try:
        read = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # noqa: BLE001 (each parser of YAML has errors of its own)
        raise ConfigError(f"'{path}' is not YAML: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"'{path}' holds no settings of verl; give a configuration such as outputs/…/.hydra/config.yaml")
    leaves = [Setting(key, value, f"{key}={value}") for key, value in _leaves(read, "")]
    module = "verl.trainer.sft_trainer" if "optim" in read and "actor_rollout_ref" not in read else "verl.trainer.main_ppo"
    if "async_training" in read:
        module = "verl.experimental.fully_async_policy.fully_async_main"
    elif "rollout" in read:
        module = "verl.experimental.one_step_off_policy.main_ppo"
    return Call(str(path), module, "", (*leaves, *(parse_override(text, 0) for text in overrides)))


def _leaves(tree: Mapping[Any, Any], above: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{above}{name}"
        found += _leaves(value, f"{key}.") if isinstance(value, dict) and value else [(key, value)]
    return found


def _run_shell(path: Path, arguments: Sequence[str]) -> tuple[list[list[str]], str]:
    """Let bash read a script, and return the programs that it would have started, each with its line, and what bash said."""
    taken, given = os.pipe()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BASH_", "LD_"))}
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as before, open(taken, encoding="utf-8", errors="replace") as record:
        before.write(BEFORE_SCRIPT.replace("RECORD", str(given)))
        before.flush()
        try:
            running = subprocess.Popen(
                ["/bin/bash", "--noprofile", "--restricted", str(path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(given,),
                env={**environment, "BASH_ENV": before.name},
                text=True,
            )
        except OSError as error:
            raise ConfigError(
                f"from-verl reads scripts by /bin/bash, which does not start: {error}; give the overrides themselves"
            ) from None
        finally:
            os.close(given)
        try:
            _, said = running.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            raise ConfigError(f"'{path}' has not ended within {LIMIT_S:g} s, though nothing of it runs but the shell") from None
        words = record.read().split("\0")
    commands: list[list[str]] = [[]]
    for word in words[:-1]:
        commands.append([]) if word == LAST else commands[-1].append(word)
    return commands[:-1], said


def _last_training(path: Path, commands: list[list[str]], said: str) -> list[str]:
    """Choose the command that starts verl; of several the last one, as a script that prepares data first."""
    trainings = [words for words in commands if any(MODULE.fullmatch(word) for word in words)]
    if trainings:
        return trainings[-1]
    for found in reversed([*UNSET.finditer(said)]):
        line, name, what = found[1], found[2], found[3]
        if what == "unbound variable" or name.isupper():
            raise ConfigError(f"{path}:{line}: the script needs {name} ({what}); set it: {name}=… rlgraph from-verl {path}")
    last = said.strip().splitlines()[-1:] or ["nothing"]
    raise ConfigError(f"'{path}' starts no training of verl (no `python3 -m verl.…`); bash ended with: {last[0][:200]}")


def _option(words: Sequence[str], name: str) -> str:
    """Find what torchrun is given: `--name=VALUE` or `--name VALUE`, a number."""
    found = "".join(word.partition("=")[2] for word in words if word.startswith(f"{name}="))
    found = found or (words[words.index(name) + 1] if name in words[:-1] else "")
    return found if found.isdigit() else ""


def _find_line(lines: Sequence[str], word: str) -> int:
    """Find the line of a script that has a word, first with a value; 0 if it comes from elsewhere."""
    said = [(at, line) for at, line in enumerate(lines, 1) if not line.lstrip().startswith("#")]
    return next((at for sought in (f"{word}=", word) for at, line in said if sought in line), 0)
