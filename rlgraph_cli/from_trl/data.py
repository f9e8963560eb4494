"""Reads where a script's data come from, and what it makes of them."""

import ast
from dataclasses import dataclass, field
from typing import Any

from rlgraph_cli.from_trl.values import Source, Unreadable
from rlgraph_cli.translate.settings import Setting, Unread

FILES = (".parquet", ".json", ".jsonl")
READERS = {"from_json": "json", "from_parquet": "parquet", "from_csv": "csv"}


@dataclass
class Data:
    """A data set: its files, or the id of the hub's with what to take of it, or the rows that the script writes; and what follows."""

    files: str = ""
    taken: str = ""  # configuration and split of a data set of the hub
    rows: ast.expr | None = None
    columns: bool = False  # of the script's rows: a mapping of columns
    steps: list[str] = field(default_factory=list)  # calls of rg.data.Rows
    most: str = ""  # how many of the rows, an expression of `made`
    reads: list[ast.AST] = field(default_factory=list)  # the expressions in them


def data_of(source: Source, key: str, node: ast.expr) -> tuple[Data, list[Setting]]:
    """Read a data set, and list its settings. A step that has no counterpart is a setting of its own."""
    data = Data()
    settings: list[Setting] = []
    try:
        line, place = node.lineno, None
        while True:
            made = source.follow(node)
            match made:
                case ast.IfExp(test=test, body=body, orelse=orelse):
                    node = body if source.read(test) else orelse
                case ast.Constant(value=None):
                    return data, settings
                case ast.Subscript(value=of, slice=part):
                    node, place = of, source.read(part)
                case ast.Call(func=ast.Attribute(value=of, attr="select" | "take" | "train_test_split" as attr)) if not data.steps:
                    settings.append(_take(source, data, key, attr, made))
                    node, place = of, None
                case ast.Call(func=ast.Attribute(value=of, attr=attr)) if not attr.startswith("from_"):
                    settings.append(_step(source, data, key, attr, made))
                    node = of
                case ast.Call():
                    _origin(source, data, made, place)
                    said = data.files or "the rows of the script"
                    return data, [Setting(key, said, f"{key}={said}", line), *reversed(settings)]
                case _:
                    raise Unreadable(made, "cannot be read as a data set; write load_dataset(…), or pass -- --dataset_name FILE")
    except Unreadable as error:
        return data, [Setting(key, Unread(error.why), f"{key}={ast.unparse(node)}", line)]


def _origin(source: Source, data: Data, call: ast.Call, place: Any) -> None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
    named = {each.arg: each.value for each in call.keywords}
    if name in ("from_list", "from_dict") and call.args:
        data.rows, data.columns = call.args[0], name == "from_dict"
        data.reads.append(call.args[0])
        return
    if name not in ("load_dataset", *READERS):
        raise Unreadable(call, "cannot be read as a data set; write load_dataset(…), or pass -- --dataset_name FILE")
    first = READERS.get(name) or source.read(call.args[0] if call.args else named["path"])
    if not first:
        raise Unreadable(call, "names no data set; pass -- --dataset_name FILE")
    if first in ("json", "parquet", "csv"):
        files = source.read(call.args[0] if name in READERS else named["data_files"])
        files = files.get(place or "train") if isinstance(files, dict) else files
        data.files = ",".join(files) if isinstance(files, list) else str(files)
    else:
        split = source.read(named["split"]) if "split" in named else place
        split = split[place] if isinstance(split, list) else split or place or "train"
        config = source.read(call.args[1] if len(call.args) > 1 else named["name"]) if len(call.args) > 1 or "name" in named else None
        data.files, data.taken = str(first), ", ".join(str(part) for part in (config, split) if part)
    if first == "csv":
        raise Unreadable(call, "is a CSV; write it as JSON lines or parquet")


def _take(source: Source, data: Data, key: str, attr: str, call: ast.Call) -> Setting:
    """Read how many rows are taken: the first ones, or a part of a split, which TRL draws."""
    text = f"{key}.{attr}({', '.join(map(ast.unparse, [*call.args, *call.keywords]))})"
    match call:
        case ast.Call(args=[ast.Call(func=ast.Name(id="range"), args=[count])]) | ast.Call(args=[count], func=ast.Attribute(attr="take")):
            data.most = str(source.read(count))
        case ast.Call(func=ast.Attribute(attr="train_test_split"), keywords=[ast.keyword(arg="test_size", value=size), *_]):
            held = source.read(size)
            data.most = f"len(made) - {held}" if held >= 1 else f"int({1 - held:g} * len(made))"
        case _:
            return Setting("train_dataset.other", True, text, call.lineno)
    return Setting(f"train_dataset.{attr}", True, text, call.lineno)


def _step(source: Source, data: Data, key: str, attr: str, call: ast.Call) -> Setting:
    """Read a step: `map` and `filter` by a function of one row become those of rg.data.Rows."""
    text, name = f"{key}.{attr}({', '.join(map(ast.unparse, call.args))})"[:80], f"train_dataset.{attr}"
    known = {each.arg for each in call.keywords} <= {
        "function",
        "remove_columns",
        "num_proc",
        "desc",
        "load_from_cache_file",
        "keep_in_memory",
    }
    functions = [*call.args, *(each.value for each in call.keywords if each.arg == "function")]
    if attr not in ("map", "filter"):
        return Setting(name, True, text, call.lineno)
    made = source.follow(functions[0]) if len(functions) == 1 and known else call
    arguments = len(made.args.args) if isinstance(made, ast.FunctionDef | ast.Lambda) else 0
    if arguments != 1:
        return Setting(name, Unread("is not a function of one row; write the rows that it makes to a file"), text, call.lineno)
    said = ast.unparse(made if isinstance(made, ast.Lambda) else functions[0])
    called = f"({said})" if isinstance(made, ast.Lambda) else said
    data.steps.insert(0, f".filter({said})" if attr == "filter" else f".map(lambda row: row | {called}(row))")
    data.reads.append(functions[0])
    return Setting(name, True, text, call.lineno)
