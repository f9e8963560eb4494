"""Reads a script that trains with TRL: its trainer and the settings of it, without running it."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlgraph.errors import ConfigError
from rlgraph_cli.from_trl.data import Data, data_of
from rlgraph_cli.from_trl.rewards import Reward, rewards_of
from rlgraph_cli.from_trl.values import Binding, Parsed, Scope, Source, Unreadable
from rlgraph_cli.translate.settings import Setting, Tables, Unread

TRAINERS = {  # and the arguments that they accept by place
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "SFTTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "DPOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
PARSED = ("GRPOConfig", "SFTConfig", "DPOConfig", "ModelConfig", "ScriptArguments")  # dataclasses that TRL's parser fills
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Script:
    """A training as a script declares it: GRPO, SFT or DPO, its settings, its data, its rewards, and the source that they are part of."""

    path: Path
    kind: str
    tables: Tables
    settings: tuple[Setting, ...]
    train: Data | None
    evaluation: Data | None
    rewards: tuple[Reward, ...]
    source: Source


def tables_of(kind: str) -> Tables:
    """Read the tables of a trainer."""
    return Tables.read("TRL 1.16", Path(__file__).with_name("settings.yaml"), "all", kind)


def read_script(path: Path, words: Sequence[str]) -> Script:
    """Read a script of Python; `words` are the flags that it, or TRL's parser, would get.

    Raises ConfigError for a file that is missing or not Python, without a trainer or with several, and for words that are not flags.
    """
    if not path.is_file():
        raise ConfigError(f"from-trl: file '{path}' not found; pass a Python script that makes a trainer of TRL")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}:{getattr(error, 'lineno', 0)}: this is not Python: {error.args[0]}") from None
    made = [*_trainers(tree)]
    if len(made) != 1:
        lines = ", ".join(f"{path.name}:{call.lineno}" for _, call in made)
        found = f"{len(made)} trainers ({lines})" if made else "no trainer"
        raise ConfigError(f"{path}: the script makes {found}; from-trl reads scripts with one of {', '.join(TRAINERS)}")
    name, call = made[0]
    tables = tables_of(name.removesuffix("Trainer"))
    given = flags_of(words)
    declared = [*_declared(tree)]
    source = Source({**tables.rules["defaults"], **{each.key: each.value for each in declared}, **given}, path)
    _collect(source, tree, call)
    try:
        known = [each for each in declared if each.line and tables.outcome_of(each).kind != "unknown"]
        own = {each.key for each in declared} - {each.key for each in known}  # the script's own flags, which are not settings of TRL
        given = {name: value for name, value in given.items() if name not in own}
        return _read_trainer(path, name, tables, call, source, given, [each for each in known if each.value is not None])
    except Unreadable as error:
        raise ConfigError(f"{path}:{error.line}: {error.why}") from None
    except RecursionError:
        raise ConfigError(f"{path}: a value of the script depends on itself; write the value") from None


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Read flags as TRL's parser does: `--name value`, `--name=value`, `--name a b`, `--name`, `--no_name`, and `--config FILE.yaml`.

    >>> flags_of(["--learning_rate", "1e-6", "--packing", "--report_to=none"])
    {'learning_rate': 1e-06, 'packing': True, 'report_to': 'none'}
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if sign else []
        elif name:
            found[name].append(word)
        else:
            raise ConfigError(f"from-trl: '{word}' is not a flag; write -- --learning_rate 1e-6")
    read = {name: [_yaml(word) for word in values] for name, values in found.items()}
    flags = {name: values[0] if len(values) == 1 else values or True for name, values in read.items()}
    off = {name[3:]: False for name, value in flags.items() if name.startswith("no_") and value is True}
    flags = {name: value for name, value in flags.items() if name[3:] not in off} | off
    if (file := flags.pop("config", None)) is None:
        return flags
    try:
        base = OmegaConf.to_container(OmegaConf.load(str(file)))
    except Exception as error:  # noqa: BLE001 (each parser of YAML has errors of its own)
        raise ConfigError(f"'{file}' is not YAML: {error}") from None
    return {**(base if isinstance(base, dict) else {}), **flags}


def _yaml(word: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(f"value: {word}"))["value"]
    except Exception:  # noqa: BLE001 (a word that is not YAML is text)
        return word


def _trainers(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Find the calls that make a trainer of TRL, or of a class that the script derives from one."""
    derived = {
        each.name: base
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for base in map(_last_name, each.bases)
        if base in TRAINERS
    }
    for each in ast.walk(tree):
        if isinstance(each, ast.Call) and (name := _last_name(each.func)) in {*TRAINERS, *derived}:
            yield derived.get(name, name), each


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _declared(tree: ast.Module) -> Iterator[Setting]:
    """Read the defaults of flags: of the script's own dataclasses of arguments, and, without a line, of argparse."""
    empty = Source({})
    for each in ast.walk(tree):
        fields: list[tuple[str, ast.expr]] = []
        match each:
            case ast.ClassDef(bases=bases, body=body) if any(_last_name(base) in PARSED for base in bases):
                fields = [(part.target.id, part.value) for part in body if isinstance(part, ast.AnnAssign) and part.value]  # type: ignore[union-attr]
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[*_, ast.Constant(value=str(flag))]):
                fields = [(flag.lstrip("-").replace("-", "_"), each)]
        for name, value in fields:
            if isinstance(value, ast.Call):
                named = {keyword.arg: keyword.value for keyword in value.keywords}
                factory = named.get("default_factory")
                value = factory.body if isinstance(factory, ast.Lambda) else named.get("default", ast.Constant(None))
            try:
                found = empty.read(value)
                yield Setting(name, found, f"{name}={found!r}", value.lineno if isinstance(each, ast.ClassDef) else 0)
            except Unreadable:
                continue


def _collect(source: Source, tree: ast.Module, call: ast.Call) -> None:
    """Collect the names of the module, and of the functions around the call, whose parameters their only caller gives."""
    module = Scope(0, 10**9)
    source.scopes = [module]
    source.collect(tree.body, module)
    around = [each for each in ast.walk(tree) if isinstance(each, FUNCTIONS) and call in ast.walk(each)]
    for function in sorted(around, key=lambda each: each.lineno):
        scope = Scope(function.lineno, function.end_lineno or function.lineno)
        source.scopes.insert(0, scope)
        callers = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and _last_name(each.func) == function.name]
        if len(callers) == 1:
            named = zip([each.arg for each in function.args.args], callers[0].args, strict=False)
            given = {**dict(named), **{each.arg: each.value for each in callers[0].keywords if each.arg}}
            scope.names = {name: [Binding(value, function.lineno)] for name, value in given.items()}
        source.collect(function.body, scope)


def _read_trainer(
    path: Path, name: str, tables: Tables, call: ast.Call, source: Source, given: Mapping[str, Any], fields: Sequence[Setting]
) -> Script:
    named = {**dict(zip(TRAINERS[name], call.args, strict=False)), **{each.arg: each.value for each in call.keywords if each.arg}}
    if any(each.arg is None for each in call.keywords):
        raise Unreadable(call, "has ** arguments that from-trl does not read; name the arguments")
    settings = [] if _last_name(call.func) == name else [Setting("trainer", name, f"{_last_name(call.func)}(…)", call.lineno)]
    rewards: tuple[Reward, ...] = ()
    if "reward_funcs" in given:
        named["reward_funcs"] = ast.copy_location(ast.parse(repr(given["reward_funcs"]), mode="eval").body, call)
    if "reward_funcs" in named:
        rewards, found = rewards_of(source, named.pop("reward_funcs"))
        settings += found
    if model := given.get("reward_model_name_or_path"):
        rewards = (*rewards, Reward(str(model), model=str(model)))
    data: dict[str, Data] = {}
    for key in ("train_dataset", "eval_dataset"):
        if key in named and not isinstance(named[key], ast.Constant):
            data[key], found = data_of(source, key, named.pop(key))
            settings += found
    for key, value in named.items():
        if key == "args":
            settings += _config(source, value, fields)
        elif key in ("model", "ref_model"):
            settings += _model(source, key, value)
        elif key in ("peft_config", "quantization_config"):
            settings += _adapter(source, value)
        else:
            settings.append(_setting(source, key, value))
    if "dataset_name" in given and "train_dataset" in data:
        data["train_dataset"].files = str(given["dataset_name"])
    known = {tables.name_of(key) for key in given}
    settings = [each for each in settings if not (isinstance(each.value, Unread) and each.key in known)]
    settings += [Setting(key, value, f"--{key} {value}") for key, value in given.items() if key != "reward_funcs"]
    return Script(path, name[:-7], tables, tuple(settings), data.get("train_dataset"), data.get("eval_dataset"), rewards, source)


def _setting(source: Source, key: str, node: ast.expr) -> Setting:
    try:
        value = source.read(node)
    except Unreadable as error:
        value = Unread(f"{error.why}, or pass -- --{key.rpartition('.')[2]} VALUE")
    return Setting(key, value, f"{key}={ast.unparse(node)}", node.lineno)


def _keywords(source: Source, call: ast.Call, prefix: str = "") -> list[Setting]:
    """Read the keywords of a call, and of the mappings that it unpacks."""
    found = []
    for each in call.keywords:
        made = source.follow(each.value)
        if each.arg == "quantization_config":
            found += _adapter(source, each.value)
        elif each.arg:
            found.append(_setting(source, prefix + each.arg, each.value))
        elif isinstance(made, ast.Call) and _last_name(made.func) == "dict":
            found += _keywords(source, made, prefix)
        else:
            found += [Setting(prefix + key, value, f"{key}={value!r}", each.value.lineno) for key, value in source.read(made).items()]
    return found


def _config(source: Source, node: ast.expr, fields: Sequence[Setting]) -> list[Setting]:
    """Read the configuration: a call of its class, or what TRL's parser reads, and the fields that the script then assigns."""
    made = source.follow(node)
    settings = [*fields]
    if isinstance(made, ast.Call) and _last_name(made.func).endswith(("Config", "Arguments")):
        settings = _keywords(source, made)
    elif not (isinstance(made, ast.Constant) and made.value is None) and source.read(node) is not Parsed:
        raise Unreadable(node, "cannot be read as a configuration; write GRPOConfig(…), SFTConfig(…) or DPOConfig(…) with values")
    names = {each.id for each in _names_of(source, node)}
    return settings + [_setting(source, target.attr, value) for owner, target, value in source.attributes if owner in names]


def _names_of(source: Source, node: ast.AST) -> Iterator[ast.Name]:
    """Yield the names by which an object goes, from the innermost scope outwards."""
    while isinstance(node, ast.Name):
        yield node
        node = source.find(node).node


def _model(source: Source, key: str, node: ast.expr) -> list[Setting]:
    """Read a model: a name, or the call of from_pretrained that makes it."""
    made = source.follow(node)
    if not (isinstance(made, ast.Call) and _last_name(made.func) == "from_pretrained" and made.args):
        return [_setting(source, key, node)]
    peft = "Peft" in ast.unparse(made.func)
    return [_setting(source, "peft_config.folder" if peft else key, made.args[0]), *_keywords(source, made, "model_init_kwargs.")]


def _adapter(source: Source, node: ast.expr) -> list[Setting]:
    """Read an adapter or a quantised base: a call of PEFT's or of transformers', or of TRL's function of the parsed flags."""
    made = source.follow(node)
    if not isinstance(made, ast.Call):
        return [_setting(source, "peft_config", node)]
    name = _last_name(made.func)
    if name in ("get_peft_config", "get_quantization_config"):
        return []  # the flags themselves
    if name == "BitsAndBytesConfig":
        return [each for each in _keywords(source, made) if not each.key.startswith("bnb_")]
    if name == "Mxfp4Config":
        return _keywords(source, made, "model_init_kwargs.")
    return [Setting("peft_config", True, f"peft_config={name}(…)", made.lineno), *_keywords(source, made, "peft_config.")]
